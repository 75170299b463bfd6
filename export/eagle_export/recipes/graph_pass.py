"""What every pass of a recipe is: a pattern to find, a rewrite of the nodes that match, and a check of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.recipes.graph import Linear, linears

Match = TypeVar("Match")


@dataclass(frozen=True, slots=True, eq=False)
class Pass(ABC, Generic[Match]):
    """One change to a graph, with its settings as fields. name: as errors call it."""

    name: ClassVar[str]

    @abstractmethod
    def pattern(self, model: ir.Model) -> list[Match]:
        """Returns the nodes or layers that the pass will change, in the graph's order."""

    @abstractmethod
    def rewrite(self, model: ir.Model, matches: list[Match]) -> dict[str, str]:
        """Changes them in place. Returns weight or node name -> what was done, in words for the manifest."""

    def check(self, model: ir.Model) -> None:
        """Raises ExportError if the graph is not as it must be after the pass: the pattern still matches something."""
        if rest := self.pattern(model):
            raise ExportError(f"pass {self.name!r} left {len(rest)} of its matches unchanged; report this as a bug")

    def apply(self, model: ir.Model) -> dict[str, str]:
        """Finds, rewrites and checks. Returns what `rewrite` does, nothing if the pattern matches nothing."""
        matches = self.pattern(model)
        if not matches:
            return {}
        changed = self.rewrite(model, matches)
        self.check(model)
        return changed


@dataclass(frozen=True, slots=True)
class LayerPass(Pass[Linear]):
    """A pass over the linear layers that are `wanted`: by default all that are still in floats."""

    wanted: Callable[[Linear], bool] = field(default=lambda _: True, kw_only=True)

    def pattern(self, model: ir.Model) -> list[Linear]:
        return list(filter(self.wanted, linears(model)))
