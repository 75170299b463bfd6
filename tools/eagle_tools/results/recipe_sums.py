"""What a precision does to a graph, as one short sum: figures hold for recipes of the same sum."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from eagle_export.recipes.plan import default_draft_precision, plan

DIGITS = 12  # of the sum, in hexadecimal


def recipe_sum(precision: str, backend: str = "cpu") -> str:
    """Returns the sum of the passes over target and head, with their order and their settings. Recorded inputs have no
    part in it, nor do the names of files."""
    passes = plan(backend, precision, default_draft_precision(backend, precision), None, recorded={}).passes
    text = "\n".join(f"{graph}: {_described(step)}" for graph, steps in passes.items() for step in steps)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def recipes_line(precisions: Sequence[str]) -> str:
    """Returns the line of a page of results that says which recipes were measured."""
    return "recipes: " + ", ".join(f"{precision} {recipe_sum(precision)}" for precision in precisions)


def _described(value: Any) -> str:
    """A pass, or a value of its settings, as text that is the same in every process."""
    if isinstance(value, partial):
        return f"{value.func.__name__}({', '.join(map(_described, value.args))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return f"{type(value).__name__}{_described(fields)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_described, value))}]"
    return getattr(value, "__name__", None) or repr(value)
