"""studies.tool_calls: calls with drafts are those without, and take fewer passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import put_listed, put_tokenizer
from studies.harness import main


@pytest.mark.slow
def test_passes(bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = shutil.copytree(bundle_of("eagle1", "int8"), tmp_path / "pair")
    put_tokenizer(bundle)
    put_listed(bundle, "chat_template.jinja", b"{% for m in messages %}{{ m.content }}\n{% endfor %}")
    assert main(["tool_calls", str(bundle), "--threads", "1"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 6 and all(float(row[-1]) <= 0.6 for row in rows), rows  # of a pair whose text means nothing
