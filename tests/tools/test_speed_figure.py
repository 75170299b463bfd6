"""The README's figure and table show what docs/results.md says, of recipes that are today's."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from eagle_export.recipes.plan import plan
from eagle_tools.results import recipe_sums
from eagle_tools.results.pairs import MEASURED
from speed_figure import BARS, DOCS, README, draw, processor, read_bars, readme_table

RESULTS = (DOCS / "results.md").read_text(encoding="utf-8")


def test_the_figure_is_drawn_from_the_results() -> None:
    assert (DOCS / "speed.svg").read_text(encoding="utf-8") == draw(read_bars(RESULTS), processor(RESULTS))


def test_every_bar_has_its_interval() -> None:
    bars = read_bars(RESULTS)
    assert len(bars) == len(BARS)
    assert all(0 < bar.low <= bar.speed <= bar.high for bar in bars)
    ElementTree.fromstring(draw(bars, "CPU"))


def test_a_table_without_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        read_bars(re.sub(r"^\| pytorch \| fp32 \| eager .*\n", "", RESULTS, flags=re.M))


def test_the_readme_has_the_table() -> None:
    """`python tools/speed_figure.py` writes it; the model, the processor and the command stand below it."""
    page = README.read_text(encoding="utf-8")
    assert readme_table(RESULTS) in page
    (command,) = re.findall(r"^- command: (`.*`)$", RESULTS, re.M)
    assert command in page.replace("\n", " ")
    assert re.search(r"^- AMD EPYC with AVX2, .*AVX-512 VNNI, 2 threads$", RESULTS, re.M)
    assert "two threads of an AMD EPYC (Zen 4, AVX-512 VNNI)" in page


def test_the_fastest_mode_of_an_engine_is_shown() -> None:
    for speed, mode in (("9999.0", "lookup"), ("1.0", "drafts")):
        results = re.sub(r"(\| eagle-edge \| int4 \| lookup \|) [\d.]+", rf"\1 {speed}", RESULTS)
        assert re.search(rf"^\| eagle-edge int4 \| \d+ \| \d+ \({mode}\) \|", readme_table(results), re.M)
    plain = re.sub(r"^\| pytorch \| fp32 \| eager .*\n", "", RESULTS, flags=re.M)
    with pytest.raises(ValueError, match=r"PyTorch fp32 has the methods .* without 'eager'"):
        readme_table(plain)


def test_the_figure_names_the_processor() -> None:
    assert processor(RESULTS) in (DOCS / "speed.svg").read_text(encoding="utf-8")


def test_the_results_are_of_recipes_that_exist() -> None:
    """Fails where a recipe changed since the page was measured: `make bench` measures it again."""
    assert f"\n- {recipe_sums.recipes_line(MEASURED)}\n" in RESULTS


def test_another_block_size_is_another_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe_sums.recipe_sum("int4")
    assert before == recipe_sums.recipe_sum("int4") != recipe_sums.recipe_sum("int8")
    other = plan("cpu", "int8", "int4", None, recorded={})
    monkeypatch.setattr(recipe_sums, "plan", lambda *_, **__: other)
    assert recipe_sums.recipe_sum("int4") != before
