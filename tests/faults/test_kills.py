"""Exports and calibrations killed by SIGKILL, again and again, each over what the one before left.

After each the destination is the older folder or the new one, whole. Between the two renames that put the new one in
its place, the older one lies whole next to it, and the next command that writes there puts it back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_calib.calibration import read_calibration
from eagle_runtime.bundle.listed_files import verify_hashes
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from faults.forks import Forks, Kill
from faults.tally import Tally, scaled

SIGKILLED = -9


def check_bundle(folder: Path) -> object:
    """Its precision; raises BundleError unless it is whole."""
    manifest = read_manifest(folder)
    verify_hashes(folder, manifest)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert present == {MANIFEST_NAME, *manifest.files}
    return manifest.precision["target"]


def check_calibration(folder: Path) -> object:
    """How many tokens it saw; raises CalibrationError unless it is whole."""
    assert {path.name for path in folder.iterdir()} == {"calibration.json", "calibration.npz"}
    return float(read_calibration(folder).token_counts.sum())


def contents(folder: Path, but: set[str]) -> dict[Path, bytes | None]:
    """All files below a folder, but for some names in it."""
    paths = [path for path in folder.rglob("*") if path.relative_to(folder).parts[0] not in but]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def moments(tally: Tally, operations: int, seconds: float, by_operation: int, by_time: int) -> list[Kill]:
    """When to kill: before the last operations on files one by one, when the folders change places, before some
    others, and after some times."""
    last = list(range(max(1, operations - by_operation // 2), operations + 1))
    others = [tally.random.randrange(1, operations + 1) for _ in range(by_operation - len(last))]
    kills = [Kill(at_operation=number) for number in (*last, *others)]
    kills += [Kill(after_s=tally.random.uniform(0, seconds)) for _ in range(by_time)]
    tally.random.shuffle(kills)
    return kills


def kill_all(
    forks: Forks,
    tally: Tally,
    place: Path,
    argv: Callable[[int], tuple[str | Path, ...]],
    refused: tuple[str | Path, ...],
    check: Callable[[Path], object],
    counts: tuple[int, int],
) -> None:
    """Kill a command at many moments.

    argv: of the n-th. refused: of one that ends with status 2. check: raises unless a folder is whole, and tells which
    it is. counts: of kills before operations, and after times."""
    out = place.parent
    out.mkdir()
    (out / ".other.eagle-work").mkdir()
    for name in ("notes.txt", ".other.eagle-work/notes.txt", f"{place.name}-old"):
        (out / name).write_text("not to be touched")
    work = f".{place.name}.eagle-work"
    foreign = contents(out, {place.name, work})
    kinds, first = set(), None
    for number in range(2):  # the kinds in turns, and how long one takes
        first = forks.run(argv(number), out)
        assert first["status"] == 0
        kinds.add(check(place))
    assert first is not None and len(kinds) == 2
    for number, when in enumerate(moments(tally, first["operations"], first["seconds"], *counts)):
        before = check(place)
        done = forks.run(argv(number), out, when)
        try:
            assert done["status"] in (0, SIGKILLED), done
            assert contents(out, {place.name, work}) == foreign, "another's files"
            if done["status"] == 0:
                tally.add("ended before the kill")
                assert not (out / work).exists()
            elif not place.exists():
                assert check(out / work / "old") == before
                tally.add("killed between the renames: the older folder lay whole next to its place")
            elif check(place) == before:
                tally.add("killed: the older folder was in place, whole")
            else:
                tally.add("killed: the new folder was in place, whole")
        except Exception as error:
            tally.fail((number, when), repr(error))
        if not place.exists():  # the next command puts it back, and be it one that is refused for its arguments
            assert forks.run(refused, out)["status"] == 2
            assert check(place) == before
    assert forks.run(argv(0), out)["status"] == 0
    assert check(place) in kinds
    assert {path.name for path in out.iterdir()} - {path.name for path in foreign} == {place.name}
    assert contents(out, {place.name}) == foreign


@pytest.mark.slow
def test_kills_of_eagle_export(pair: tuple[Path, Path], tmp_path: Path, tally: Tally) -> None:
    bundle = tmp_path / "out" / "bundle"

    def argv(number: int) -> tuple[str | Path, ...]:
        precision = ("fp32", "int8")[number % 2]
        return ("eagle_export", *pair, "-o", bundle, "-p", precision, "--no-certificate")

    with Forks() as forks:
        refused = ("eagle_export", tmp_path / "nowhere", "-o", bundle)
        kill_all(forks, tally, bundle, argv, refused, check_bundle, (scaled(18), scaled(8)))


@pytest.mark.slow
def test_kills_of_eagle_calib(text_bundle: Callable[[str], Path], tmp_path: Path, tally: Tally) -> None:
    bundle, folder = Path(shutil.copytree(text_bundle("fp32"), tmp_path / "bundle")), tmp_path / "out" / "calibration"

    def argv(number: int) -> tuple[str | Path, ...]:
        return ("eagle_calib", bundle, "-o", folder, "--tokens", str(200 + 100 * (number % 2)), "--threads", "1")

    with Forks() as forks:
        refused = (*argv(0), "--data", tmp_path / "nowhere")
        kill_all(forks, tally, folder, argv, refused, check_calibration, (scaled(12), scaled(6)))
