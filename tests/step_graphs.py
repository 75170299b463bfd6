"""Graphs of decoder layers made of native operators, and the same as steps of one operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from eagle_export.recipes.blocks import Grid
from eagle_export.recipes.native_steps import JoinedRuns
from operator_graphs import Array, Heads, OneNode, opened, opened_model, product_node, random_blocks

HEADS = Heads(4, 2, 16, 16)
WIDE, INNER = HEADS.heads * HEADS.width, 96  # widths of the residual stream and between gate and down
PER_LAYER = 5  # nodes
CACHES = ("keys", "values")
SHARED, ROTATED = ("positions", "mask"), ("cosine", "sine")


@dataclass(frozen=True, slots=True)
class Layers:
    """apart: a node per operator; joined: one node of that many steps, of as many threads as were asked for. angles:
    whether these are an input, or their cosines and sines."""

    apart: OneNode
    joined: OneNode
    angles: bool

    def feeds(self, rng: np.random.Generator, length: int, parents: Sequence[int]) -> dict[str, Array]:
        """Inputs of a pass over a tree after `length` columns."""
        past = HEADS.past(rng, length)
        feeds = HEADS.feeds(HEADS.rows(rng, len(parents)), past, parents, spare=3)
        x = rng.standard_normal((1, len(parents), WIDE)).astype(np.float32)
        angles = feeds["positions"][..., None] * 0.1 ** np.arange(HEADS.width // 2)
        rotated = {"angles": angles.astype(np.float32)} if self.angles else {name: feeds[name] for name in ROTATED}
        return {"x": x, **{name: feeds[name] for name in (*CACHES, *SHARED)}, **rotated}


def layers(
    rng: np.random.Generator, count: int = 2, threads: int = 1, *, biases: bool = True, norms: bool = False
) -> Layers:
    """Decoder layers over one cache, which all of them read. biases: of q, k and v. norms: of q's and k's heads, and of
    what is added to the stream; cosines and sines are computed there too. The outputs are the stream after each layer,
    and the new keys and values of the last."""
    nodes, weights, stream = [], {}, "x"
    kv = HEADS.kv_heads * HEADS.width
    attributes = {"heads": HEADS.heads, "kv_heads": HEADS.kv_heads, "width": HEADS.width, "scale": HEADS.width**-0.5}

    def multiply(
        name: str, x: str, shapes: Sequence[tuple[int, int, Grid]], outputs: Sequence[str], **other: str
    ) -> None:
        blocks = [random_blocks(rng, (k, n), grid) for k, n, grid in shapes]
        normed = not other
        norm = rng.random(shapes[0][0]).astype(np.float32) + np.float32(0.5) if normed else None
        more = {"epsilon": 1e-5} if normed else {"activation": 1} if "up" in other else {}
        qkv = biases and name.startswith("qkv")
        added = [rng.standard_normal(n).astype(np.float32) for _, n, _ in shapes] if qkv else []
        node, mine = product_node(name, x, blocks, outputs, norm, other, added, **more)
        nodes.append(node)
        weights.update(mine)

    def norm(x: str, width: int, output: str = "", *added: str) -> str:
        factors = f"{x}.factors"
        weights[factors] = rng.random(width).astype(np.float32) + np.float32(0.5)
        made = output or f"{x}.normed"
        nodes.append(helper.make_node("RowExactNorm", [x, factors, *added], [made], domain="eagle", epsilon=1e-6))
        return made

    if norms:
        nodes.append(helper.make_node("ExactSinCos", ["angles"], ROTATED, domain="eagle"))
    four, eight = Grid(4, 32, True), Grid(8, 16, False)
    for i in range(count):
        last = i == count - 1
        q, k, v, mixed, middle, gate, up = (f"{part}{i}" for part in ("q", "k", "v", "mixed", "middle", "gate", "up"))
        multiply(f"qkv{i}", stream, [(WIDE, WIDE, four), (WIDE, kv, eight), (WIDE, kv, eight)], [q, k, v])
        new = [f"y{count + n}" if last else f"new{n}{i}" for n in range(2)]
        if norms:
            q, k = (norm(part, HEADS.width) for part in (q, k))
        inputs = [q, k, v, *CACHES, *SHARED, *ROTATED]
        nodes.append(helper.make_node("ExactTreeAttention", inputs, [mixed, *new], domain="eagle", **attributes))
        if norms:
            multiply(f"o{i}", mixed, [(WIDE, WIDE, four)], [f"{middle}.bare"], added=mixed)
            norm(f"{middle}.bare", WIDE, middle, stream)
        else:
            multiply(f"o{i}", mixed, [(WIDE, WIDE, four)], [middle], added=stream)
        multiply(f"gate_up{i}", middle, [(WIDE, INNER, four), (WIDE, INNER, four)], [gate, up])
        stream = f"y{i}"
        multiply(f"down{i}", gate, [(INNER, WIDE, four)], [stream], up=up, added=middle)
    ranks = {"x": 3, "keys": 3, "values": 4, "positions": 2, "mask": 4}
    ranks |= {"angles": 3} if norms else dict.fromkeys(ROTATED, 3)
    kinds = {name: TensorProto.INT64 if name == "positions" else TensorProto.FLOAT for name in ranks}
    apart = opened(nodes, {name: (kinds[name], rank) for name, rank in ranks.items()}, count + 2, weights)
    return Layers(apart, opened_model(joined(apart.model), threads), norms)


def joined(content: bytes) -> bytes:
    """A graph with its runs of native operators as steps."""
    model = ir.from_proto(onnx.load_from_string(content))
    JoinedRuns().apply(model)
    made: bytes = ir.to_proto(model).SerializeToString()
    return made
