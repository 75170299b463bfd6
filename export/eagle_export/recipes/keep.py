"""Layers that a recipe leaves as traced, in fp32 or fp16, because rounding them costs too much."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.recipes.graph import KEPT_WIDE, Linear, Pass, is_lm_head, linears

LM_HEAD = "lm_head.weight"  # also of a target whose LM head is its embedding


@dataclass(frozen=True, slots=True)
class KeepLayers(Pass[Linear]):
    """Hides every linear layer whose weight's name fits one of the patterns (*, ? and [] as in file names) from the
    passes that follow. An export asks `check_patterns` first."""

    patterns: tuple[str, ...]
    name = "kept layers"

    def pattern(self, model: ir.Model) -> list[Linear]:
        return [linear for linear in linears(model) if any(_fits(linear, pattern) for pattern in self.patterns)]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        kept = {}
        for linear in matches:
            linear.node.meta[KEPT_WIDE] = True
            kept[linear.name] = f"kept in {'fp16' if linear.dtype == ir.DataType.FLOAT16 else 'fp32'}"
        return kept

    def check_patterns(self, model: ir.Model) -> None:
        """Raises ExportError unless each pattern fits a layer."""
        layers = linears(model)
        for pattern in self.patterns:
            if not any(_fits(linear, pattern) for linear in layers):
                raise ExportError(
                    f"no linear layer of the target is named {pattern!r}, so that none can be kept; their names are "
                    f"like {layers[0].name} and {LM_HEAD}"
                )


def _fits(linear: Linear, pattern: str) -> bool:
    names = {linear.name, LM_HEAD} if is_lm_head(linear) else {linear.name}
    return any(fnmatchcase(name, pattern) for name in names)
