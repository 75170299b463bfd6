"""A block head's graph as engines are built from it: one call drafts all positions of a block.

It is a copy of the bundle's graph with its sizes fixed. Keys and values of verified rows need no computing, since the
target's graph makes them: the host of an engine copies those of all but the last row to the cache, and feeds the last
row, which also brings the target's state where the head reads it. So only the length of the past varies.

Shapes: B rows of the block, R drafted positions, P past rows, H width of the embedding, Hd width of the features.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from eagle_export.tensorrt.compose import EMBEDS, I32, INT, Writer, dtype_of, named, size_of, table_of
from eagle_runtime.base.tree import additive_mask
from eagle_runtime.bundle.graph import past_names
from eagle_runtime.bundle.manifest import BlockSpec
from eagle_runtime.drafting.block_head import drafting_rows, seen_rows

NARROWED = "token_ids"  # output that engines return as int32


def block_graph(source: Path, block: BlockSpec) -> ir.Model:
    """Returns the graph. source: the bundle's draft graph, in fp16 for an engine; block: its manifest's.

    Inputs: embeds [1, B, H] of the root and the tokens that stand for the others; input_ids [1, B] of the same, if the
    head reads them elsewhere; features [1, 1, Hd] of the last verified row; position_ids [1, B]; past_mask
    [1, 1, 1, P]: 0 where a row of the cache is one; past keys and values, of the verified rows before the last.

    Outputs: as the bundle's graph has them for all drafted positions, but token_ids as int32, and no keys and values,
    which would be a copy of the features."""
    graph = ir.load(source).graph
    given = {str(value.name): value for value in graph.inputs}
    dtype, size = dtype_of(graph), block.size
    past = past_names(sum(name.startswith("past_key_values.") for name in given) // 2)
    inputs = {
        EMBEDS: ir.val(EMBEDS, dtype, [1, size, size_of(table_of(graph), 1)]),
        "input_ids": ir.val("input_ids", INT, [1, size]),
        "features": ir.val("features", dtype, [1, 1, size_of(given["features"], 2)]),
        "position_ids": ir.val("position_ids", INT, [1, size]),
        "past_mask": ir.val("past_mask", dtype, [1, 1, 1, "P"]),
        **{name: ir.val(name, dtype, given[name].shape) for name in past},
    }
    write, zero = Writer(), np.zeros((1, 1, 1, 1), dtype.numpy())
    before = write.op("Concat", inputs["past_mask"], write.constant("last_row_mask", zero), axis=-1)
    own = additive_mask(seen_rows(block), dtype.numpy())[None, None]
    mask = write.op(
        "Concat",
        write.op("Expand", before, write.ints(1, 1, size, 1)),
        write.constant("block_mask", own),
        axis=-1,
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
