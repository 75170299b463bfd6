"""The graph that drafts a tree in one call: the head reads the verified rows, then the levels of an EAGLE-2 tree grow.

It is made of copies of the bundle's draft graph, one for the rows and one for each level. Between two copies stands
what drafting/shapes.py does on the host for trees that grow level by level: children are ranked, the best of a level go
on, and their hidden states and masks are gathered. The host walks the candidates (drafting/one_call.py).

Shapes: T rows that are read, P past rows, D levels below the root's children, k children per node, Vd tokens
that the head knows, C tokens that it proposes per row, H width of the embedding. There are N = k + D k^2 candidates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.recipes.graph import size_of
from eagle_export.recipes.vocabulary import known_tokens
from eagle_export.tensorrt.compose import (
    EMBEDS,
    F32,
    I32,
    INT,
    Writer,
    dtype_of,
    embeds_of,
    end_of,
    mask_over_all,
    named,
    past_of,
    same_shape,
    table_of,
)
from eagle_runtime.base.tree import additive_mask, hiding
from eagle_runtime.bundle.graph import present_names
from eagle_runtime.bundle.manifest import BlockSpec
from eagle_runtime.drafting.block_head import drafting_rows, seen_rows
from eagle_runtime.drafting.coupling import ROUNDING

NARROWED = "token_ids"  # output that engines return as int32
NOTHING = -1e9  # the logarithm of no mass


@dataclass(frozen=True, slots=True)
class _Level:
    """Ranked candidates of R rows: tokens, draft_ids, log_probs [R k], and scores [R, k] of each given its parent."""

    tokens: ir.Value
    draft_ids: ir.Value
    log_probs: ir.Value
    scores: ir.Value


def draft_graph(source: Path, depth: int, top_k: int) -> ir.Model:
    """Returns the graph. source: the bundle's draft graph, in fp16 for an engine; depth: D; top_k: k.

    Inputs: features [1, T, Hd], position_ids [1, T] as in the draft graph; embeds [1, T, H] of the tokens; tree_mask
    [1, 1, T, T], of the new columns alone; past_mask [1, 1, 1, P] and row_mask [1, 1, 1, T]: 0 where a row is one that
    the levels may see; last_row [1]: the one that proposes the root's children; level_positions [D]; noise [D + 1, Vd]
    and ranking [5] (see _ranked); past keys and values.

    Outputs (ids are int32): pool_tokens, pool_log_probs [N]: level by level, the children of one node
    next to each other; frontier [D - 1, k]: which candidates of the second level, the third, ... grow children (of the
    first, all do); root_tokens, root_log_probs [C]: all that the head proposes after the root; new keys and values of
    the T rows.

    Raises ExportError for a head that proposes fewer than k tokens, or a depth of 0."""
    graph = ir.load(source).graph
    proposed = size_of(end_of(graph, "log_probs"), 2)
    if not (1 <= top_k <= proposed and depth >= 1):
        raise ExportError(
            f"a tree of {depth} levels with {top_k} children per node cannot be drafted in one call by a head that "
            f"proposes {proposed} tokens per row; export the pair with other tree defaults"
        )
    past = past_of(graph)
    present = present_names(len(past) // 2)
    dtype, known = dtype_of(graph), known_tokens(graph)
    inputs = {
        EMBEDS: embeds_of(graph, "T"),
        "features": ir.val("features", dtype, end_of(graph, "features").shape),
        "position_ids": ir.val("position_ids", INT, [1, "T"]),
        "tree_mask": ir.val("tree_mask", dtype, [1, 1, "T", "T"]),
        "past_mask": ir.val("past_mask", dtype, [1, 1, 1, "P"]),
        "row_mask": ir.val("row_mask", dtype, [1, 1, 1, "T"]),
        "last_row": ir.val("last_row", INT, [1]),
        "level_positions": ir.val("level_positions", INT, [depth]),
        "noise": ir.val("noise", F32, [depth + 1, size_of(table_of(graph), 0) if known is None else len(known)]),
        "ranking": ir.val("ranking", F32, [5]),
        **past,
    }
    write = Writer()
    mask = mask_over_all(write, inputs["past_mask"], inputs["tree_mask"])
    # Proposals for k rows, all the last one, as many as a level has: for a single row TensorRT would take other
    # kernels, and keep the weights a second time in the order that those read.
    last_rows = write.op("Expand", inputs["last_row"], write.ints(top_k))
    read = write.copy(source, "read.", {**inputs, "tree_mask": mask, "logit_rows": last_rows})
    for name in ("token_ids", "log_probs", "draft_ids"):
        read[name] = write.op("Slice", read[name], write.ints(0), write.ints(1), write.ints(1))
    levels, frontier = _grow(write, source, graph, inputs, read, depth, top_k)
    count = top_k + depth * top_k**2
    outputs = [
        named(write.narrow(write.op("Concat", *(each.tokens for each in levels), axis=0)), "pool_tokens", I32, [count]),
        named(write.op("Concat", *(each.log_probs for each in levels), axis=0), "pool_log_probs", F32, [count]),
        named(write.narrow(write.flat(read["token_ids"])), "root_tokens", I32, [proposed]),
        named(write.flat(read["log_probs"]), "root_log_probs", F32, [proposed]),
    ]
    if depth > 1:
        rows = [write.op("Unsqueeze", best, write.ints(0)) for best in frontier]
        outputs.append(named(write.narrow(write.op("Concat", *rows, axis=0)), "frontier", I32, [depth - 1, top_k]))
    new = [named(read[name], name, dtype, same_shape(graph, name)) for name in present]
    return write.model([*inputs.values()], [*outputs, *new], "draft")


def _grow(
    write: Writer,
    source: Path,
    graph: ir.Graph,
    inputs: Mapping[str, ir.Value],
    read: Mapping[str, ir.Value],
    depth: int,
    top_k: int,
) -> tuple[list[_Level], list[ir.Value]]:
    """Adds the levels. graph: that of `source`; read: outputs of the copy that reads the rows. Returns the levels, and
    for each but the first and the last the indices [k] of those that grow children."""
    table, dtype = _level_table(write, graph), dtype_of(graph)
    past = [name for name in inputs if name.startswith("past_key_values.")]
    keys = {name: [inputs[name], read[new]] for name, new in zip(past, present_names(len(past) // 2), strict=True)}
    seen = write.op("Concat", inputs["past_mask"], inputs["row_mask"], axis=-1)
    seen = write.op("Expand", seen, write.ints(1, 1, top_k, 1))
    own = np.where(np.eye(top_k, dtype=np.bool_), 0, hiding(dtype.numpy())).astype(dtype.numpy())[None, None]
    level = _ranked(write, inputs, read, 0, top_k)
    levels, frontier = [level], list[ir.Value]()
    best = write.constant("all_children", np.arange(top_k))
    above, parents, mask = write.flat(level.scores), write.constant("root_row", np.zeros(top_k, np.int64)), None
    previous = read
    for number in range(depth):
        column = write.constant("own_column", own)
        mask = column if mask is None else write.op("Concat", write.take(mask, parents, axis=2), column, axis=-1)
        step = write.copy(
            source,
            f"level{number}.",
            {
                EMBEDS: write.op("Unsqueeze", write.take(table, write.take(level.draft_ids, best)), write.ints(0)),
                "features": write.take(previous["hidden"], parents, axis=1),
                "position_ids": write.op(
                    "Expand", write.take(inputs["level_positions"], write.ints(number)), write.ints(1, top_k)
                ),
                "tree_mask": write.op("Concat", seen, mask, axis=-1),
                "logit_rows": write.constant("every_row", np.arange(top_k)),
                **{name: write.op("Concat", *parts, axis=1) for name, parts in keys.items()},
            },
        )
        for name, new in zip(past, present_names(len(past) // 2), strict=True):
            keys[name].append(step[new])
        level = _ranked(write, inputs, step, number + 1, top_k)
        levels.append(level)
        if number + 1 < depth:
            total = write.flat(write.op("Add", write.op("Unsqueeze", above, write.ints(1)), level.scores))
            above, best = write.ops("TopK", total, write.ints(top_k), outputs=2, axis=0, largest=1, sorted=1)
            frontier.append(best)
            parents = write.take(write.constant("parent_rows", np.repeat(np.arange(top_k), top_k)), best)
            previous = step
    return levels, frontier


def _ranked(
    write: Writer, inputs: Mapping[str, ir.Value], proposal: Mapping[str, ir.Value], number: int, top_k: int
) -> _Level:
    """Adds the choice of the k best candidates of every row of a level, by the chance that each is emitted, as
    coupling.GumbelRanker computes it without the sampler's filters.

    A candidate with log-probability q and noise n, which the host has weighted, scores q * scale + n. All other tokens
    together score others(q) * rest + last(q) * rest_exponent + rest_noise. ranking holds scale, rest, rest_exponent,
    rest_noise, and the share of the logarithm of the sum that is subtracted: 1 normalises, and with 1, *, *, *, 0 and
    no noise the scores are the head's log-probabilities to the bit."""
    scale, rest, exponent, rest_noise, share = (write.take(inputs["ranking"], write.ints(index)) for index in range(5))
    log_probs, ids = proposal["log_probs"], proposal["token_ids"]
    noise = write.take(write.flat(write.take(inputs["noise"], write.ints(number))), proposal["draft_ids"])
    scores = write.op("Add", write.op("Mul", log_probs, scale), noise)
    mass = write.op("ReduceSum", write.op("Exp", log_probs), write.ints(2), keepdims=1)
    left = write.op("Sub", write.constant("one", np.ones(1, np.float32)), mass)
    least = write.constant("rounding", np.full(1, ROUNDING, np.float32))
    last = write.op("Slice", log_probs, write.ints(-1), write.ints(2**31), write.ints(2))
    others = write.op("Mul", write.op("Log", write.op("Max", left, least)), rest)
    others = write.op("Add", write.op("Add", others, write.op("Mul", last, exponent)), rest_noise)
    nothing = write.constant("nothing", np.full(1, NOTHING, np.float32))
    others = write.op("Where", write.op("Greater", left, least), others, nothing)
    total = write.op("ReduceLogSumExp", write.op("Concat", scores, others, axis=-1), write.ints(2), keepdims=1)
    scores = write.op("Sub", scores, write.op("Mul", total, share))
    scores = write.op("Min", scores, write.constant("zero", np.zeros(1, np.float32)))
    best, index = write.ops("TopK", scores, write.ints(top_k), outputs=2, axis=2, largest=1, sorted=1)
    tokens, draft_ids, chosen = (
        write.flat(write.op("GatherElements", values, index, axis=2))
        for values in (ids, proposal["draft_ids"], log_probs)
    )
    return _Level(tokens, draft_ids, chosen, write.op("Squeeze", best, write.ints(0)))


