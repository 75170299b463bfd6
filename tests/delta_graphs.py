"""Graphs of one gated delta net as a step of native operators, and a slow, obvious form of what it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from operator_graphs import HIDDEN, Array, OneNode, opened_model, seen, serialised
from step_graphs import joined

INPUTS = {"qkv": 3, "b": 3, "a": 3, "keys": 3, "values": 3, "positions": 2, "mask": 4}  # and their ranks
ATTRIBUTES = ("key_heads", "heads", "key_width", "width")


@dataclass(frozen=True, slots=True)
class Delta:
    """tokens: that a row's convolution sees. weights [C, 1, tokens], rates (A_log) and biases (dt_bias) [H]. Past rows
    are its "keys" and the past state its "values", by the names of attention's caches."""

    key_heads: int
    heads: int
    key_width: int
    width: int
    tokens: int
    weights: Array = field(repr=False)
    rates: Array = field(repr=False)
    biases: Array = field(repr=False)

    def session(self, threads: int = 1, **other: Any) -> OneNode:
        """other: attributes and weights in the place of the right ones."""
        attributes = {name: other.pop(name, getattr(self, name)) for name in ATTRIBUTES}
        stored = {"weights": self.weights, "rates": self.rates, "biases": self.biases} | other
        node = helper.make_node("RowExactDelta", [*INPUTS, *stored], ["y0", "y1", "y2"], domain="eagle", **attributes)
        kinds: dict[str, tuple[int, int]] = {
            name: (TensorProto.INT64 if name == "positions" else TensorProto.FLOAT, rank)
            for name, rank in INPUTS.items()
        }
        return opened_model(joined(serialised([node], kinds, 3, stored)), threads)

    def feeds(self, rng: np.random.Generator, pending: int, parents: Sequence[int]) -> dict[str, Array]:
        """Inputs of a pass over a tree after some rows, of which the state lacks `pending`."""
        count, past = len(parents), self.tokens - 1 + pending
        channels = len(self.weights)
        rows = rng.standard_normal((1, past + count, channels + 2 * self.heads)).astype(np.float32)
        visible, depths = seen(parents)
        qkv, b, a = np.split(rows[:, past:], (channels, channels + self.heads), axis=-1)
        return {
            **{name: np.ascontiguousarray(part) for name, part in (("qkv", qkv), ("b", b), ("a", a))},
            "keys": rows[:, :past].copy(),
            "values": rng.standard_normal((self.heads, self.key_width, self.width)).astype(np.float32),
            "positions": (past + depths)[None],
            "mask": np.where(visible, 0, HIDDEN).astype(np.float32)[None, None],
        }

    def plain(self, state: Array) -> Array:
        """A state in the order of its dimensions [H, D, E]; the step has it in blocks of 32 columns, or of 8."""
        blocks = state.reshape(self.heads, -1, self.key_width, 8 if self.width % 32 else 32)
        plain: Array = blocks.transpose(0, 2, 1, 3).reshape(state.shape)
        return plain

    def in_words(self, feeds: dict[str, Array]) -> tuple[Array, Array]:
        """What a pass computes [T, H * E] and the new state [H, D, E], in fp64."""
        past = feeds["keys"][0].astype(np.float64)
        new = np.concatenate([feeds[name][0] for name in ("qkv", "b", "a")], -1).astype(np.float64)
        state = self.plain(feeds["values"]).astype(np.float64)
        for row in range(self.tokens - 1, len(past)):
            state, _ = self._step(state, past[row + 1 - self.tokens : row + 1])
        out = []
        for sees in feeds["mask"][0, 0] == 0:
            tokens, reached = np.concatenate([past, new[sees]]), state
            for row in range(len(past), len(tokens)):
                reached, read = self._step(reached, tokens[row + 1 - self.tokens : row + 1])
            out.append(read)
        return np.array(out), state

    def _step(self, state: Array, tokens: Array) -> tuple[Array, Array]:
        """The state after the last of a row's tokens, and what that reads."""
        keys, channels = self.key_heads * self.key_width, len(self.weights)
        x = np.einsum("kc,ck->c", tokens[:, :channels], self.weights[:, 0].astype(np.float64))
        x /= 1 + np.exp(-x)
        q, k, v = (part.reshape(-1, n) for part, n in self._parts(x, keys))
        b, a = np.split(tokens[-1, channels:], 2)
        q, k = (
            np.repeat(part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6), self.heads // self.key_heads, 0)
            for part in (q, k)
        )
        decay = np.exp(-np.exp(self.rates.astype(np.float64)) * np.logaddexp(0, a + self.biases))
        state = state * decay[:, None, None]
        change = (v - np.einsum("hd,hde->he", k, state)) / (1 + np.exp(-b))[:, None]
        state = state + k[:, :, None] * change[:, None]
        read: Array = np.einsum("hd,hde->he", q, state).reshape(-1) / np.sqrt(self.key_width)
        return state, read

    def _parts(self, x: Array, keys: int) -> list[tuple[Array, int]]:
        q, k, v = np.split(x, (keys, 2 * keys))
        return [(q, self.key_width), (k, self.key_width), (v, self.width)]


def delta(rng: np.random.Generator, key_heads: int, heads: int, key_width: int, width: int, tokens: int = 4) -> Delta:
    """One with random weights."""
    weights = rng.standard_normal((2 * key_heads * key_width + heads * width, 1, tokens)).astype(np.float32)
    rates, biases = rng.uniform(-4, 1, (2, heads)).astype(np.float32)
    return Delta(key_heads, heads, key_width, width, tokens, weights, rates, biases)
