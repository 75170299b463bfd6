"""Everything a user can get wrong, as exceptions that read as one sentence: what, where, what to do."""


class EagleError(Exception):
    """Base of all errors that are the input's fault, not the program's. Command lines print it and exit with 2."""


class BundleError(EagleError):
    """The bundle on disk is incomplete, altered or made for another version."""


class BackendError(EagleError):
    """The engine that should run the bundle is missing or refused it."""


class RequestError(EagleError):
    """A prompt or a decoding setting that cannot be served."""


class EagleWarning(UserWarning):
    """Something that works, but not as one would expect: said once, in one sentence."""


class BusyError(RequestError):
    """A model whose caches another thread has, for as long as it likes."""


class ClosedError(EagleError):
    """A model that was closed, or loaded before this process was forked."""


def is_panic(error: BaseException) -> bool:
    """Whether it is what a library in Rust raises where it gave up. Its class has no importable name, and is no
    Exception."""
    return type(error).__name__ == "PanicException"
