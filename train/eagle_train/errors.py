"""The errors of training."""

from eagle_runtime.base.errors import EagleError


class TrainError(EagleError):
    """Data, a target, a setting or a destination cannot be used. One sentence: what, where, and what to do."""


class RowError(TrainError):
    """A row of data cannot be used; others may."""
