"""Opens a target: a Hugging Face folder or a GGUF file, with the names that its graph's weights have."""

from __future__ import annotations

from pathlib import Path

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.reading.gguf.checkpoint import open_stored
from eagle_export.reading.reconcile import reconciled


def open_target(path: Path) -> Checkpoint:
    """Opens a target, and decides what its parts contradict each other in (reconcile.py). Raises ExportError."""
    return agreeing(open_stored(path))


def agreeing(stored: Checkpoint) -> Checkpoint:
    """Returns a target's checkpoint whose config, names and tensors agree with each other and with its family's graph;
    of a family that is not known with each other alone. No values are read. Raises ExportError."""
    target = reconciled(stored)
    kind = target.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    return target if family is None else family.opened(target)
