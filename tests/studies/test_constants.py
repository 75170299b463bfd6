"""A constant of drafting is changed for the time of a measurement, and only then."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import put_tokenizer
from eagle_runtime.drafting import acceptance, cost_aware
from studies import constants
from studies.harness import main


def test_a_constant_is_halved_and_put_back() -> None:
    before = acceptance.FADE, cost_aware.CHILD_CHANCES
    with constants.changed("eagle_runtime.drafting.acceptance", "FADE", 2.0):
        assert pytest.approx(1 - 2 * (1 - before[0])) == acceptance.FADE
    with constants.changed("eagle_runtime.drafting.cost_aware", "CHILD_CHANCES", 0.5):
        assert tuple(chance / 2 for chance in before[1]) == cost_aware.CHILD_CHANCES
    assert before == (acceptance.FADE, cost_aware.CHILD_CHANCES)


def test_all_constants_exist() -> None:
    for modules in constants.CONSTANTS.values():
        for module, *names in modules:
            owner = importlib.import_module(f"eagle_runtime.drafting.{module}")
            assert names and all(hasattr(owner, name) for name in names), module


def test_the_table_has_a_row_for_each(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(bundle_of("eagle3"), tmp_path / "pair")
    put_tokenizer(bundle)
    (tmp_path / "set.jsonl").write_text('{"turns": ["ab"]}\n')
    rows = {"eagle": (("acceptance", "PRIOR"),), "eagle sequoia": (("rank_acceptance", "PRIOR"),)}
    monkeypatch.setattr(constants, "CONSTANTS", rows)
    assert main(["constants", str(bundle), "--prompts", str(tmp_path / "set.jsonl"), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| acceptance.PRIOR | eagle | +0.0 % | +0.0 % |", "| rank_acceptance.PRIOR | eagle sequoia | +0.0 % | +0.0 % |"
    ]  # fmt: skip
