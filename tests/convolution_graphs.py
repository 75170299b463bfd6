"""Graphs of one short convolution as a step of native operators, and a slow, obvious form of what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from operator_graphs import Array, Heads, OneNode, opened_model, serialised
from step_graphs import joined

CACHE = {"keys": 3, "values": 4, "positions": 2, "mask": 4}  # inputs and their ranks


@dataclass(frozen=True, slots=True)
class Convolution:
    """heads: of the cache. tokens: that a row sees. weights [H, 1, tokens], bias [H]."""

    heads: Heads
    tokens: int
    biased: bool
    weights: Array = field(repr=False)
    bias: Array = field(repr=False)

    @property
    def size(self) -> int:
        """H"""
        return 2 * self.heads.kv_heads * self.heads.width

    def session(self, threads: int = 1, **other: Any) -> OneNode:
        """other: attributes and weights in the place of the right ones."""
        attributes: dict[str, Any] = {"kv_heads": self.heads.kv_heads, "width": self.heads.width}
        attributes |= {name: other.pop(name) for name in list(other) if name in attributes}
        stored = {"weights": self.weights, **({"bias": self.bias} if self.biased else {})} | other
        names = ["x", *CACHE, *stored]
        node = helper.make_node("RowExactConvolution", names, ["y0", "y1", "y2"], domain="eagle", **attributes)
        kinds: dict[str, tuple[int, int]] = {
            name: (TensorProto.FLOAT, rank) for name, rank in (("x", 3), *CACHE.items())
        }
        kept = helper.np_dtype_to_tensor_dtype(np.dtype(self.heads.kept))
        kinds |= {"positions": (TensorProto.INT64, 2), "keys": (kept, 3), "values": (kept, 4)}
        return opened_model(joined(serialised([node], kinds, 3, stored)), threads)

    def feeds(self, rng: np.random.Generator, length: int, parents: Sequence[int], spare: int = 3) -> dict[str, Array]:
        """Inputs of a pass over a tree after `length` columns."""
        rows = {"x": rng.standard_normal((len(parents), 3 * self.size)).astype(np.float32)}
        return self.heads.feeds(rows, self.heads.past(rng, length), parents, spare)

    def in_words(self, feeds: dict[str, Array]) -> Array:
        """What a pass computes [T, H], in fp64."""
        before, after, x = np.split(feeds["x"][0], 3, axis=-1)
        new = (before * x).astype(self.heads.kept).astype(np.float64)
        keys, values = feeds["keys"].transpose(1, 0, 2), feeds["values"].transpose(2, 0, 1, 3)
        length = int(feeds["positions"][0, 0])
        past = np.concatenate([part[:length].reshape(length, self.size // 2) for part in (keys, values)], -1).astype(
            np.float64
        )
        out = np.zeros_like(new)
        for t, mask in enumerate(feeds["mask"][0, 0]):
            tokens = np.concatenate([past, new[mask == 0]])[-self.tokens :]
            out[t] = np.einsum("kh,hk->h", tokens, self.weights[:, 0, self.tokens - len(tokens) :].astype(np.float64))
        made: Array = after * (out + self.bias * self.biased)
        return made


def convolution(rng: np.random.Generator, heads: Heads, tokens: int, *, biased: bool = False) -> Convolution:
    """One with random weights."""
    size = 2 * heads.kv_heads * heads.width
    weights = rng.standard_normal((size, 1, tokens)).astype(np.float32)
    return Convolution(heads, tokens, biased, weights, rng.standard_normal(size).astype(np.float32))
