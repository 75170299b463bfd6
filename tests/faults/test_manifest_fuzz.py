"""Manifests damaged in every way: a bundle either decodes as the untouched one does, or is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime.bundle.manifest import MANIFEST_NAME
from faults.json_damage import damaged
from faults.probe import Probe, same
from faults.tally import Tally, scaled


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_manifest_fuzz(text_bundle: Callable[[str], Path], tmp_path: Path, tally: Tally, precision: str) -> None:
    whole = text_bundle(precision)
    bundle = Path(shutil.copytree(whole, tmp_path / "bundle"))
    (tmp_path / "work").mkdir()
    data = json.loads((whole / MANIFEST_NAME).read_text(encoding="utf-8"))
    files = sorted(tmp_path.rglob("*"))
    with Probe(whole, tmp_path / "work") as probe:
        wanted = probe.ask(whole)["outputs"]
        for number in range(scaled(1500)):
            content = damaged(tally.random, data)
            (bundle / MANIFEST_NAME).write_bytes(content)
            answer = probe.ask(bundle, check_hashes=number % 2 == 0, command=number % 3 == 0)
            if answer["outcome"] == "served" and same(answer, wanted):
                tally.add("served with the same output")
            elif answer["outcome"] == "served" and sampling_of(content) != data["sampling"]:
                tally.add("served with the settings that it names")
            elif answer["outcome"] == "refused":
                tally.add("refused in one sentence")
            else:
                tally.fail(number, answer)
    assert sorted(tmp_path.rglob("*")) == files


def sampling_of(content: bytes) -> object:
    """The settings that a manifest names for whoever names none."""
    return json.loads(content)["sampling"]
