"""studies.tool_calls: calls with drafts are those without, and take fewer passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import with_template
from studies.harness import main


@pytest.mark.slow
def test_passes(bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    bundle = with_template(bundle_of("eagle1", "int8"), tmp_path / "pair", template)
    assert main(["tool_calls", str(bundle), "--threads", "1"]) == 0
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(rows) == 6 and all(float(row[-1]) <= 0.6 for row in rows), rows  # of a pair whose text means nothing
