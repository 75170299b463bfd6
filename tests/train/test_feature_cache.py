"""What the target says of the windows, kept on disk: in fp16, shared by all kinds of heads, filled where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import GOLDEN
from eagle_train import cache
from eagle_train.batches import OnlineTeacher, gather
from eagle_train.cache import CachedTeacher
from eagle_train.data import Example, Windows, write_windows
from eagle_train.held import HeldTeacher
from eagle_train.target import FrozenTarget, States
from eagle_train.taught import Taught

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(GOLDEN / "target", CPU)


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Windows:
    """Texts of unlike lengths, longest first, whose first three tokens carry no loss."""
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 256, length).tolist() for length in range(30, 6, -2)]
    examples = [Example(ids, [i > 2 for i in range(len(ids))]) for ids in texts]
    return write_windows(examples, tmp_path_factory.mktemp("windows"), 40, "texts")


def taught(teacher: CachedTeacher | HeldTeacher | OnlineTeacher, windows: Windows, indices: Sequence[int]) -> Taught:
    return teacher.teach(windows, indices, gather(windows, indices, CPU))


def files(folder: Path) -> dict[str, int]:
    (place,) = folder.iterdir()
    return {path.name: path.stat().st_mtime_ns for path in place.glob("*.npy")}


@pytest.mark.parametrize("taps", [(), (2, 4, 5)])
def test_a_cache_says_what_the_target_says(
    taps: tuple[int, ...], target: FrozenTarget, windows: Windows, tmp_path: Path
) -> None:
    cached, online = CachedTeacher(tmp_path, target, taps, windows, "target"), OnlineTeacher(target, taps)
    indices = [0, 7, 11]
    ours, theirs = (taught(each, windows, indices) for each in (cached, online))
    asked = gather(windows, indices, CPU).asked
    inside = gather(windows, indices, CPU).ids > 0
    assert ours.last is not None and theirs.last is not None
    torch.testing.assert_close(ours.features[inside], theirs.features[inside], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.last[inside], theirs.last[inside], rtol=1e-3, atol=1e-3)
    assert torch.equal(ours.said.best[asked], theirs.said.best[asked])
    rows, kept = torch.nonzero(asked.flatten()).flatten(), torch.arange(0, 256, 3)
    for ids in (kept, None):
        a, b = (each.said.probabilities(rows, ids) for each in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-3)
    stored = np.load(next(tmp_path.glob("*/last.npy")), mmap_mode="r")
    assert stored.dtype == np.float16 and stored.shape == (len(windows.ids), target.hidden_size + 1)


@pytest.mark.parametrize("taps", [(), (2, 4, 5)])
def test_states_that_a_gpu_holds_are_those_of_the_first_epoch(
    taps: tuple[int, ...], target: FrozenTarget, windows: Windows
) -> None:
    held, online = HeldTeacher(target, taps, windows), OnlineTeacher(target, taps)
    for indices in ([0, 7, 11], [3, 4]):
        taught(held, windows, indices)
    mixed = [7, 3, 0]  # all known, in another batch
    ours, theirs = (taught(each, windows, mixed) for each in (held, online))
    batch = gather(windows, mixed, CPU)
    inside, rows = batch.ids > 0, torch.nonzero(batch.asked.flatten()).flatten()
    torch.testing.assert_close(ours.features[inside], theirs.features[inside])
    torch.testing.assert_close(ours.said.logits(rows, None), theirs.said.logits(rows, None))
    torch.testing.assert_close(ours.said.probabilities(rows, None), theirs.said.probabilities(rows, None))
    assert torch.equal(ours.said.best, theirs.said.best) and not HeldTeacher.fits(target, taps, windows)


def test_heads_share_what_they_read_alike(target: FrozenTarget, windows: Windows, tmp_path: Path) -> None:
    CachedTeacher(tmp_path, target, (), windows, "target")
    assert set(files(tmp_path)) == {"last.npy", "best.npy", "lse.npy"}
    CachedTeacher(tmp_path, target, (2, 5), windows, "target")
    CachedTeacher(tmp_path, target, (2, 4, 5), windows, "target")
    filled = files(tmp_path)
    assert set(filled) == {"last.npy", "best.npy", "lse.npy", "tap2.npy", "tap4.npy", "tap5.npy"}
    CachedTeacher(tmp_path, target, (4, 5), windows, "target")
    assert files(tmp_path) == filled


def test_an_interrupted_fill_goes_on(
    target: FrozenTarget, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "TOKENS", 40)
    monkeypatch.setattr(cache, "SAVED_EVERY_S", 0.0)
    read: list[torch.Size] = []
    states = FrozenTarget.states

    def interrupted(self: FrozenTarget, ids: torch.Tensor, taps: tuple[int, ...]) -> States:
        if len(read) == 5:
            raise KeyboardInterrupt
        read.append(ids.shape)
        return states(self, ids, taps)

    with monkeypatch.context() as patch:
        patch.setattr(FrozenTarget, "states", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CachedTeacher(tmp_path / "parts", target, (2, 4), windows, "target")
    (place,) = (tmp_path / "parts").iterdir()
    done = json.loads((place / "done.json").read_text(encoding="utf-8"))
    assert set(done) == {"last", "best", "lse", "tap2", "tap4"} and 0 < done["last"] < len(windows)
    later: list[torch.Size] = []
    with monkeypatch.context() as patch:

        def counted(self: FrozenTarget, ids: torch.Tensor, taps: tuple[int, ...]) -> States:
            later.append(ids.shape)
            return states(self, ids, taps)

        patch.setattr(FrozenTarget, "states", counted)
        parts = CachedTeacher(tmp_path / "parts", target, (2, 4), windows, "target")
    assert sum(shape[0] for shape in later) == len(windows) - done["last"]  # the rest alone
    whole = CachedTeacher(tmp_path / "whole", target, (2, 4), windows, "target")
    for index in range(len(windows)):
        ours, theirs = (taught(each, windows, [index]) for each in (parts, whole))
        assert torch.equal(ours.features, theirs.features) and torch.equal(ours.said.best, theirs.said.best)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system reserves no space")
def test_the_disks_space_is_taken_before_it_is_written(
    target: FrozenTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that other programs fill meanwhile would end the process in the middle of a write to a map."""
    long = write_windows([Example([7] * 2000, [True] * 2000)], tmp_path / "windows", 2000, "text")
    monkeypatch.setattr(cache, "_compute", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        CachedTeacher(tmp_path / "cache", target, (), long, "target")
    (place,) = (tmp_path / "cache").iterdir()
    for status in (path.stat() for path in place.glob("*.npy")):
        assert 512 * status.st_blocks >= status.st_size


def test_numbers_beyond_fp16_are_kept(target: FrozenTarget, windows: Windows, tmp_path: Path) -> None:
    """As in the residual streams of large models: a few features of 10^5 next to small ones."""
    large = FrozenTarget(GOLDEN / "target", CPU)
    with torch.no_grad():
        large.model.model.layers[2].mlp.down_proj.weight[5] *= 1e6
    exact = taught(OnlineTeacher(large, (3,)), windows, [0]).features
    kept = taught(CachedTeacher(tmp_path, large, (3,), windows, "large"), windows, [0]).features
    assert exact.abs().max() > 65504
    torch.testing.assert_close(kept, exact, rtol=2e-3, atol=0.1)
