"""The user's cache folder, damaged: what is kept there only saves work, so output stays the same, without an error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime import EagleModel
from faults.json_damage import damaged
from faults.probe import CONTEXT, Probe, same
from faults.tally import Tally, scaled


def of_another_kind(path: Path, tally: Tally) -> None:
    """In a file's place something that is not a file, or none of this system's."""
    path.unlink()
    kind = tally.random.randrange(5)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        os.mkfifo(path)
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"")
        os.truncate(path, 1 << 42)


@pytest.mark.slow
def test_cache_corruption(
    text_bundle: Callable[[str], Path], tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, sound, cache, work = text_bundle("int8"), *(tmp_path / name for name in ("sound", "cache", "work"))
    work.mkdir()
    monkeypatch.setenv("EAGLE_CACHE", str(sound))
    with EagleModel.load(bundle, threads=1, context=CONTEXT) as model:
        model.generate([5, 6, 7], max_new_tokens=CONTEXT, ignore_eos=True)  # enough to learn what passes cost
    with Probe(bundle, work) as probe:
        wanted = probe.ask(bundle, env={"EAGLE_CACHE": str(sound)})["outputs"]
        files = {path.name: json.loads(path.read_text()) for path in sound.iterdir()}
        assert {name.split("-")[0] for name in files} == {"rows", "costs"}
        for number in range(scaled(500)):
            shutil.rmtree(cache, ignore_errors=True)
            shutil.copytree(sound, cache)
            name = tally.random.choice(sorted(files))
            content = damaged(tally.random, files[name])
            if tally.random.random() < 0.1:
                of_another_kind(cache / name, tally)
            else:
                (cache / name).write_bytes(content)
            answer = probe.ask(bundle, env={"EAGLE_CACHE": str(cache)}, command=number % 3 == 0)
            left = {path.name for path in cache.iterdir()} - set(files)
            if same(answer, wanted) and not left:
                tally.add("served with the same output")
            else:
                tally.fail((number, name, content[:300]), left or answer)
        in_the_way = tmp_path / "file"
        in_the_way.write_text("no folder")
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        folders = [in_the_way, in_the_way / "below", tmp_path / "loop", "/proc/self/eagle", "/dev/null", "/dev/full"]
        for folder in [*folders, "x" * 300, tmp_path / ("x" * 300), tmp_path / "é\n" / "new"]:
            for command in (False, True):
                answer = probe.ask(bundle, env={"EAGLE_CACHE": str(folder)}, command=command)
                if same(answer, wanted):
                    tally.add("served with the same output")
                else:
                    tally.fail(folder, answer)
    assert in_the_way.read_text() == "no folder"
