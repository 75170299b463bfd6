"""What a family of targets declares: in what its graph differs from Llama's, and what of it cannot be expressed.

Everything else, such as biases, widths and multipliers, is in the code of transformers that is traced.
Shapes: V vocabulary.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.experts import Experts
from eagle_export.reading.rope import rope_settings
from eagle_runtime.bundle.manifest import SamplingDefaults

if TYPE_CHECKING:
    from torch import Tensor  # imported with the class that a family names: configs are read without it

Config = Any  # a config of transformers, of the family's own class
Windows = tuple[int | None, ...]


def no_window(config: Config) -> Windows:
    """Every layer sees all keys."""
    return (None,) * int(config.num_hidden_layers)


def every_layer_rotates(config: Config) -> int:
    """Returns the number of layers."""
    return int(config.num_hidden_layers)


def whole_context(config: Config) -> int:
    """Returns config.max_position_embeddings."""
    return int(config.max_position_embeddings)


def plain_logits(config: Config, logits: Tensor) -> Tensor:
    """Returns the LM head's output as it is."""
    return logits


def no_moving_rope(checkpoint: Checkpoint) -> None:
    """Raises ExportError for a rotation that depends on the length of the text."""
    rope_settings(checkpoint.config, str(checkpoint.folder / "config.json"))


@dataclass(frozen=True, slots=True)
class Family:
    """A family of targets.

    name: as people call it. model_type: of config.json. causal_lm: transformers' class of the whole model.
    layer_norms: RMS norms in each layer. norm_offset: what the model adds to a norm's stored gain.
    experts: where a mixture of experts keeps them.
    windows: config -> for each layer the number of keys that a row sees, itself included; None for all.
    rotary_layers: config -> number of layers that rotate queries and keys.
    context: config -> the longest text for which the graph computes what transformers does.
    logits: config, the LM head's output [..., V] -> logits [..., V].
    refuse: raises ExportError for a config that transformers runs and this exporter cannot express.
    sampling: settings that the family's chat models are published with, for files that state none; None if there are no
    such settings of all of them."""

    name: str
    model_type: str
    causal_lm: str
    layer_norms: int = 2
    norm_offset: float = 0.0
    experts: Experts | None = None
    windows: Callable[[Config], Windows] = no_window
    rotary_layers: Callable[[Config], int] = every_layer_rotates
    context: Callable[[Config], int] = whole_context
    logits: Callable[[Config, Tensor], Tensor] = plain_logits
    refuse: Callable[[Checkpoint], None] = no_moving_rope
    sampling: SamplingDefaults | None = None

    def model_class(self) -> Any:
        """Returns transformers' class. Raises ExportError if this release of transformers has none."""
        import transformers

        cls = getattr(transformers, self.causal_lm, None)
        if cls is None:
            raise ExportError(
                f"transformers {transformers.__version__} has no {self.causal_lm}, which {self.name} needs; install a "
                "newer release"
            )
        return cls

    def modeling(self) -> ModuleType:
        """Returns the module of transformers that defines the class."""
        return sys.modules[self.model_class().__module__]


def cache_keyword(model: Any) -> str:
    """Returns under which name a model of transformers takes and returns its cache; it changed in release 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
