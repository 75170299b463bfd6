"""What begins with nothing beside what begins with measured costs: the same tokens, and a line for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_tools.cold_start import NAMES, compare, main, table


def test_all_say_the_same_and_leave_the_users_folder_alone(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    before = os.environ["EAGLE_CACHE"]
    kept = sorted(Path(before).iterdir())
    found = compare(bundle_of("eagle1"), [[5, 17, 3, 60], [9, 8, 7]], 1, None, 40)
    assert [set(runs) for runs in found] == [set(NAMES)] * 2
    assert all(len(run.token_ids) == 40 and run.first_s > 0 for runs in found for run in runs.values())
    assert os.environ["EAGLE_CACHE"] == before and sorted(Path(before).iterdir()) == kept
    lines = table(found).splitlines()
    assert len(lines) == 5 and lines[3].split("|")[3].strip() == "1.00"


def test_a_file_that_is_no_question_set_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
