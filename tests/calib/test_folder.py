"""Folders that are renamed when complete: two processes at once, and killed ones, with real processes and kills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eagle_calib.errors import FolderError
from eagle_calib.folder import WORK, claimed, clear_leftovers, written
from patience import PATIENCE_S
from systems import needs_links

WRITER = """
import sys
from pathlib import Path
from eagle_calib.folder import written
with written(Path(sys.argv[1])) as new:
    (new / "file").write_text(sys.argv[2])
    print("writing", flush=True)
    sys.stdin.readline()
"""
# Renames as `written` does, and stops between the two renames.
HALF = """
import sys
from pathlib import Path
from eagle_calib.folder import claimed
place = Path(sys.argv[1])
with claimed(place) as work:
    (work / "new").mkdir()
    (work / "new" / "file").write_text("new")
    place.rename(work / "old")
    print("writing", flush=True)
    sys.stdin.readline()
"""

# Replaces the folder over and over, until it is killed.
AGAIN = """
import sys
from pathlib import Path
from eagle_calib.folder import written
for turn in range(1_000_000):
    with written(Path(sys.argv[1])) as new:
        (new / "file").write_text(sys.argv[2])
    if turn == 0:
        print("writing", flush=True)
"""


@contextmanager
def writer(place: Path, content: str = "theirs", code: str = WRITER) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of writing a folder; it continues when it is sent a line."""
    command = [sys.executable, "-c", code, str(place), content]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "writing\n"
        yield process
        if process.poll() is None:
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait(PATIENCE_S)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    place = tmp_path / "place"
    with written(place) as new:
        (new / "file").write_text("one")
        assert names(tmp_path) == [f".place{WORK}"]
    assert names(tmp_path) == ["place"] and (place / "file").read_text(encoding="utf-8") == "one"
    with pytest.raises(ZeroDivisionError), written(place) as new:
        (new / "file").write_text(str(1 // 0))
    assert names(tmp_path) == ["place"] and (place / "file").read_text(encoding="utf-8") == "one"
    with written(place) as new:
        (new / "file").write_text("two")
    assert names(tmp_path) == ["place"] and (place / "file").read_text(encoding="utf-8") == "two"


def test_an_older_folder_that_must_stay_is_restored(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "mine").write_text("mine")

    def refuse(older: Path) -> None:
        assert names(older) == ["mine"] and not place.exists()
        raise FolderError("mine")

    with pytest.raises(FolderError, match="mine"), written(place, refuse) as new:
        (new / "file").write_text("new")
    assert names(tmp_path) == ["place"] and names(place) == ["mine"]


def test_a_folder_that_somebody_looks_at_is_renamed_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Windows does where a virus scanner has a new file open."""
    replace, left = os.replace, [PermissionError(13, "Access is denied")] * 2

    def refused_twice(source: Path, destination: Path) -> None:
        if left:
            raise left.pop()
        replace(source, destination)

    monkeypatch.setattr(os, "replace", refused_twice)
    with written(tmp_path / "place") as new:
        (new / "file").write_text("new")
    assert not left and names(tmp_path) == ["place"] and names(tmp_path / "place") == ["file"]


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with writer(tmp_path / "place") as process:
        process.kill()
        process.wait(PATIENCE_S)
    assert names(tmp_path) == [f".place{WORK}"] and names(tmp_path / f".place{WORK}") == ["lock", "new"]
    with written(tmp_path / "place") as new:
        assert names(new) == []
        (new / "file").write_text("mine")
    assert names(tmp_path) == ["place"] and (tmp_path / "place" / "file").read_text(encoding="utf-8") == "mine"


def test_leftovers_of_other_places_are_removed_too(tmp_path: Path) -> None:
    for place in ("one", "two", "three"):
        with writer(tmp_path / place) as process:
            process.kill()
            process.wait(PATIENCE_S)
    assert len(names(tmp_path)) == 3
    with writer(tmp_path / "alive") as process:
        clear_leftovers(tmp_path)
        assert names(tmp_path) == [f".alive{WORK}"] and names(tmp_path / f".alive{WORK}") == ["lock", "new"]
        clear_leftovers(tmp_path)
    assert process.returncode == 0
    assert names(tmp_path) == ["alive"] and (tmp_path / "alive" / "file").read_text(encoding="utf-8") == "theirs"


def test_two_processes_at_one_place(tmp_path: Path) -> None:
    """The second gets an error; the first is not disturbed."""
    place = tmp_path / "place"
    with writer(place) as process:
        with (
            pytest.raises(FolderError, match=re.escape(f"{place} is being written by another process")),
            written(place),
        ):
            raise AssertionError("never entered")
        assert process.poll() is None
    assert process.returncode == 0 and (place / "file").read_text(encoding="utf-8") == "theirs"
    assert names(tmp_path) == ["place"]


def test_two_processes_at_neighbouring_places(tmp_path: Path) -> None:
    with writer(tmp_path / "theirs"), written(tmp_path / "mine") as new:
        clear_leftovers(tmp_path)
        (new / "file").write_text("mine")
    assert names(tmp_path) == ["mine", "theirs"]
    assert (tmp_path / "mine" / "file").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "theirs" / "file").read_text(encoding="utf-8") == "theirs"


@pytest.mark.parametrize("how", ["clear", "claim"])
def test_after_a_kill_between_the_renames_the_older_folder_is_restored(tmp_path: Path, how: str) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "file").write_text("older")
    with writer(place, code=HALF) as process:
        process.kill()
        process.wait(PATIENCE_S)
    assert not place.exists()
    if how == "clear":
        clear_leftovers(tmp_path)
    else:
        with claimed(place) as work:
            assert names(work) == ["lock"] and place.is_dir()
    assert names(tmp_path) == ["place"] and (place / "file").read_text(encoding="utf-8") == "older"


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """The place holds the complete older or newer folder, and no work folder is left next to it."""
    place = tmp_path / "place"
    for turn in range(12):
        with writer(place, str(turn % 10) * 1000, AGAIN) as process:
            time.sleep(0.02 + 0.003 * turn)
            process.kill()
            process.wait(PATIENCE_S)
        clear_leftovers(tmp_path)
        assert names(tmp_path) == ["place"]
        assert (place / "file").read_text(encoding="utf-8") == str(turn % 10) * 1000


@needs_links
def test_folders_that_only_look_alike_stay(tmp_path: Path) -> None:
    (tmp_path / f".notes{WORK}").mkdir()
    (tmp_path / f".notes{WORK}" / "thesis.tex").write_text("years of work")
    (tmp_path / "elsewhere" / "new").mkdir(parents=True)
    (tmp_path / f".link{WORK}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f".file{WORK}").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    clear_leftovers(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
