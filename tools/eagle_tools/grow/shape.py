"""The shape that a pair is grown to, and the checks before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_export.graphs.pair import HeadPart, Pair
from eagle_export.heads.block_config import STATE_READER
from eagle_export.heads.reading import default_taps
from eagle_runtime.base.errors import EagleError
from eagle_runtime.bundle.head import HeadKind


class GrowError(EagleError):
    """The pair cannot be grown to the requested shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the grown target; the heads' layers get the same ones. A vocabulary of 0 keeps its old size."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 0
    draft_vocab: int = 0

    def config(self) -> dict[str, int]:
        """The config.json entries that the target and its heads share."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
        }


# Factor of the constant in heads whose LM head reads their output without a norm (axes.LOUDER). Its square is added to
# the sum of squares that the layer's norm divides by, of which it is 1e-5 or less.
PASSED_ON = 4.0


@dataclass(frozen=True, slots=True)
class Growth:
    """How heads of one kind grow. streams: how many residual streams their layers read side by side. passed_on: factor
    of the constant in what fc gives. usual_taps: whether they must read the taps that are usual. names_taps: whether
    their config names these, and the target's sizes. readers, norms, per_token: their tensors that read the stream as
    fc does, that are norms of it, and that have a row for each token of the target, and of the draft vocabulary."""

    streams: int = 1
    passed_on: float = 1.0
    usual_taps: bool = False
    names_taps: bool = False
    readers: tuple[str, ...] = ("fc.weight",)
    norms: tuple[str, ...] = ()
    per_token: tuple[str, ...] = ()


GROWN: Mapping[HeadKind, Growth] = {
    "eagle1": Growth(passed_on=PASSED_ON),
    "eagle3": Growth(streams=2, usual_taps=True),
    "block": Growth(
        names_taps=True,
        readers=("fc.weight", STATE_READER),
        norms=("hidden_norm.weight",),
        per_token=("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
    ),
}


def head_of(pair: Pair) -> HeadPart:
    """The pair's head. Every pair that is grown was opened with one."""
    assert pair.head is not None
    return pair.head


def check_shape(pairs: list[Pair], shape: Shape) -> None:
    """Raises GrowError if one of the sizes is too small for the old pair, or the pair has a part that cannot grow."""
    config = pairs[0].config
    layers = int(config.num_hidden_layers)
    smallest = {
        "layers": layers,
        "hidden": int(config.hidden_size),
        "heads": int(config.num_attention_heads),
        "kv_heads": pairs[0].num_kv_heads,
        "head_dim": pairs[0].head_dim,
        "intermediate": int(config.intermediate_size),
    }
    for name, old in smallest.items():
        if getattr(shape, name) < old:
            raise GrowError(f"{name} would be {getattr(shape, name)}, but the target has {old}; growth only adds")
    if shape.intermediate % 2:
        raise GrowError(f"intermediate {shape.intermediate} is odd, but inserted layers pair their units; add one")
    if shape.heads % shape.kv_heads:
        raise GrowError(f"{shape.heads} heads do not share {shape.kv_heads} key/value heads evenly; change one of them")
    if shape.hidden % shape.heads:
        raise GrowError(
            f"hidden {shape.hidden} is not a multiple of {shape.heads} heads, as Llama requires; change one"
        )
    if shape.vocab and shape.vocab < int(config.vocab_size):
        raise GrowError(f"vocab would be {shape.vocab}, but the target has {config.vocab_size}; growth only adds")
    rope: list[dict[str, Any]] = [config.rope_parameters or {}]
    rope += [head_of(pair).config.rope["rope_parameters"] for pair in pairs]
    for parameters in rope:
        if parameters.get("rope_type", "default") not in ("default", "linear", "llama3"):
            raise GrowError(f"rope scaling {parameters['rope_type']!r} depends on head_dim; grow a pair without it")
    for pair in pairs:
        head, folder = head_of(pair).config, head_of(pair).checkpoint.folder
        if head.hidden_size != int(config.hidden_size) or head_of(pair).own_embedding:
            raise GrowError(f"{folder} has an embedding of its own; only heads that share the target's grow")
        if head.borrows_lm_head or not head.taps:
            continue
        if GROWN[head.kind].usual_taps and head.taps != default_taps(layers):
            raise GrowError(f"{folder} taps layers {head.taps}; only the usual {default_taps(layers)} grow")
        added = shape.draft_vocab - head.draft_vocab_size
        if shape.draft_vocab and not 0 <= added <= (shape.vocab or head.vocab_size) - head.vocab_size:
            raise GrowError(
                f"draft_vocab {shape.draft_vocab} adds {added} draft tokens, which must be 0 or more and at most as "
                "many as vocab adds"
            )
