"""Graphs of one native operator, and slow, obvious forms of what the operators compute.

Letters: T rows, K inputs of a product, N its columns, B channels per block; H query heads, KV key heads of width D, L
committed columns of C, C / cut pieces of a value."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

from eagle_export.recipes.blocks import Blocks, Grid
from eagle_export.recipes.weight_blocks import packed
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.operators import native_operators

Array = npt.NDArray[Any]
HIDDEN = float(np.finfo(np.float32).min)


def bits(array: Array) -> Array:
    """The numbers' bits, of which two that are equal may have others: -0 and 0, or NaNs."""
    return array.view(f"u{array.itemsize}")


def library() -> Path:
    """Of the installed operators."""
    path = native_operators().library
    assert path is not None
    return path


@contextlib.contextmanager
def instructions(name: str) -> Iterator[None]:
    """Graphs that are opened in the block use this instruction set. Raises ValueError where this processor lacks it."""
    operators = ctypes.CDLL(str(library()))
    operators.eagle_use_instruction_set.argtypes = [ctypes.c_char_p]
    if not operators.eagle_use_instruction_set(name.encode()):
        raise ValueError(f"no {name} here")
    try:
        yield
    finally:
        operators.eagle_use_instruction_set(None)


def announce(lengths: list[int], *shapes: list[dict[str, Array]]) -> None:
    """As the runtime does before a pass; of graphs with one layer of each shape."""
    numbers = [
        (one["keys"].ctypes.data, 1, one["values"].ctypes.data, 1, one["keys"].shape[1], length, 0)
        for texts in shapes
        for one, length in zip(texts, lengths, strict=True)
    ]
    announce_numbers(numbers, len(lengths), len(shapes) or 1)


def announce_numbers(numbers: Sequence[tuple[int, ...]], count: int, shapes: int = 1) -> None:
    """Announces so many texts, each by seven numbers for every shape of layers' caches."""
    array = np.array(numbers, np.int64)
    take: Any = ctypes.CDLL(str(library())).eagle_next_texts
    assert take(ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(count), ctypes.c_int64(shapes)) == 0


def write_rows(where: int) -> None:
    """As the runtime does around a pass whose new rows go into the caches: 0 no, 1 too, 2 there alone."""
    ctypes.CDLL(str(library())).eagle_write_rows(ctypes.c_int(where))


def runs_here(name: str) -> bool:
    """Whether the operators have a form for this instruction set that this processor runs."""
    if native_operators().library is None:
        return name == "plain"
    try:
        with instructions(name):
            return True
    except ValueError:
        return False


# Forms of the operators that this processor runs; the plain one defines the bits.
INSTRUCTION_SETS = tuple(name for name in ("plain", "avx2", "vnni", "avx512", "neon") if runs_here(name))


@dataclass(frozen=True, slots=True)
class OneNode:
    """model: the serialised graph. session: of one thread, unless it was opened with more."""

    model: bytes
    session: Any

    def run(self, names: list[str] | None, feeds: dict[str, Array]) -> list[Array]:
        """The outputs of these names; None for all."""
        outputs: list[Array] = self.session.run(names, feeds)
        return outputs


def opened(
    nodes: Sequence[Any], inputs: dict[str, tuple[int, int]], outputs: int, weights: dict[str, Array], threads: int = 1
) -> OneNode:
    """A session of the graph that `serialised` makes."""
    return opened_model(serialised(nodes, inputs, outputs, weights), threads)


