"""Studies by name: all that are listed are there, with help of their own, and errors are of one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies.harness import NAMES, main

FOLDER = Path(__file__).resolve().parents[2] / "studies"


def test_every_module_is_listed_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "__main__", "harness"} == set(NAMES)
    for name in NAMES:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"python -m studies {name}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["kernel"]])
def test_an_unknown_name_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("studies: name one of block_ablation, constants")
