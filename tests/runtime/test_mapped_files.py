"""Pages of mapped files that are let go, and come back as they were."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from eagle_runtime.machine import mapped_files
from eagle_runtime.machine.mapped_files import let_go, unchanged

PAGES = 8

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")


def private(path: Path) -> mmap.mmap:
    """A mapping as ONNX Runtime makes it: writes stay in the process."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


def test_pages_come_back_and_changed_ones_stay(tmp_path: Path) -> None:
    content = bytes(range(256)) * (PAGES * mmap.PAGESIZE // 256)
    for folder in ("target", "target2"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "weights").write_bytes(content)
    (tmp_path / "link").symlink_to("target")
    weights, others = tmp_path / "target" / "weights", tmp_path / "target2" / "weights"
    with private(weights) as read, private(others) as other:
        assert read[:] == other[:] == content
        assert let_go(tmp_path / "link") == len(content) and let_go(tmp_path / "missing") == 0
        assert read[:] == content
        read[3] = 77
        assert let_go(tmp_path / "target") == 0 and read[3] == 77
        assert [name for *_, name in unchanged() if name.startswith(str(tmp_path))] == [str(others)]


def test_links_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(bytes(PAGES * mmap.PAGESIZE))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "weights").symlink_to("../blob")
    with private(tmp_path / "blob"):
        assert let_go(tmp_path / "target") == PAGES * mmap.PAGESIZE


def test_changed_pages_that_were_swapped_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "".join(
        f"{number}000-{number}fff rw-p 00000000 fe:00 7   /w{number}\nAnonymous: {own} kB\nSwap: {swapped} kB\n"
        for number, (own, swapped) in enumerate([(0, 0), (0, 8), (4, 0), (4, 8)], 1)
    )
    (tmp_path / "smaps").write_text(said)
    monkeypatch.setattr(mapped_files, "SMAPS", tmp_path / "smaps")
    assert unchanged() == [(0x1000, 0x1FFF, "/w1")]
