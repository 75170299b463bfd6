"""What can be wrong with what is exported."""

from eagle_runtime.errors import EagleError


class ExportError(EagleError):
    """A checkpoint, a pair or a destination that cannot be exported; one sentence with what, where, what to do."""
