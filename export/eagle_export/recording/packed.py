"""Linear layers whose weights are laid out once for products of a few rows.

A source writes text in batches of a few dozen rows. For each product torch's BLAS lays the weight out anew in the order
in which its kernel reads it, which takes as long as the product: 18 rows by a weight of 2304 x 3072 take 5.9 ms on one
core of an AMD EPYC (Zen 4), and 3.2 ms with a weight that oneDNN laid out before; 54 rows take 13.7 and 8.0 ms. The
layers are in the place of torch's, with the memory of one weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.source import load_source


class PackedLinear(nn.Linear):
    """A linear layer [K] -> [N] in fp32 that is not trained."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight [N, K], bias [N]: as torch.nn.Linear has them."""
        nn.Module.__init__(self)  # without a weight of its own
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A copy of the weight [N, K]."""
        weight: Tensor = self.packed.to_dense()
        return weight

    def forward(self, input: Tensor) -> Tensor:
        """input [..., K]. Returns [..., N]."""
        out: Tensor = _Product.apply(input, self.packed, self.bias)  # type: ignore[no-untyped-call]
        return out


class _Product(torch.autograd.Function):
    """The product with a packed weight, whose gradient is that of the rows alone."""

    @staticmethod
    def forward(context: Any, rows: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        context.packed = packed
        out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
        return out

    @staticmethod
    def backward(context: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        return slope @ context.packed.to_dense(), None, None


def load_packed(source: Path | Checkpoint) -> Any:
    """As load_source, with packed layers but for the LM head, whose weight others read too: the embedding, and heads
    that borrow it. As it is where torch has no oneDNN."""
    model = load_source(source)
    if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        last = model.get_output_embeddings()
        places = [
            (module, name)
            for module in model.modules()
            for name, layer in module.named_children()
            if type(layer) is nn.Linear and layer is not last
        ]
        for module, name in places:  # each weight is freed before the next is packed
            layer = getattr(module, name)
            setattr(module, name, PackedLinear(layer.weight, layer.bias))
    return model
