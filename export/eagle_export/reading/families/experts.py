"""Where the checkpoints of a family keep the experts of its layers. Shapes: E experts, k experts per row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

MODULE = "mlp"  # of a decoder layer


@dataclass(frozen=True, slots=True)
class Experts:
    """Where a family keeps its experts. block: name in checkpoints of the part of a layer that MODULE is here.
    gate, up, down: names in checkpoints of an expert's matrices. count, width: config -> E, columns of an expert.
    renormalised: config -> whether the weights of a row's k experts add up to 1."""

    block: str
    gate: str
    up: str
    down: str
    count: Callable[[Any], int]
    width: Callable[[Any], int]
    renormalised: Callable[[Any], bool]

    def counts(self, config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns E and k of a config.json; None where it leaves them to the defaults of transformers."""
        names = {"num_experts": config.get("num_local_experts")}  # as newer releases write it, for Qwen3-MoE
        try:
            return self.count(SimpleNamespace(**{**names, **config})), int(config["num_experts_per_tok"])
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def parameter(self, name: str) -> str:
        """Returns the name that a checkpoint's tensor has here."""
        head, block, tail = name.partition(f".{self.block}.")
        if not block or ".experts." not in name:
            return f"{head}.{MODULE}.{tail}" if block else name
        *before, matrix, kind = tail.split(".")
        renamed = {self.gate: "gate_proj", self.up: "up_proj", self.down: "down_proj"}.get(matrix, matrix)
        return ".".join([head, MODULE, *before, renamed, kind])