def serialised(
    nodes: Sequence[Any], inputs: dict[str, tuple[int, int]], outputs: int, weights: dict[str, Array]
) -> bytes:
    """A graph. inputs: name -> type and rank. Outputs are y0, y1, ..."""
    infos = [helper.make_tensor_value_info(name, kind, [None] * rank) for name, (kind, rank) in inputs.items()]
    outs = [helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, None) for i in range(outputs)]
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "one", infos, outs, tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("eagle", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    content: bytes = model.SerializeToString()
    return content


def opened_model(content: bytes, threads: int = 1) -> OneNode:
    """A session of a serialised graph."""
    return OneNode(content, open_graph(Path("one"), threads=threads, model=content, operators=library()))


def random_blocks(rng: np.random.Generator, shape: tuple[int, int], grid: Grid) -> Blocks:
    """Of every level, with steps of any sign."""
    k, n = shape
    count = -(-k // grid.size)
    step = rng.normal(0, 0.01, (count, n)).astype(np.float16).astype(np.float32)
    high = grid.highest + 1
    zeros = 256 if grid.sixteenths else high
    zero = rng.integers(0, zeros, (count, n)) if grid.asymmetric else np.full((count, n), grid.middle)
    return Blocks(rng.integers(0, high, shape).astype(np.uint8), step, zero.astype(np.uint8), grid)


def product(
    blocks: Sequence[Blocks],
    norm: Array | None = None,
    more: Sequence[str] = (),
    biases: Sequence[Array | None] = (),
    **other: Any,
) -> OneNode:
    """One RowExactMatMul. norm: factors of the norm before it; more: which of "up" and "added" are inputs; biases: of
    the first weights. other: further attributes, or those in the place of the right ones."""
    outputs = [f"y{i}" for i in range(len(blocks))]
    node, weights = product_node("", "x", blocks, outputs, norm, {name: name for name in more}, biases, **other)
    return opened([node], dict.fromkeys(("x", *more), (TensorProto.FLOAT, 3)), len(blocks), weights)


def product_node(
    name: str,
    x: str,
    blocks: Sequence[Blocks],
    outputs: Sequence[str],
    norm: Array | None = None,
    more: Mapping[str, str] | None = None,
    biases: Sequence[Array | None] = (),
    **other: Any,
) -> tuple[Any, dict[str, Array]]:
    """A RowExactMatMul of x and its weights, whose names begin with `name`. more: "up" and "added" by their names in
    the graph; other: as in `product`."""
    names, more = [x], more or {}
    weights: dict[str, Array] = {}
    attributes: dict[str, Any] = {"K": blocks[0].level.shape[0]}
    for i, one in enumerate(blocks):
        arrays = packed(one)[: 3 if one.grid.asymmetric else 2]
        mine = {f"{name}{kind}{i}": array for kind, array in zip(("levels", "steps", "zeros"), arrays, strict=False)}
        names += [*mine, *[""] * (3 - len(mine))]
        weights |= mine
        attributes |= {f"bits_{i}": one.grid.bits, f"block_{i}": one.grid.size, f"N_{i}": one.level.shape[1]}
    names += [""] * (10 - len(names))
    names += ["" if norm is None else f"{name}norm", more.get("up", ""), more.get("added", "")]
    weights |= {} if norm is None else {f"{name}norm": norm}
    names += ["" if bias is None else f"{name}bias{i}" for i, bias in enumerate(biases)]
    weights |= {f"{name}bias{i}": bias for i, bias in enumerate(biases) if bias is not None}
    return helper.make_node("RowExactMatMul", names, outputs, domain="eagle", **{**attributes, **other}), weights


def norm(factors: Array, *, added: bool = False, epsilon: float = 1e-5) -> OneNode:
    """One RowExactNorm, with "added" among its inputs or not."""
    names = ["x", *(["added"] if added else [])]
    node = helper.make_node(
        "RowExactNorm", ["x", "factors", *names[1:]], ["y0"], domain="eagle", epsilon=float(epsilon)
    )
    return opened([node], dict.fromkeys(names, (TensorProto.FLOAT, 3)), 1, {"factors": factors})


def sincos(**attributes: Any) -> OneNode:
    """One ExactSinCos of angles [.., .., ..]."""
    node = helper.make_node("ExactSinCos", ["x"], ["y0", "y1"], domain="eagle", **attributes)
    return opened([node], {"x": (TensorProto.FLOAT, 3)}, 2, {})


def product_in_words(x: Array, blocks: Blocks) -> Array:
    """What RowExactMatMul computes of x [T, K], with one rounding per block."""
    size, (k, n) = blocks.grid.size, blocks.level.shape
    out = np.zeros((len(x), n), np.float32)
    for b, start in enumerate(range(0, k, size)):
        part = x[:, start : start + size]
        largest = np.abs(part).max(1)
        factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 1e-30)
        q = np.rint(part * factor[:, None]).astype(np.int64)
        parts = 16 if blocks.grid.sixteenths else 1
        level = parts * blocks.level[start : start + size].astype(np.int64) - blocks.zero[b].astype(np.int64)
        unit = blocks.step[b].astype(np.float16).astype(np.float32) * (largest / np.float32(127 * parts))[:, None]
        out = ((q @ level) * unit.astype(np.float64) + out.astype(np.float64)).astype(np.float32)
    return out


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one attention node. window 0: none; cap 0: none. kept: type of its cache; uint8 for bytes with scales. turned:
    how many numbers of a head are rotated; None for all. sinks: whether each head has one."""

    heads: int
    kv_heads: int
    width: int
    cut: int
    window: int = 0
    cap: float = 0.0
    rotated: bool = True
    kept: str = "float32"
    turned: int | None = None
    sinks: bool = False

    def session(self, by_rows: bool = False, **other: int) -> OneNode:
        """One ExactTreeAttention. by_rows: keys and values [1, P, KV, D]; other: attributes in the place of the right
        ones."""
        names = ["q", "k", "v", "keys", "values", "positions", "mask", *(["cosine", "sine"] if self.rotated else [])]
        ranks = [3, 3, 3, 4 if by_rows else 3, 4, 2, 4, 3, 3]
        inputs = [*names, *[""] * (9 - len(names)), "sinks"] if self.sinks else names
        kinds = {name: TensorProto.INT64 if name == "positions" else TensorProto.FLOAT for name in names}
        kinds |= dict.fromkeys(("keys", "values"), helper.np_dtype_to_tensor_dtype(np.dtype(self.kept)))
        attributes: dict[str, Any] = {"heads": self.heads, "kv_heads": self.kv_heads, "width": self.width}
        attributes |= {"scale": self.width**-0.5, "window": self.window, "softcap": self.cap}
        node = helper.make_node(
            "ExactTreeAttention", inputs, ["y0", "y1", "y2"], domain="eagle", **{**attributes, **other}
        )
        constants = {"sinks": self.sinks_of_heads()} if self.sinks else {}
        return opened([node], {n: (kinds[n], r) for n, r in zip(names, ranks, strict=False)}, 3, constants)

    def sinks_of_heads(self) -> Array:
        """[heads]: some below and some far above what scores are."""
        return np.linspace(-3, 20, self.heads, dtype=np.float32)

    def past(self, rng: np.random.Generator, length: int) -> tuple[Array, Array]:
        """Keys and values of so many rows as passes return them: [L, KV, D], or in bytes [L, KV, D / 4 + 1]."""
        keys, values = rng.standard_normal((2, length, self.kv_heads, self.width)).astype(np.float32)
        return (as_bytes(keys), as_bytes(values)) if self.kept == "uint8" else (keys, values)

    def rows(self, rng: np.random.Generator, count: int) -> dict[str, Array]:
        """Queries, keys and values of new rows [T, heads * D]."""
        sizes = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        return {
            name: rng.standard_normal((count, size * self.width)).astype(np.float32) for name, size in sizes.items()
        }

    def feeds(
        self, rows: dict[str, Array], past: tuple[Array, Array], parents: Sequence[int], spare: int
    ) -> dict[str, Array]:
        """Inputs of a pass. past: as `past` makes it; spare: columns of the cache without a row."""
        length, count = len(past[0]), len(parents)
        visible, depths = seen(parents)
        half = (self.turned or self.width) // 2
        angles = (length + depths)[:, None] * 10000.0 ** (-np.arange(half) / half)
        stored = [part.view(np.uint8) if self.kept == "uint8" else part.astype(self.kept) for part in past]
        padded = [np.pad(part, ((0, spare), (0, 0), (0, 0))) for part in stored]
        pieces = padded[1].reshape(length + spare, self.kv_heads, self.width // self.cut, -1)
        feeds = {name: part[None] for name, part in rows.items()}
        feeds |= {
            "keys": np.ascontiguousarray(padded[0].transpose(1, 0, 2)),
            "values": np.ascontiguousarray(pieces.transpose(1, 2, 0, 3)),
            "positions": (length + depths)[None],
            "mask": np.where(visible, 0, HIDDEN).astype(np.float32).reshape(1, 1, count, count),
        }
        if self.rotated:
            feeds |= {
                "cosine": np.cos(angles).astype(np.float32)[None],
                "sine": np.sin(angles).astype(np.float32)[None],
            }
        return feeds

    def level(self, feeds: dict[str, Array], past: tuple[Array, Array], earlier: int) -> dict[str, Array]:
        """Inputs of a pass by rows over the nodes of a tree from `earlier` on, of which `feeds` are the inputs. past:
        keys and values [L + earlier, KV, D] of the committed rows and of the nodes before."""
        named = ("q", "k", "v", "positions", "cosine", "sine")
        mine = {name: feeds[name][:, earlier:] for name in named if name in feeds}
        mask = np.ascontiguousarray(feeds["mask"][:, :, earlier:])
        return {**mine, "keys": past[0][None], "values": past[1][None], "mask": mask}

    def in_words(self, feeds: dict[str, Array], past: tuple[Array, Array]) -> Array:
        """What a pass computes [T, heads * D], in fp64."""
        count, length = feeds["q"].shape[1], len(past[0])
        q, k, v = (feeds[name][0].reshape(count, -1, self.width).astype(np.float64) for name in "qkv")
        if self.rotated:
            q, k = (self._turned(part, feeds) for part in (q, k))
        if self.kept == "float16":
            past = past[0].astype(np.float16), past[1].astype(np.float16)
            k, v = (part.astype(np.float16).astype(np.float64) for part in (k, v))
        if self.kept == "uint8":
            past = of_bytes(past[0]), of_bytes(past[1])
            k, v = (of_bytes(as_bytes(part.astype(np.float32))) for part in (k, v))
        position = feeds["positions"][0]
        out = np.zeros_like(q)
        for t in range(count):
            new = [u for u in range(count) if feeds["mask"][0, 0, t, u] == 0]
            columns = [*range(length), *(position[u] for u in new)]
            near = [not self.window or column > position[t] - self.window for column in columns]
            for h in range(self.heads):
                mine = h * self.kv_heads // self.heads
                keys, values = (
                    np.concatenate([old[:, mine], part[new, mine]])[near]
                    for old, part in zip(past, (k, v), strict=True)
                )
                scores = keys @ q[t, h] * self.width**-0.5
                scores = self.cap * np.tanh(scores / self.cap) if self.cap else scores
                sink = [float(self.sinks_of_heads()[h])] if self.sinks else []
                top = max([scores.max(), *sink])
                weights = np.exp(scores - top)
                out[t, h] = weights @ values / (weights.sum() + np.exp(np.array(sink) - top).sum())
        flat: Array = out.reshape(count, -1)
        return flat

    def _turned(self, x: Array, feeds: dict[str, Array]) -> Array:
        cosine, sine = (feeds[name][0][:, None].astype(np.float64) for name in ("cosine", "sine"))
        half = cosine.shape[-1]
        a, b, rest = np.split(x, (half, 2 * half), axis=-1)
        turned: Array = np.concatenate([a * cosine - b * sine, a * sine + b * cosine, rest], -1)
        return turned


def as_bytes(rows: Array) -> Array:
    """Rows [..., D] as a cache of bytes keeps them: [..., D / 4 + 1] words of D signed bytes and a scale."""
    largest = np.abs(rows).max(-1, keepdims=True)
    factor = np.float32(127) / np.where(largest > 0, largest, np.float32(1))
    scales = (largest / np.float32(127)).astype(np.float32)
    words = [np.rint(rows * factor).astype(np.int8).view(np.float32), scales]
    return np.concatenate(words, -1)


def of_bytes(words: Array) -> Array:
    """What such rows stand for, in fp64."""
    numbers: Array = words[..., :-1].view(np.int8).astype(np.float64) * words[..., -1:]
    return numbers


def seen(parents: Sequence[int]) -> tuple[Array, Array]:
    """Of a tree: which nodes each sees [T, T], and depths [T]."""
    visible, depths = np.eye(len(parents), dtype=bool), np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
            depths[node] = depths[parent] + 1
    return visible, depths
