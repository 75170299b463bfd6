"""Packed linear layers compute what torch's do, forwards and backwards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from conftest import GOLDEN
from eagle_export.reading.families.source import load_source
from eagle_export.recording.importance import column_importance
from eagle_export.recording.packed import PackedLinear, load_packed
from eagle_export.recording.self_calibration import linears

TARGET = GOLDEN / "target"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (18, 1), (2, 37)])
def test_a_packed_layer_is_the_layer(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(96, 80, bias=bias), torch.randn(*rows, 96, requires_grad=True)
    packed = PackedLinear(layer.weight, layer.bias)
    assert torch.equal(packed.weight, layer.weight)
    assert (packed.bias is not None) == bias
    out, slope = layer(x), torch.randn(*rows, 80)
    (wanted,) = torch.autograd.grad(out, x, slope)
    (found,) = torch.autograd.grad(packed(x), x, slope)
    torch.testing.assert_close(packed(x), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_packed_source_predicts_and_is_measured_as_the_source() -> None:
    plain, packed, ids = load_source(TARGET), load_packed(TARGET), np.random.default_rng(0).integers(0, 256, (3, 20))
    names = [name for name, layer in packed.named_modules() if isinstance(layer, PackedLinear)]
    assert [f"{name}.weight" for name in names] == [name for name, _ in linears(plain) if name != "lm_head.weight"]
    with torch.inference_mode():
        torch.testing.assert_close(
            packed(torch.tensor(ids)).logits, plain(torch.tensor(ids)).logits, rtol=1e-4, atol=1e-4
        )
    wanted, found = (column_importance(model, list(linears(model)), ids.tolist()) for model in (plain, packed))
    assert wanted.keys() == found.keys()
    for name, each in wanted.items():
        np.testing.assert_allclose(found[name], each, rtol=0.01, atol=1e-3 * each.max(), err_msg=name)
