"""The README's figure shows what docs/results.md says."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from speed_figure import BARS, DOCS, draw, read_bars

RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


def test_the_figure_is_drawn_from_the_results() -> None:
    assert (DOCS / "speed.svg").read_text(encoding="utf-8") == draw(read_bars(RESULTS))


def test_every_bar_has_its_interval() -> None:
    bars = read_bars(RESULTS)
    assert len(bars) == len(BARS)
    assert all(0 < bar.low <= bar.speed <= bar.high for bar in bars)
    ElementTree.fromstring(draw(bars))


def test_a_table_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        read_bars(re.sub(r"^\| pytorch \| fp32 \| eager .*\n", "", RESULTS, flags=re.M))


def test_the_readme_quotes_the_figures() -> None:
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    sentence = readme[readme.index("tokens per second") - 300 :]
    assert all(re.search(rf"\b{bar.speed:.0f}\b", sentence) for bar in read_bars(RESULTS))
