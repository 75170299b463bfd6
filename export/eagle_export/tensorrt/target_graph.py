"""The target's graph as engines are built from it: embeddings come in, and little of the logits needs to go out.

Shapes: T rows, P past rows, R rows with logits, V vocabulary, K likeliest tokens, M tokens that the host asks for.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from eagle_export.recipes.graph import size_of
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
)
from eagle_runtime.bundle.graph import present_names
from eagle_runtime.trt.fixed_shapes import KEPT_ROWS

TOP = 64  # likeliest tokens of a row; more than the 50 of Hugging Face's usual top-k
WATCHED = 88  # tokens of a row that may win by their random number; with 64 rows, 64 kB go down in a cycle


def target_graph(source: Path) -> ir.Model:
    """Returns the graph. source: the bundle's target graph, in fp16 for an engine.

    Inputs: embeds [1, T, H] of the tokens; position_ids [1, T] and logit_rows [R] as in the bundle's graph; tree_mask
    [1, 1, T, T], of the new columns alone; past_mask [1, 1, 1, P]: 0 where a row of the cache is one; watched_ids
    [R, M]; inverse_temperature [1]; past keys and values.

    Outputs: logits [1, R, V] and features as in the bundle's graph; top_ids int32 and top_logits [K, R]: of each row's
    highest logits, highest first, equal ones in any order; log_sum_exp [R]: of the row times inverse_temperature;
    watched_logits [R, M]; new keys and values. (The first k of K rows are contiguous, so fewer can be downloaded.)"""
    graph = ir.load(source).graph
    past, dtype = past_of(graph), dtype_of(graph)
    top, watched = (min(count, size_of(end_of(graph, "logits"), 2)) for count in (TOP, WATCHED))
    inputs = {
        EMBEDS: embeds_of(graph, "T"),
        "position_ids": ir.val("position_ids", INT, [1, "T"]),
        "tree_mask": ir.val("tree_mask", dtype, [1, 1, "T", "T"]),
        "past_mask": ir.val("past_mask", dtype, [1, 1, 1, "P"]),
        "logit_rows": ir.val("logit_rows", INT, ["R"]),
        "watched_ids": ir.val("watched_ids", INT, ["R", watched]),
        "inverse_temperature": ir.val("inverse_temperature", F32, [1]),
        **past,
    }
    write = Writer()
    mask = mask_over_all(write, inputs["past_mask"], inputs["tree_mask"])
    out = write.copy(source, "", {**inputs, "tree_mask": mask})
    rows = write.op("Squeeze", out["logits"], write.ints(0))
    best, ids = write.ops("TopK", rows, write.ints(top), outputs=2, axis=1, largest=1, sorted=1)
    scale = inputs["inverse_temperature"]
    highest = write.op("Mul", write.op("Slice", best, write.ints(0), write.ints(1), write.ints(1)), scale)
    shifted = write.op("Sub", write.op("Mul", rows, scale), highest)
    mass = write.op("ReduceSum", write.op("Exp", shifted), write.ints(1), keepdims=1)
    total = write.op("Squeeze", write.op("Add", write.op("Log", mass), highest), write.ints(1))
    outputs = [
        named(out["logits"], "logits", F32, same_shape(graph, "logits")),
        named(write.op("Transpose", write.narrow(ids), perm=[1, 0]), "top_ids", I32, [top, "R"]),
        named(write.op("Transpose", best, perm=[1, 0]), "top_logits", F32, [top, "R"]),
        named(total, "log_sum_exp", F32, ["R"]),
        named(write.op("GatherElements", rows, inputs["watched_ids"], axis=1), "watched_logits", F32, ["R", watched]),
        *(
            named(out[name], name, dtype, same_shape(graph, name))
            for name in ("features", *present_names(len(past) // 2))
        ),
    ]
    return write.model([*inputs.values()], outputs, "target")


def keep_graph(arrays: int, rows: int, width: int, features: int, dtype: ir.DataType) -> ir.Model:
    """Returns the graph that gathers the rows of an accepted path.

    Inputs: new [A, S, W]: keys and values of the last forward pass, of which layer i's are the arrays 2i and 2i + 1;
    features [S, Hd]; path [n], n = KEPT_ROWS. Outputs: kept [A, n, W], kept_features [n, Hd]. arrays, rows, width,
    features: A, S, W, Hd; dtype: of both."""
    write = Writer()
    new, states = ir.val("new", dtype, [arrays, rows, width]), ir.val("features", dtype, [rows, features])
    path = ir.val("path", INT, [KEPT_ROWS])
    outputs = [
        named(write.take(new, path, axis=1), "kept", dtype, [arrays, KEPT_ROWS, width]),
        named(write.take(states, path, axis=0), "kept_features", dtype, [KEPT_ROWS, features]),
    ]
    return write.model([new, states, path], outputs, "keep")
