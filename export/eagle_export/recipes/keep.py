"""Layers that a recipe leaves as they were traced, in fp32 or fp16, since rounding them costs too much."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_export.recipes.graph import KEPT_WIDE, Linear, is_lm_head, linears

LM_HEAD = "lm_head.weight"  # also of a target whose LM head is its embedding


def keep(model: ir.Model, patterns: Sequence[str]) -> dict[str, str]:
    """Hide every linear layer whose weight's name fits one of the patterns (*, ? and [] as in file names) from the
    passes that follow. Returns its name -> that it was kept; raises ExportError for a pattern that fits none."""
    kept, missing = {}, dict.fromkeys(patterns)
    found = linears(model)
    for linear in found:
        if fits := [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in _names(linear))]:
            assert linear.x.dtype is not None
            linear.node.meta[KEPT_WIDE] = True
            kept[linear.name] = f"kept in {'fp16' if linear.x.dtype == ir.DataType.FLOAT16 else 'fp32'}"
            for pattern in fits:
                missing.pop(pattern, None)
    if missing:
        raise ExportError(
            f"no linear layer of the target is named {next(iter(missing))!r}, so that none can be kept; their names "
            f"are like {found[0].name} and {LM_HEAD}"
        )
    return kept


def _names(linear: Linear) -> set[str]:
    return {linear.name, LM_HEAD} if is_lm_head(linear) else {linear.name}
