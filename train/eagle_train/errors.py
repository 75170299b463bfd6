"""What can be wrong with what is trained on."""

from eagle_runtime.errors import EagleError


class TrainError(EagleError):
    """Data, a target, a setting or a destination that cannot be used; one sentence with what, where, what to do."""
