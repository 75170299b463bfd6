"""What can be wrong with what is calibrated."""

from eagle_runtime.errors import EagleError


class CalibrationError(EagleError):
    """Text, a bundle or a calibration folder that cannot be used; one sentence with what, where, what to do."""


class FolderError(EagleError):
    """A folder that cannot be written now: another process is at it, or the disk does not let anyone."""
