"""Hardened pairs against the golden pair they were made from: every transform at every strength, and what it plants."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conftest import GOLDEN, HEADS
from eagle_tools.harden.strength import STRENGTHS
from harden import TRANSFORMS, harden

TARGET, HEAD_FOLDERS = GOLDEN / "target", [GOLDEN / folder for folder in HEADS.values()]


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform_keeps_the_logits_and_changes_the_weights(transform: str, strength: str, tmp_path: Path) -> None:
    difference = harden(TARGET, HEAD_FOLDERS, tmp_path / "hard", STRENGTHS[strength], transforms=[transform])
    assert 0 < max(difference.logits, *difference.heads.values()) <= 1e-4  # harden raises for more
    assert set(difference.heads) == {"eagle1", "eagle3"}
    assert different(tmp_path / "hard" / "target") >= 8  # in each layer


def different(target: Path) -> int:
    """Number of tensors that differ from the golden target's."""
    old, new = load_file(TARGET / "model.safetensors"), load_file(target / "model.safetensors")
    assert set(old) == set(new)
    return sum(old[name].shape != new[name].shape or not torch.allclose(old[name], new[name]) for name in old)
