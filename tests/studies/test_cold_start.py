"""studies.cold_start: all generations give the same tokens, and the table has a line for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from studies.cold_start import NAMES, compare, table
from studies.harness import main


def test_outputs_are_equal_and_the_users_cache_is_untouched(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    before = os.environ["EAGLE_CACHE"]
    kept = sorted(Path(before).iterdir())
    compared = compare(bundle_of("eagle1"), [[5, 17, 3, 60], [9, 8, 7]], 1, None, 40)
    assert [set(results) for results in compared] == [set(NAMES)] * 2
    results = [result for results in compared for result in results.values()]
    assert all(len(result.token_ids) == 40 and result.usage.prefill_s > 0 for result in results)
    assert os.environ["EAGLE_CACHE"] == before and sorted(Path(before).iterdir()) == kept
    lines = table(compared).splitlines()
    assert len(lines) == 5 and lines[3].split("|")[3].strip() == "1.00"


def test_a_file_that_is_no_question_set_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold_start", str(tmp_path), "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
