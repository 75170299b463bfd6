"""Makes modules of transformers call torch's native norm and rotary operators while they are traced."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from eagle_export.base.errors import ExportError


@contextmanager
def native_operators(module: nn.Module, halved: str | None = None) -> Iterator[None]:
    """Makes the modules of transformers below `module` call torch's native norm and rotary operators, which become one
    ONNX node each. halved: name of the Python module of whose models the weights were reordered (`Family.neighbours`).

    The functions compute the same in eager mode. They are replaced for the whole process, and restored at the end."""
    saved: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, function: Any) -> None:
        saved.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    for modeling in _modelings(module):
        for name, item in list(vars(modeling).items()):
            if isinstance(item, type) and item.__module__ == modeling.__name__:
                if name.endswith("RMSNorm"):
                    replace(item, "forward", _rms_norm)
                elif name.endswith("RotaryEmbedding"):
                    replace(item, "forward", _rotary_tables)
        replace(modeling, "apply_rotary_pos_emb", _rotation_as(modeling, modeling.__name__ == halved))
    try:
        yield
    finally:
        for owner, name, function in saved:
            setattr(owner, name, function)


def _modelings(module: nn.Module) -> list[ModuleType]:
    """Llama's module of transformers, of which heads are made, and those that define classes below `module`."""
    names = dict.fromkeys(type(part).__module__ for part in module.modules())
    others = [sys.modules[name] for name in names if name.startswith("transformers.models.")]
    return [modeling_llama, *(each for each in others if each is not modeling_llama)]


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    gain = getattr(self, "weight", None)  # Gemma-4 has norms without
    gain = torch.ones(x.shape[-1], dtype=x.dtype) if gain is None else gain
    return nn.functional.rms_norm(x, (x.shape[-1],), gain, self.eps if hasattr(self, "eps") else self.variance_epsilon)


def _rotary_tables(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [1, T, D/2]: the operator takes one half, because both are equal. D: the rotated part of a
    head. position_ids: [1, T], or [axes, 1, T] of models that read images too (Qwen3.5): of a text the axes are equal.
    layer_type: of modules with a table for each."""
    position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids
    which = "" if layer_type is None else f"{layer_type}_"
    angles = position_ids[..., None].float() * getattr(self, f"{which}inv_freq").float()
    scale = getattr(self, f"{which}attention_scaling")
    return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)


def _rotation_as(modeling: ModuleType, halved: bool) -> Any:
    """Returns the function that rotates as transformers' function of a model does: of a head each number with the one
    half a head away (Llama), or neighbours (GLM), which are half a head away where weights were reordered so. Raises
    ExportError for one that does something else. halved: whether weights were reordered."""
    heads, angles = torch.arange(1.0, 9.0).reshape(1, 1, 1, 8), torch.arange(1.0, 5.0).reshape(1, 1, 4)
    if next(iter(inspect.signature(modeling.apply_rotary_pos_emb).parameters)) == "x":
        tables = torch.cat([angles, angles], -1)
        expected = modeling.apply_rotary_pos_emb(heads, tables.cos(), tables.sin(), 2)
        if torch.allclose(_rotate_rows(heads, angles.cos(), angles.sin(), 2), expected):
            return _rotate_rows
    for tables in (torch.cat([angles, angles], -1), angles):  # of a head, or of one half (gpt-oss)
        try:
            expected = modeling.apply_rotary_pos_emb(heads, heads, tables.cos(), tables.sin())[1]
        except RuntimeError:  # of shapes that do not fit
            continue
        for neighbours in (True,) if halved else (False, True):
            one = partial(_apply_rotary, neighbours)
            if torch.allclose(one(heads, heads, angles.cos(), angles.sin())[1], expected):
                return partial(_apply_rotary, neighbours and not halved)
    raise ExportError(f"{modeling.__name__} rotates heads in a way that is not known; export a model of a known family")


def _rotate_rows(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
    """As Gemma-4 rotates queries or keys, [1, T, heads, D]."""
    assert unsqueeze_dim == 2
    return torch.onnx.ops.rotary_embedding(x.transpose(1, 2), cos, sin).transpose(1, 2)


def _apply_rotary(
    interleaved: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    rotated = 2 * cos.shape[-1]
    part = rotated if rotated < q.shape[-1] else 0

    def rotate(x: Tensor) -> Tensor:
        return torch.onnx.ops.rotary_embedding(x, cos, sin, interleaved=interleaved, rotary_embedding_dim=part)

    return rotate(q), rotate(k)
