"""Every file of a bundle damaged in every way. With hashes checked, nothing damaged is ever decoded from.

With `check_hashes=False` the caller vouches for the weights alone: what they are damaged to is decoded from, or
refused. Of all other files nothing damaged is used then either.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from eagle_runtime.bundle.manifest import MANIFEST_NAME
from faults.json_damage import flipped
from faults.probe import Answer, Probe, same
from faults.tally import Tally, scaled


@dataclass(frozen=True)
class Damage:
    """do: to the path of a file whose folder holds a whole bundle. keeps: whether the bundle's content stays right."""

    name: str
    do: Callable[[Path], object]
    keeps: bool = False


def damages(whole: Path, name: str, tally: Tally, outside: Path) -> Iterator[Damage]:
    """Of one file of a bundle. whole: the sound bundle. outside: a folder next to the damaged one."""
    rng, content = tally.random, (whole / name).read_bytes()
    for _ in range(scaled(25)):
        bits = rng.choice([1, 1, 1, 2, 50])
        yield Damage(f"{bits} bits flipped", partial(put, flipped(rng, content, bits)))
    for _ in range(scaled(6)):
        size = rng.randrange(len(content))
        yield Damage(f"cut to {size} bytes", partial(put, content[:size]))
    for _ in range(scaled(4)):
        start, size = rng.randrange(len(content)), rng.choice([1, 64, 4096])
        hole = content[:start] + bytes(size) + content[start + size :]
        if hole != content:
            yield Damage(f"{size} zeros at {start}", partial(put, hole))
    yield Damage("emptied", partial(put, b""))
    yield Damage("missing", lambda path: path.unlink())
    yield Damage("doubled", partial(put, content * 2))
    yield Damage("more at its end", partial(put, content + b"\0"))
    yield Damage("noise", partial(put, rng.randbytes(len(content))))
    yield Damage("larger than the disk", lambda path: os.truncate(path, 1 << 42))
    for other in files_of(whole):
        if (whole / other).read_bytes() != content:
            yield Damage(f"in its place {other}", partial(put, (whole / other).read_bytes()))
    for what, make in {
        "a folder": lambda path: path.mkdir(),
        "a pipe": os.mkfifo,
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a link to zeros": lambda path: path.symlink_to("/dev/zero"),
        "a link to a copy outside": lambda path: path.symlink_to(shutil.copy(whole / name, outside / "copy")),
        "a link to a folder": lambda path: path.symlink_to(outside),
    }.items():
        yield Damage(what, partial(instead, make))


def additions(tally: Tally) -> Iterator[Damage]:
    """Files that no bundle of ours has."""
    for name in ("notes.txt", "target/model.onnx.bak", "draft/x.so", "engines/nothing", ".hidden", "é\n"):
        yield Damage(f"more: {name!r}", partial(write, name), keeps=True)
    yield Damage("more: a pipe", lambda path: os.mkfifo(path.parent / "pipe"), keeps=True)
    yield Damage("more: a loop", lambda path: (path.parent / "loop").symlink_to("."), keeps=True)


def write(name: str, bundle: Path) -> None:
    path = bundle.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"\x7fELF" * 100)


def put(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def instead(make: Callable[[Path], object], path: Path) -> None:
    path.unlink()
    make(path)


def files_of(bundle: Path) -> list[str]:
    return sorted(path.relative_to(bundle).as_posix() for path in bundle.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Case:
    """file: that the damage is done to."""

    file: str
    damage: Damage
    answer: Answer


def campaign(whole: Path, folder: Path, tally: Tally, check_hashes: bool) -> Iterator[Case]:
    """Every damage to every file, and what came of it."""
    outside, work, bundle = (folder / name for name in ("outside", "work", "bundle"))
    for made in (outside, work):
        made.mkdir()
    with Probe(whole, work) as probe:
        yield Case("none", Damage("none", lambda path: None, keeps=True), probe.ask(whole))
        for name in files_of(whole):
            for damage in (*damages(whole, name, tally, outside), *(additions(tally) if name == MANIFEST_NAME else ())):
                shutil.copytree(whole, bundle)
                damage.do(bundle / name)
                # On every third, the command, which always checks hashes.
                by_command = check_hashes and tally.random.random() < 0.33
                yield Case(name, damage, probe.ask(bundle, check_hashes=check_hashes, command=by_command))
                shutil.rmtree(bundle)


@pytest.mark.slow
def test_bundle_fuzz_with_hashes(text_bundle: Callable[[str], Path], tmp_path: Path, tally: Tally) -> None:
    cases = campaign(text_bundle("int8"), tmp_path, tally, check_hashes=True)
    wanted = next(cases).answer["outputs"]
    for case in cases:
        right = case.answer["outcome"] == "served" and same(case.answer, wanted)
        # What the manifest says of tools and recipes is for people: a change there may go unseen.
        if right and (case.damage.keeps or case.file == MANIFEST_NAME):
            tally.add("served with the same output (no listed file was damaged)")
        elif case.answer["outcome"] == "refused" and not case.damage.keeps:
            tally.add("refused in one sentence")
        else:
            tally.fail((case.file, case.damage.name), case.answer)


@pytest.mark.slow
def test_bundle_fuzz_without_hashes(text_bundle: Callable[[str], Path], tmp_path: Path, tally: Tally) -> None:
    cases = campaign(text_bundle("int8"), tmp_path, tally, check_hashes=False)
    wanted = next(cases).answer["outputs"]
    for case in cases:
        outcome = case.answer["outcome"]
        if outcome == "served" and same(case.answer, wanted):
            tally.add("served with the same output")
        elif outcome == "served" and case.file.endswith(".data"):
            tally.add("served with other output (weights were damaged)")
        elif outcome == "refused":
            tally.add("refused in one sentence")
        else:
            tally.fail((case.file, case.damage.name), case.answer)
