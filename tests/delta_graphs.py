"""Graphs of one gated delta net or state space as a step of native operators, and a slow, obvious form of what it
computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from operator_graphs import HIDDEN, Array, OneNode, opened, seen

CACHED = {"keys": 3, "values": 3, "positions": 2, "mask": 4}  # inputs after those of the rows, and their ranks
ATTRIBUTES = ("key_heads", "heads", "key_width", "width")
DELTA, SCAN = 6, 7  # kinds of steps


@dataclass(frozen=True, slots=True)
class Delta:
    """tokens: that a row's convolution sees. stored: initializers in their order: weights [C, 1, tokens], a state
    space's offsets [C] of its convolution, rates (A_log) and biases (dt_bias) [H], a state space's skips (D) [H]. Past
    rows are its "keys" and the past state its "values", by the names of attention's caches."""

    key_heads: int
    heads: int
    key_width: int
    width: int
    tokens: int
    stored: Mapping[str, Array] = field(repr=False)

    @property
    def erases(self) -> bool:
        """Whether it is a delta net."""
        return "skips" not in self.stored

    @property
    def of_rows(self) -> dict[str, int]:
        """Inputs that every row has, and their widths."""
        gates = ("b", "a") if self.erases else ("dt",)
        return {"qkv": len(self.stored["weights"]), **dict.fromkeys(gates, self.heads)}

    def session(self, threads: int = 1, **other: Any) -> OneNode:
        """other: attributes and weights in the place of the right ones."""
        attributes = {f"s0_{name}": other.pop(name, getattr(self, name)) for name in ATTRIBUTES}
        ranks, stored = dict.fromkeys(self.of_rows, 3) | CACHED, {**self.stored, **other}
        inputs = [*ranks, *stored]
        plan = [DELTA if self.erases else SCAN, *range(1, 1 + len(inputs)), *[-1] * (16 - len(inputs)), 0, 1, 2]
        outputs = ["y0", "y1", "y2"]
        node = helper.make_node("RowExactSteps", ["plan", *inputs], outputs, domain="eagle", **attributes)
        kinds: dict[str, tuple[int, int]] = {
            name: (TensorProto.INT64 if name == "positions" else TensorProto.FLOAT, rank)
            for name, rank in ranks.items()
        }
        return opened([node], kinds, 3, {"plan": np.array([plan]), **stored}, threads)

    def feeds(self, rng: np.random.Generator, pending: int, parents: Sequence[int]) -> dict[str, Array]:
        """Inputs of a pass over a tree after some rows, of which the state lacks `pending`."""
        count, past = len(parents), self.tokens - 1 + pending
        ends = np.cumsum(list(self.of_rows.values()))
        rows = rng.standard_normal((1, past + count, ends[-1])).astype(np.float32)
        visible, depths = seen(parents)
        parts = zip(self.of_rows, np.split(rows[:, past:], ends[:-1], axis=-1), strict=True)
        return {
            **{name: np.ascontiguousarray(part) for name, part in parts},
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
        new = np.concatenate([feeds[name][0] for name in self.of_rows], -1).astype(np.float64)
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
        stored = {name: array.astype(np.float64) for name, array in self.stored.items()}
        keys, channels, sharing = self.key_heads * self.key_width, len(stored["weights"]), self.heads // self.key_heads
        x = np.einsum("kc,ck->c", tokens[:, :channels], stored["weights"][:, 0]) + stored.get("offsets", 0)
        x /= 1 + np.exp(-x)
        q, k, v = (part.reshape(-1, n) for part, n in self._parts(x, keys))
        q, k = np.repeat(q, sharing, 0), np.repeat(k, sharing, 0)
        step = np.logaddexp(0, tokens[-1, -self.heads :] + stored["biases"])
        state = state * np.exp(-np.exp(stored["rates"]) * step)[:, None, None]
        if self.erases:
            q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
            q /= np.sqrt(self.key_width)
            b = tokens[-1, channels : channels + self.heads]
            change = (v - np.einsum("hd,hde->he", k, state)) / (1 + np.exp(-b))[:, None]
        else:
            change = v * step[:, None]
        state = state + k[:, :, None] * change[:, None]
        read: Array = np.einsum("hd,hde->he", q, state)
        if not self.erases:
            read += stored["skips"][:, None] * v
        return state, read.reshape(-1)

    def _parts(self, x: Array, keys: int) -> list[tuple[Array, int]]:
        q, k, v = np.split(x, (keys, 2 * keys))
        return [(q, self.key_width), (k, self.key_width), (v, self.width)]


def delta(rng: np.random.Generator, key_heads: int, heads: int, key_width: int, width: int, tokens: int = 4) -> Delta:
    """A gated delta net with random weights."""
    weights = rng.standard_normal((2 * key_heads * key_width + heads * width, 1, tokens)).astype(np.float32)
    rates, biases = rng.uniform(-4, 1, (2, heads)).astype(np.float32)
    stored = {"weights": weights, "rates": rates, "biases": biases}
    return Delta(key_heads, heads, key_width, width, tokens, stored)


def scan(rng: np.random.Generator, key_heads: int, heads: int, key_width: int, width: int, tokens: int = 4) -> Delta:
    """A state space with random weights."""
    like = delta(rng, key_heads, heads, key_width, width, tokens)
    weights, rates, biases = like.stored.values()
    offsets, skips = (rng.standard_normal(n).astype(np.float32) for n in (len(weights), like.heads))
    stored = {"weights": weights, "offsets": offsets, "rates": rates, "biases": biases, "skips": skips}
    return replace(like, stored=stored)
