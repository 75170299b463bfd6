"""The demo: an answer, and a table of speeds whose outputs are equal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from eagle_tools.demo import COMPARED, QUESTION, show
from eagle_tools.toy_demo import PAIR


def test_the_demo_answers_and_compares(tmp_path: Path) -> None:
    """On the toy pair, whose chat template makes code of a question; the published model takes a minute to export."""
    out = io.StringIO()
    assert show(PAIR / "target", PAIR / "eagle3", tmp_path / "bundle", Console(file=out, width=120))
    text = out.getvalue()
    assert QUESTION in text and "per forward pass" in text
    rows = [line for line in text.splitlines() if "eagle-edge, int8" in line]
    assert len(rows) == 2 and "equal to that without drafts" in rows[1] and f"{len(COMPARED)} questions" in text
    assert any("PyTorch (transformers), fp32" in line for line in text.splitlines())
