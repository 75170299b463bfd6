"""The draft graphs of Medusa's and Hydra's heads. They keep no keys or values: all they know of a text is the target's
feature before the root.

Medusa  features [1,1,H]                                -> log_probs, token_ids [1,D,k]: a row for every depth
Hydra   features [1,1,H], paths.{d} int64 [1,T{d},d+1]  -> log_probs.{d}, token_ids.{d} [1,T{d},k]: a row for every path

A path is the root and the d tokens after it, for which head d proposes the next one. A forward pass grows one level of
a tree, so the paths of all other depths have no rows, and their layers nothing to do.

Shapes: H width of the target, D heads, k tokens per row.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import Tensor

from eagle_export.graphs.graphs import ProposingGraph
from eagle_export.graphs.trace import Expected, checked, exported, fold
from eagle_export.heads.ahead import HeadsAhead
from eagle_runtime.bundle.graph import ahead_inputs, ahead_outputs


class AheadGraph(ProposingGraph):
    """Heads that return the top k tokens of each row instead of logits over the vocabulary."""

    head: HeadsAhead

    def drafted(self, depth: int, features: Tensor, paths: Tensor) -> tuple[Tensor, Tensor]:
        """features [1,T,H], paths [1,T,depth + 1]. Returns log_probs [1,T,k] fp32 and token_ids [1,T,k]."""
        return self.best(self.scores_of(self.head.logits(depth, features, paths)).log_softmax(-1))


class MedusaGraph(AheadGraph):
    """All depths of one feature."""

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros(1, 1, 0, dtype=torch.int64)
        rows = [self.drafted(depth, features, nothing) for depth in range(len(self.head.heads))]
        return torch.cat([row for row, _ in rows], 1), torch.cat([ids for _, ids in rows], 1)


class HydraGraph(AheadGraph):
    """Paths of any depth under one feature."""

    def forward(self, features: Tensor, paths: list[Tensor]) -> tuple[Tensor, ...]:
        rows = [self.drafted(depth, features.expand(-1, of.shape[1], -1), of) for depth, of in enumerate(paths)]
        return (*(log_probs for log_probs, _ in rows), *(ids for _, ids in rows))


def trace_ahead(module: AheadGraph, width: int, dtype: torch.dtype) -> ir.Model:
    """Traces an AheadGraph into ONNX, with the contract's names. Raises ExportError if the trace is not as expected."""
    count, features = len(module.head.heads), torch.zeros(1, 1, width, dtype=dtype)
    args: tuple[object, ...] = (features,)
    dims: tuple[object, ...] = ({},)
    if module.head.grounded:
        # Example sizes, all different and above 1, as in trace.py.
        args = (features, [torch.zeros(1, count + 2 + depth, depth + 1, dtype=torch.int64) for depth in range(count)])
        dims = ({}, [{1: torch.export.Dim(f"T{depth}", min=0)} for depth in range(count)])
    inputs, outputs = ahead_inputs(count, module.head.grounded), ahead_outputs(count, module.head.grounded)
    model = exported(module, args, dims, inputs, outputs)
    fold(model)
    return checked(model, Expected(0, 0, 0))
