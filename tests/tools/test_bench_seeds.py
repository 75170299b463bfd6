"""`eagle-bench --table seeds`: every method that the papers compare, lossless, in one table."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import put_tokenizer
from eagle_tools.bench.cli import main
from eagle_tools.bench.seeds import NOTE, PUBLISHED, seed_methods


def test_all_methods_that_the_bundles_can_run_are_in_the_table(
    bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(bundle_of("eagle1"), tmp_path / "pair")
    put_tokenizer(bundle)
    questions, text = tmp_path / "set.jsonl", tmp_path / "text.txt"
    questions.write_text(json.dumps({"question_id": 1, "category": "c", "turns": ["def f(n):"]}) + "\n")
    text.write_text("def f(n):\n    return n\n" * 20)
    given = [str(bundle), "--prompts", str(questions), "--threads", "1", "--max-new-tokens", "12", "--table", "seeds"]
    assert main([*given, "--draft-bundle", str(bundle), "--datastore", str(text)]) == 0
    table = capsys.readouterr().out.split("published: x plain, tau")[1]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| pair")
    ]
    assert {row[2] for row in rows} == set(seed_methods()) and table.rstrip().endswith(NOTE)
    for row in rows:
        assert all(float(row[place].split("x")[0]) > 0 and float(row[place + 1]) >= 1 for place in (3, 5))
        name, speed, tau = PUBLISHED.get(row[2], ("", 0, 0))
        assert row[7] == (f"{name} {speed:.2f}x, {tau:.2f}" if name else "")
