"""Exceptions for wrong input. Each message is one sentence: what is wrong, where, and what to do."""


class EagleError(Exception):
    """Base class of errors caused by the input, not by a bug. Commands print the message and exit with status 2."""


class BundleError(EagleError):
    """Raised for a bundle that is incomplete, altered or made for another version."""


class BackendError(EagleError):
    """Raised if the engine that should run a bundle is missing or refuses it."""


class RequestError(EagleError):
    """Raised for a prompt or a setting that cannot be served."""


class EagleWarning(UserWarning):
    """Warns once, in one sentence, of something that works otherwise than expected."""


class BusyError(RequestError):
    """Raised if another thread holds the model's caches for an unknown time."""


class ClosedError(EagleError):
    """Raised by a model that was closed, or loaded before this process was forked."""


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is the panic of a library written in Rust. Its class cannot be imported and is no
    subclass of Exception."""
    return type(error).__name__ == "PanicException"
