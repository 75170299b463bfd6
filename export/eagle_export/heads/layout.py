"""What is known of one producer's way to write a head's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from eagle_export.heads.ahead_reader import AheadNames
from eagle_export.heads.prediction import LayerNames
from eagle_export.reading.checkpoint import Checkpoint
from eagle_runtime.bundle.manifest import HeadKind

Ids = Literal["output", "input", "first"]
OutputNorm = Literal["logits", "recurrent", "none"]

# Sizes that transformers' Llama and Qwen3 configs share as defaults, which a config written as a difference leaves out.
TRANSFORMERS_DEFAULTS = (("num_attention_heads", 32), ("rms_norm_eps", 1e-6))
LLAMA_TYPES = ("llama", "qwen2", "qwen3", "mimo")  # their decoder layer is Llama's, with biases or q/k norms
PREDICTING = (*LLAMA_TYPES, "qwen3_5_text")  # targets whose own multi-token-prediction layer is read


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """One producer's layout. source: repository and path of the code that writes or reads it.

    architectures: of config.json, empty for any. keys: keys that config.json must have. tensors: what names of
    tensors must begin with. nested: key of the object with the decoder layer's own settings. defaults: settings that
    the producer leaves out of its config where they are the default of transformers' config class. layer: what the
    first layer's tensors begin with. id_key: key of the list of layer ids. ids: what id i in it names: the output of
    layer i (tap i + 1), its input (tap i), or outputs unless the first id is 2. norm_output: what that key means where
    it is true and where it is false; None if this producer does not write it. normed_residual: what a config without
    norm_before_residual means; None if two programs read it differently. default_fc_bias: whether a config without
    `bias` stands for a head with one. names: of the tensors of a multi-token-prediction layer, or of Medusa's or
    Hydra's heads; for hidden_first and masks_first see HeadConfig."""

    producer: str
    kind: HeadKind
    source: str
    architectures: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    nested: str | None = None
    defaults: tuple[tuple[str, Any], ...] = ()
    layer: str = "layers.0."
    id_key: str = "eagle_aux_hidden_state_layer_ids"
    ids: Ids = "first"
    norm_output: tuple[OutputNorm, OutputNorm] | None = None
    normed_residual: bool | None = False
    default_fc_bias: bool = False
    names: LayerNames | AheadNames | None = None
    hidden_first: bool = False
    masks_first: bool = False

    def fits(self, head: Checkpoint) -> bool:
        """Whether a folder has this layout."""
        return (
            (not self.architectures or bool(set(head.architectures) & set(self.architectures)))
            and all(key in head.config for key in self.keys)
            and all(any(name.startswith(start) for name in head.tensors) for start in self.tensors)
            and (self.names is None or self.names.held_by(head))
        )
