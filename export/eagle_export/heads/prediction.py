"""Multi-token-prediction layers (MTP): what producers call their tensors, in a target's checkpoint or in a folder of
their own, and which tensors of a target belong to them.

    model.mtp_layers.0.input_proj.weight -> fc.weight
    model.mtp_layers.0.self_attn.q_proj.weight -> layers.0.self_attn.q_proj.weight

Official names: embed_norm and hidden_norm (of the inputs), fc, layers.0.*, norm. Only the first of several layers is
read: it is fed with its own output, as vLLM does it (vllm/model_executor/models/mimo_mtp.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import rope_settings
from eagle_export.reading.families.qwen import PARTIAL_ROTATION
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.reading.stored_tensors import StoredTensor, grouped, queries_and_gates

NAMED = re.compile(r"(?:^|\.)(?:mtp_layers|mtp(?:\.layers)?)\.(\d+)?")  # MiMo, speculators; Qwen3-Next
APPENDED = re.compile(r"model\.layers\.(\d+)\.")  # DeepSeek: layers after the target's own
MEDUSA_HEADS = "medusa_head."
OFFICIAL = ("embed_norm.", "hidden_norm.", "fc.", "norm.")
QUERIES, GATE = "self_attn.q_proj.weight", "self_attn.output_gate.weight"  # of a layer


@dataclass(frozen=True, slots=True)
class LayerNames:
    """prefix: what the names of the layer's tensors begin with; {} stands for the target's number of layers. parts: the
    official beginning of a name -> that in the file, after the prefix; the first that fits is taken. alone: whether the
    folder holds nothing else, so that every other name is kept."""

    prefix: str
    parts: tuple[tuple[str, str], ...]
    alone: bool = False

    def held_by(self, head: Checkpoint) -> bool:
        """Whether a folder has such a layer."""
        marks = tuple(self._start(head) + stored for official, stored in self.parts if official in OFFICIAL)
        return any(name.startswith(marks) for name in head.tensors)

    def official(self, head: Checkpoint) -> Mapping[str, StoredTensor]:
        """Returns the layer's tensors by their official names. Raises ExportError if a norm or fc is missing."""
        start = self._start(head)
        for official, stored in self.parts:
            if official in OFFICIAL and f"{start}{stored}weight" not in head.tensors:
                raise ExportError(
                    f"{head.folder}: tensor {f'{start}{stored}weight'!r} is missing from its multi-token-prediction "
                    "layer; the checkpoint is incomplete or of another kind"
                )
        named = {name: self._renamed(name.removeprefix(start)) for name in head.tensors if name.startswith(start)}
        kept = {name: name for name in head.tensors if self.alone and name not in named}
        return {new: head.tensors[name] for name, new in (named | kept).items() if new is not None}

    def _start(self, head: Checkpoint) -> str:
        return self.prefix.format(head.config.get("num_hidden_layers"))

    def _renamed(self, name: str) -> str | None:
        """None for a tensor of a further layer."""
        for official, stored in self.parts:
            if name.startswith(stored):
                return official + name.removeprefix(stored)
        return None if re.match(r"layers\.[1-9]", name) else name


def _layer(embed: str, hidden: str, fc: str, norm: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(zip(OFFICIAL, (embed, hidden, fc, norm), strict=True)) + more


_BY_FUNCTION = _layer("token_layernorm.", "hidden_layernorm.", "input_proj.", "final_layernorm.", ("layers.0.", ""))
MIMO = LayerNames("model.mtp_layers.0.", _BY_FUNCTION)
SPECULATORS = LayerNames("mtp_layers.0.", _BY_FUNCTION, alone=True)
DEEPSEEK = LayerNames(
    "model.layers.{}.",
    _layer(
        "enorm.",
        "hnorm.",
        "eh_proj.",
        "shared_head.norm.",
        ("lm_head.", "shared_head.head."),
        ("embed_tokens.", "embed_tokens."),
        ("layers.0.", ""),
    ),
)
QWEN = LayerNames("mtp.", _layer("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm."))


def in_parts(head: Checkpoint) -> Checkpoint:
    """Returns a layer, with the official names, of which norms have their whole gains, and gates of attention are a
    tensor apart from the queries (Qwen3.5). Raises ExportError if there are no queries."""
    family = FAMILIES.get(str(head.config.get("model_type")))
    if family is None:
        return head
    tensors, config = dict(head.tensors), dict(head.config)
    for name, tensor in head.tensors.items():
        if offset := family.gain_offset(name):
            tensors[name] = tensor.plus(offset)
    if family.delta:
        both = head.require(f"layers.0.{QUERIES}", (None, None))
        heads, queries, gates = queries_and_gates(both, head.integer("num_attention_heads"))
        tensors[f"layers.0.{QUERIES}"] = grouped(both, heads, queries)
        tensors[f"layers.0.{GATE}"] = grouped(both, heads, gates)
        rope = rope_settings(config, str(head.folder / "config.json"))["rope_parameters"]
        share = config.get("partial_rotary_factor", PARTIAL_ROTATION)
        of_texts = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        config["rope_parameters"] = {"partial_rotary_factor": share, **of_texts}
        config["layer_types"] = None  # of the target's layers
    return replace(head, tensors=tensors, config=config)


def prediction_layers(target: Checkpoint) -> Mapping[str, int]:
    """Returns the tensors of a target that belong to such layers: name -> number of the layer, from 0."""
    own = target.config.get("num_hidden_layers")
    layers = {}
    for name in target.tensors:
        if (match := APPENDED.match(name)) and type(own) is int and int(match[1]) >= own:
            if f"{match[0]}eh_proj.weight" in target.tensors:
                layers[name] = int(match[1]) - own
        elif "mtp" in name and (match := NAMED.search(name)):
            layers[name] = int(match[1] or 0)
    return layers


def without_prediction_layers(target: Checkpoint) -> Checkpoint:
    """Returns the target that such layers, or Medusa's heads, were added to."""
    left_out = {*prediction_layers(target), *(name for name in target.tensors if name.startswith(MEDUSA_HEADS))}
    return replace(target, tensors={name: each for name, each in target.tensors.items() if name not in left_out})
