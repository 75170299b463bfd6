"""A draft vocabulary: the head proposes frequent tokens only, so that its LM head and its softmax shrink.

The output stays the same whichever tokens are kept, because the target verifies with its whole vocabulary: a token that
the head cannot propose is emitted as the target's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.recipes.graph import (
    KEPT,
    Array,
    Linear,
    Pass,
    constant,
    insert,
    is_lm_head,
    lazy_weight,
    linears,
    replace,
)


@dataclass(frozen=True, slots=True, eq=False)
class TrimVocabulary(Pass[Linear]):
    """Keeps the `size` most frequent tokens of a head's graph. counts [V]: how often each of the target's tokens
    occurred; of equal counts the lower id is kept. Raises ExportError for a size that is not smaller than the head's
    vocabulary, or smaller than the number of children that its graph computes per row."""

    size: int
    counts: Array
    name = "draft vocabulary"

    def pattern(self, model: ir.Model) -> list[Linear]:
        return [linear for linear in linears(model) if is_lm_head(linear)]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        (head,) = matches
        (topk,) = (node for node in model.graph if node.op_type == "TopK")
        k, known = head.shape
        ids = known_tokens(model.graph)
        tokens = np.arange(known) if ids is None else ids
        children = int(np.ravel(_values(topk.inputs[1]))[0])
        if not children <= self.size < known:
            raise ExportError(
                f"a draft vocabulary of {self.size} was asked for, but this head knows {known} tokens and its graph "
                f"returns the top {children} per row; choose a draft vocabulary from {children} to {known - 1}"
            )
        if tokens.max() >= len(self.counts):
            raise ExportError(
                f"the calibration counts {len(self.counts)} tokens, but this head knows token {tokens.max()}; run "
                "eagle-calib on a bundle of this very pair"
            )
        kept = np.sort(np.argsort(-self.counts[tokens], kind="stable")[: self.size])
        share = float(self.counts[tokens[kept]].sum() / max(1, self.counts.sum()))
        read, name, dtype = head.reader(), head.name, head.dtype

        def columns() -> Array:
            return np.ascontiguousarray(read()[:, kept].astype(dtype.numpy()))

        weight = lazy_weight(model, f"{name}{KEPT}", dtype, (k, self.size), columns)
        replace(head.node, insert(head.node, "MatMul", [head.x, weight]))
        _replace_ids(model, topk, constant(model, "kept_tokens", tokens[kept]))
        return {name: f"the {self.size} most frequent tokens of {known}, {share:.2%} of the text"}

    def check(self, model: ir.Model) -> None:
        """The LM head is still there, with `size` columns."""
        (head,) = self.pattern(model)
        assert head.shape[1] == self.size


def known_tokens(graph: ir.Graph) -> Array | None:
    """Returns the target's id of each token [Vd] that the head knows; None for a head that knows all."""
    (topk,) = (node for node in graph if node.op_type == "TopK")
    if topk.outputs[1].is_graph_output():
        return None
    lookup = next(use.node for use in topk.outputs[1].uses() if use.node.op_type == "Gather")
    ids = _values(lookup.inputs[0]).reshape(-1)
    offsets = not lookup.outputs[0].is_graph_output()  # d2t: what is added to a token's number in the head
    return ids + np.arange(len(ids)) if offsets else ids


def _replace_ids(model: ir.Model, topk: ir.Node, tokens: ir.Value) -> None:
    """Makes the output token_ids a lookup of the TopK node's indices in `tokens` [size]."""
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
