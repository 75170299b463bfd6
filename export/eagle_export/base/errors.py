"""The error of everything in this package."""

from eagle_runtime.base.errors import EagleError


class ExportError(EagleError):
    """A checkpoint, a pair or a destination that cannot be exported. One sentence: what, where, what to do."""
