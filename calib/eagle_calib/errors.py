"""The errors of this package."""

from eagle_runtime.base.errors import EagleError


class CalibrationError(EagleError):
    """Text, a bundle or a calibration folder that cannot be used. One sentence: what, where, what to do."""


class FolderError(EagleError):
    """A folder that cannot be written now: another process is writing it, or the disk refuses."""
