"""Tuning heads on quantised targets, on the golden pair with a token per byte."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import GOLDEN, put_tokenizer
from studies.harness import main


@pytest.fixture
def arguments(bundle_of: Callable[..., Path], prompts: list[list[int]], tmp_path: Path) -> list[str]:
    """Of a run in which the bundles of the given head exist already."""
    target = shutil.copytree(GOLDEN / "target", tmp_path / "target")
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", target / "tokenizer.json")
    for precision in ("fp32", "int8"):
        copy = shutil.copytree(bundle_of("eagle1", precision), tmp_path / "work" / f"eagle1-{precision}")
        put_tokenizer(copy)
    texts = ["".join(map(chr, ids)) for ids in prompts[:2]]
    for name, rows in (("prompts", [{"prompt": text} for text in texts]), ("heldout", [{"turns": texts[:1]}])):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    files = ["--learn-from", str(tmp_path / "prompts.jsonl"), "--prompts", str(tmp_path / "heldout.jsonl")]
    options = ["-p", "int8", "--steps", "1", "--max-new-tokens", "12", "--threads", "1", "-w", str(tmp_path / "work")]
    return ["tune_heads", str(target), str(GOLDEN / "head_eagle1"), *files, *options]


def test_a_head_is_measured_before_and_after(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    table = capsys.readouterr().out
    first, second = table.splitlines()[2:]
    exact = re.fullmatch(r"\| eagle1 \| fp32 \| ([\d.]+) ± [\d.]+ \|  \|  \|  \|", first)
    assert exact is not None and float(exact[1]) > 2
    row = re.fullmatch(r"\| eagle1 \| int8 \| ([\d.]+) ± .* \| (.*)% \| ([\d.]+) ± .* \| (.*)% \|", second)
    assert row is not None
    for tau, far in ((row[1], row[2]), (row[3], row[4])):
        assert float(tau) > 1
        assert float(far) == pytest.approx(100 * (float(tau) / float(exact[1]) - 1), abs=0.5)
    files = [path for path in (tmp_path / "work").rglob("*") if path.is_file()]
    written = {path: path.stat().st_mtime_ns for path in files}
    assert main(arguments) == 0  # nothing is made again
    assert capsys.readouterr().out == table
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_a_step_that_fails_is_an_error(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["hello"]}\n', encoding="utf-8")
    assert main(arguments) == 2
    *_, first, last = capsys.readouterr().err.splitlines()
    assert "no chat template" in first
    assert last == "python -m studies tune_heads: eagle-train generate stopped; what it printed above says what to do"
    assert not (tmp_path / "work" / "answers-int8.jsonl").exists()
