"""The user's cache folder: what lies there may be anything, and a disk may be full."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime.base.files import MEGABYTE
from eagle_runtime.machine.user_cache import read_cached, write_cached


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("EAGLE_CACHE", str(folder))
    return folder


def test_what_was_written_is_read(cache: Path) -> None:
    assert read_cached("a.json") is None
    write_cached("a.json", {"a": [1]})
    assert read_cached("a.json") == {"a": [1]}
    assert [path.name for path in cache.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "put",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text("9" * 5000),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.write_text(json.dumps("x" * MEGABYTE)),
    ],
    ids=["pipe", "folder", "device", "loop", "deep", "digits", "bytes", "large"],
)
def test_what_is_no_file_of_ours_is_as_good_as_none(put: Callable[[Path], object], cache: Path) -> None:
    cache.mkdir()
    put(cache / "a.json")
    assert read_cached("a.json") is None


def test_a_full_disk_leaves_no_file(cache: Path) -> None:
    write_cached("a.json", [1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        write_cached("a.json", [1.5] * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in cache.iterdir()] == ["a.json"]
    assert read_cached("a.json") == [1]
