"""The table of what long contexts cost, on the golden pair."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import put_tokenizer
from studies.harness import main


def test_bundles_are_compared_at_each_context(
    bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles = []
    for name, precision in (("wide", "int8"), ("narrow", "int8+int8 cache")):
        bundles.append(shutil.copytree(bundle_of("eagle1", precision), tmp_path / name))
        put_tokenizer(bundles[-1])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["one two", "three"]}) + "\n")
    words = [*map(str, bundles), "--prompts", str(prompts), "--rounds", "2", "--max-new-tokens", "4"]
    assert main(["contexts", *words, "--contexts", "5,90"]) == 0
    rows = [line.strip("|").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[0].strip(), row[1], row[2]) for row in rows] == [
        (context, bundle, method)
        for context in ("5", "90")
        for bundle in ("wide", "narrow")
        for method in ("vanilla", "eagle+lookup")
    ]
    wide, narrow = (float(row[-1]) for row in (rows[4], rows[6]))
    assert wide > 2 * narrow > 0  # 4 bytes a number against 1, and a scale for each head
    assert main(["contexts", *words, "--contexts", "0"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err
