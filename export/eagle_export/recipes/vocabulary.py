"""A draft vocabulary: the head proposals only tokens that are frequent, so its LM head and its softmax shrink.

Lossless whatever is kept, since the target verifies with its whole vocabulary: a token that the head cannot proposal is
emitted all the same, as the target's own.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_export.recipes.graph import KEPT, Array, constant, insert, is_lm_head, lazy_weight, linears, replace


def trim_vocabulary(model: ir.Model, size: int, counts: Array) -> dict[str, str]:
    """Keep the `size` most frequent tokens of a head's graph. Returns its LM head's name -> what was done.

    counts [V]: how often each of the target's tokens was seen; ties go to the lower id. Raises ExportError for a size
    that is no smaller than what the head knows, or smaller than the children it computes per row."""
    (head,) = (linear for linear in linears(model) if is_lm_head(linear))
    (topk,) = (node for node in model.graph if node.op_type == "TopK")
    k, known = head.shape
    tokens = target_ids(model, topk, known)
    children = int(np.ravel(_values(topk.inputs[1]))[0])
    if not children <= size < known:
        raise ExportError(
            f"a draft vocabulary of {size} was asked for, but this head knows {known} tokens and its graph offers "
            f"{children} per row; choose --draft-vocab from {children} to {known - 1}"
        )
    if tokens.max() >= len(counts):
        raise ExportError(
            f"the calibration counts {len(counts)} tokens, but this head knows token {tokens.max()}; run eagle-calib "
            "on a bundle of this very pair"
        )
    kept = np.sort(np.argsort(-counts[tokens], kind="stable")[:size])
    share = float(counts[tokens[kept]].sum() / max(1, counts.sum()))
    read, name = head.reader(), head.name
    assert head.x.dtype is not None
    dtype = head.x.dtype
    weight = lazy_weight(
        model, f"{name}{KEPT}", dtype, (k, size), lambda: np.ascontiguousarray(read()[:, kept].astype(dtype.numpy()))
    )
    replace(head.node, insert(head.node, "MatMul", [head.x, weight]))
    _replace_ids(model, topk, constant(model, "kept_tokens", tokens[kept]))
    return {name: f"the {size} most frequent tokens of {known}, {share:.2%} of the text"}


def target_ids(model: ir.Model, topk: ir.Node, known: int) -> Array:
    """[known] target id of each draft id: itself, or itself and the offset that the graph adds."""
    if topk.outputs[1].is_graph_output():
        return np.arange(known, dtype=np.int64)
    gather = next(use.node for use in topk.outputs[1].uses() if use.node.op_type == "Gather")
    return np.arange(known, dtype=np.int64) + _values(gather.inputs[0]).reshape(-1)


def _replace_ids(model: ir.Model, topk: ir.Node, tokens: ir.Value) -> None:
    """token_ids becomes a lookup of the likeliest rows in `tokens` [size]."""
    graph, ranks = model.graph, topk.outputs[1]
    at = next(index for index, value in enumerate(graph.outputs) if value.name == "token_ids")
    old = graph.outputs[at]
    lookup = ir.node("Gather", [tokens, ranks], {"axis": 0})
    graph.insert_after(topk, lookup)
    (new,) = lookup.outputs
    if old is not ranks:
        producer = old.producer()
        assert producer is not None
        replace(producer, new)
        return
    new.type, new.shape = old.type, old.shape
    graph.outputs[at] = new
    old.name = "draft_ids"
    new.name = "token_ids"


def _values(value: ir.Value | None) -> Array:
    assert value is not None and value.const_value is not None
    array: Array = value.const_value.numpy()
    return array