def _level_table(write: Writer, graph: ir.Graph) -> ir.Value:
    """Adds the embedding of the tokens that the head knows, in its own order, of which the levels consist."""
    table, known = table_of(graph), known_tokens(graph)
    tensor, name = table.const_value, str(table.name)
    assert tensor is not None
    if known is None:
        return write.weights.setdefault(name, table)
    name += ".known"
    shape = ir.Shape([len(known), size_of(table, 1)])
    lazy = ir.LazyTensor(
        lambda: ir.tensor(tensor.numpy()[known], name=name), dtype=tensor.dtype, shape=shape, name=name
    )
    write.weights[name] = ir.val(name, const_value=lazy)
    return write.weights[name]


def block_graph(source: Path, block: BlockSpec) -> ir.Model:
    """Returns a block head's graph: one call drafts all positions of a block. source: the bundle's draft graph, in fp16
    for an engine; block: its manifest's. It is a copy of that graph with its sizes fixed: B rows of the block, R
    drafted positions. Keys and values of verified rows need no computing, since the target's graph makes them: the host
    of an engine copies those of all but the last row to the cache, and feeds the last row, which also brings the
    target's state where the head reads it. So only the length of the past varies.

    Inputs: embeds [1, B, H] of the root and the tokens that stand for the others; input_ids [1, B] of the same, if the
    head reads them elsewhere; features [1, 1, Hd] of the last verified row; position_ids [1, B]; past_mask
    [1, 1, 1, P]: 0 where a row of the cache is one; past keys and values, of the verified rows before the last.

    Outputs: as the bundle's graph has them for all drafted positions, but token_ids as int32, and no keys and values,
    which would be a copy of the features."""
    graph = ir.load(source).graph
    dtype, size = dtype_of(graph), block.size
    inputs = {
        EMBEDS: embeds_of(graph, size),
        "input_ids": ir.val("input_ids", INT, [1, size]),
        "features": ir.val("features", dtype, [1, 1, size_of(end_of(graph, "features"), 2)]),
        "position_ids": ir.val("position_ids", INT, [1, size]),
        "past_mask": ir.val("past_mask", dtype, [1, 1, 1, "P"]),
        **past_of(graph),
    }
    write, zero = Writer(), np.zeros((1, 1, 1, 1), dtype.numpy())
    before = write.op("Concat", inputs["past_mask"], write.constant("last_row_mask", zero), axis=-1)
    own = additive_mask(seen_rows(block), dtype.numpy())[None, None]
    mask = write.op(
        "Concat", write.op("Expand", before, write.ints(1, 1, size, 1)), write.constant("block_mask", own), axis=-1
    )
    rows = drafting_rows(block)
    fixed = {"tree_mask": mask, "logit_rows": write.constant("drafting_rows", rows)}
    out = write.copy(source, "block.", {**inputs, **fixed})
    kept = [value for value in graph.outputs if not str(value.name).startswith("present.")]
    outputs = []
    for value in kept:
        name, shape = str(value.name), [1, len(rows), size_of(value, 2)]
        narrow = name == NARROWED
        assert value.dtype is not None
        computed = write.narrow(out[name]) if narrow else out[name]
        outputs.append(named(computed, name, I32 if narrow else value.dtype, shape))
    model = write.model([*inputs.values()], outputs, "draft")
    if not inputs["input_ids"].uses():
        model.graph.inputs.remove(inputs["input_ids"])
    return model
