"""A pair's weights in memory, in fp64, and the operations on the rows and columns of its matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from eagle_export.graphs.pair import HeadPart, Pair
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD
from eagle_tools.harden.strength import HardenError

LAST_NORM = "model.norm"
LAYER_PARTS = {
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
HEAD_PARTS = {"fc", "norm", "lm_head", "hidden_norm"}
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of a model's attention: query heads, key/value heads, and the width of one."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Weights:
    """fp64 tensors of the target and, by kind, of its heads, which are changed in place. attention: sizes of the
    target's and of each head's."""

    target: Tensors
    heads: dict[str, Tensors]
    attention: dict[str, Attention]

    def models(self) -> dict[str, Tensors]:
        """Returns "target" and each kind of head -> its tensors."""
        return {"target": self.target, **self.heads}


@dataclass(frozen=True, slots=True)
class Reader:
    """A matrix whose columns from `start` read a normalised vector of the stream's width."""

    module: str
    start: int = 0


def head_part(pair: Pair) -> HeadPart:
    """The pair's head. Every pair that is hardened was opened with one."""
    assert pair.head is not None
    return pair.head


def read_weights(pairs: list[Pair]) -> Weights:
    """Reads the target of the pairs, which is the same one, and their heads. Raises HardenError for a tensor that is
    not of a plain Llama or EAGLE head."""
    target = {}
    for name, stored in pairs[0].target.tensors.items():
        if name.endswith("inv_freq"):
            continue  # follows from the config
        match = re.fullmatch(r"model\.layers\.\d+\.(.+)\.(weight|bias)", name)
        if name not in (EMBEDDING, LM_HEAD, f"{LAST_NORM}.weight") and not (match and match[1] in LAYER_PARTS):
            raise HardenError(f"{pairs[0].target.folder}: tensor {name!r} is unknown; only plain Llama targets harden")
        target[name] = stored.read().double()
    config = pairs[0].config
    attention = {"target": Attention(int(config.num_attention_heads), pairs[0].num_kv_heads, pairs[0].head_dim)}
    heads: dict[str, Tensors] = {}
    for pair in pairs:
        if pair.head is None:
            continue
        head = head_part(pair)
        if head.own_embedding or head.config.hidden_size != int(config.hidden_size):
            raise HardenError(
                f"{head.checkpoint.folder} has an embedding of its own; only heads that share the target's harden"
            )
        heads[head.config.kind] = _head_tensors(head)
        sizes = head.config.num_heads, head.config.num_kv_heads, head.config.head_dim
        attention[head.config.kind] = Attention(*sizes)
    return Weights(target, heads, attention)


def _head_tensors(head: HeadPart) -> Tensors:
    """The head's tensors without the embedding, which is the target's, and the vocabulary map, which is copied."""
    tensors = {}
    for name, stored in head.checkpoint.tensors.items():
        if name in ("embed_tokens.weight", "d2t", "t2d") or name.endswith("inv_freq"):
            continue
        match = re.fullmatch(r"(?:(?:midlayer|layers\.\d+)\.)?(.+)\.(weight|bias)", name)
        if not match or match[1] not in LAYER_PARTS | HEAD_PARTS:
            raise HardenError(f"{head.checkpoint.folder}: tensor {name!r} is unknown; only plain EAGLE heads harden")
        tensors[name] = stored.read().double()
    return tensors


def layers(tensors: Tensors) -> list[str]:
    """Returns the prefixes of a model's decoder layers in order, such as "model.layers.0."."""
    prefixes = {match[1] for name in tensors if (match := re.match(r"(.*?(?:layers\.\d+|midlayer)\.)", name))}
    return sorted(prefixes, key=lambda prefix: [int(number) for number in re.findall(r"\d+", prefix)])


def norm_readers(tensors: Tensors) -> dict[str, list[Reader]]:
    """Returns each norm of a model whose output only matrices of the model read -> these matrices.

    The target's last norm is missing: an EAGLE-1 head's hidden state replaces its output."""
    readers: dict[str, list[Reader]] = {}
    for layer in layers(tensors):
        projections = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
        if f"{layer}input_layernorm.weight" in tensors:
            readers[f"{layer}input_layernorm"] = [Reader(name) for name in projections]
        if f"{layer}hidden_norm.weight" in tensors:
            width = len(tensors[f"{layer}hidden_norm.weight"])
            readers[f"{layer}hidden_norm"] = [Reader(name, width) for name in projections]
        readers[f"{layer}post_attention_layernorm"] = [Reader(f"{layer}mlp.{name}_proj") for name in ("gate", "up")]
    if "norm.weight" in tensors:
        readers["norm"] = [Reader("lm_head")]
    return readers


def columns(tensors: Tensors, reader: Reader, width: int) -> Tensor:
    """Returns a view [out, width] of the columns with which the matrix reads the vector."""
    return tensors[f"{reader.module}.weight"][:, reader.start : reader.start + width]


def scale_rows(tensors: Tensors, module: str, factors: Tensor) -> None:
    """Multiplies each row of a layer's matrix, and its bias, by its factor [out]."""
    tensors[f"{module}.weight"] *= factors[:, None]
    if f"{module}.bias" in tensors:
        tensors[f"{module}.bias"] *= factors


def map_rows(tensors: Tensors, module: str, matrix: Tensor) -> None:
    """Applies the matrix [out', out] to what a layer writes."""
    for name in (f"{module}.weight", f"{module}.bias"):
        if name in tensors:
            tensors[name] = matrix @ tensors[name]


def map_columns(tensors: Tensors, module: str, matrix: Tensor) -> None:
    """Makes a layer read the vector that the isometry [in', in] maps its input to; several inputs are mapped alike."""
    name = f"{module}.weight"
    old = tensors[name]
    tensors[name] = (old.view(len(old), -1, matrix.shape[1]) @ matrix.T).flatten(1)


def map_stream(weights: Weights, matrix: Tensor) -> None:
    """Maps the residual stream of the target and its heads, and the features between them, by an isometry [H', H].
    Norms keep their weights."""
    for name in (EMBEDDING, LM_HEAD):
        if name in weights.target:
            weights.target[name] = weights.target[name] @ matrix.T
    for tensors in weights.models().values():
        if "fc.weight" in tensors:
            map_columns(tensors, "fc", matrix)
            map_rows(tensors, "fc", matrix)
        if "norm.weight" in tensors:  # EAGLE-3 has an LM head of its own
            map_columns(tensors, "lm_head", matrix)
        for layer in layers(tensors):
            for module in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                map_columns(tensors, layer + module, matrix)
            for module in ("self_attn.o_proj", "mlp.down_proj"):
                map_rows(tensors, layer + module, matrix)
