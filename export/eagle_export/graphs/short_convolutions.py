"""Layers' short convolutions (LFM2) as one node each in a trace.

The node is of this project's own. recipes/convolutions.py and recipes/native.py put operators in its place: how these
find the tokens before a row, in the cache or in the tree, depends on how a form of the graph keeps its cache.

Shapes: T rows, P past rows, H hidden, K tokens that a row sees, itself included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.recipes.graph import CONVOLUTION


class ShortConvolution(nn.Module):
    """The part of one layer, with the names of transformers' weights.

    Of a row in_proj makes b, c and x [H]. Its b * x is cached, and c times the sum over the row's last K tokens of
    theirs, each number multiplied by its own weight of K, is what out_proj reads."""

    def __init__(self, whole: nn.Module) -> None:
        """whole: transformers' part."""
        super().__init__()
        self.in_proj, self.conv, self.out_proj = (whole.get_submodule(name) for name in ("in_proj", "conv", "out_proj"))
        self.layer_idx: Any = whole.layer_idx

    def forward(self, hidden_states: Tensor, cache: Any, **_: Any) -> Tensor:
        """hidden_states [1, T, H]; cache: of graphs.py. Returns [1, T, H]."""
        keys, values = cache.past_of(self.layer_idx)
        inputs = [self.in_proj(hidden_states), keys, values, self.conv.weight]
        inputs += [] if self.conv.bias is None else [self.conv.bias]
        new = (1, hidden_states.shape[1], *keys.shape[2:])
        shapes, dtypes = [hidden_states.shape, new, new], [hidden_states.dtype] * 3
        name = "::".join(CONVOLUTION)
        out, new_keys, new_values = torch.onnx.ops.symbolic_multi_out(name, inputs, dtypes=dtypes, shapes=shapes)
        cache.new.append((new_keys, new_values))
        mixed: Tensor = self.out_proj(out)
        return mixed


def mark_convolutions(layers: nn.ModuleList, name: str) -> None:
    """Puts a ShortConvolution in the place of each layer's part of that name."""
    for layer in layers:
        if hasattr(layer, name):
            setattr(layer, name, ShortConvolution(getattr(layer, name)))
