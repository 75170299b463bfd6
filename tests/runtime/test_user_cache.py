"""The user's cache folder: what lies there may be anything, and a disk may be full."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime.base.files import MEGABYTE
from eagle_runtime.machine.user_cache import read_cached, write_cached
from systems import largest_file, needs_links, posix_only


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
        pytest.param(lambda path: os.mkfifo(path), marks=posix_only),
        Path.mkdir,
        pytest.param(lambda path: path.symlink_to("/dev/zero"), marks=posix_only),
        pytest.param(lambda path: path.symlink_to(path), marks=needs_links),
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
    with largest_file(100):
        write_cached("a.json", [1.5] * 10_000)
    assert [path.name for path in cache.iterdir()] == ["a.json"]
    assert read_cached("a.json") == [1]
