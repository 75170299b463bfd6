"""Writes one self-contained HTML page: figures, plots and a viewer of recorded cycles. It loads no other files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from eagle_tools.bench import charts
from eagle_tools.bench.methods import SHAPE
from eagle_tools.bench.summary import Summary, estimate_text, peak_text, percent, ratio_text, shares_text

TITLES = ("bundle", "precision", "backend", "method", "tok/s", "x vanilla", "x PyTorch", "tau", "first token, ms")
MORE_TITLES = ("draft / verify / host, %", "peak MB", "roofline")


def page(summaries: Sequence[Summary], facts: Sequence[str], notes: Sequence[str], cycles: Mapping[str, Any]) -> str:
    """Returns the page as HTML. facts: phrases on machine and prompts. notes: sentences to show above the figures.
    cycles: as Recorder.data returns them."""
    body = ["<h1>eagle-bench</h1>", "<p class='facts'>" + " · ".join(map(escape, facts)) + "</p>"]
    body += [f"<p class='note'>{escape(note)}</p>" for note in notes]
    for temperature in dict.fromkeys(s.setup.temperature for s in summaries):
        some = [s for s in summaries if s.setup.temperature == temperature]
        without_sizes = [s for s in some if not SHAPE.fullmatch(s.setup.method)]
        body.append(f"<h2>Temperature {temperature:g}</h2>")
        words = "Median over the prompts; whiskers: its 95 % interval."
        body.append(_figure("Tokens per second", words, without_sizes, charts.speed_bars))
        words = "Host: everything that is neither drafting nor verifying. <i class='key draft'></i>draft "
        words += "<i class='key verify'></i>verify <i class='key host'></i>host"
        body.append(_figure("Time of a token by part", words, without_sizes, charts.split_bars))
        body.append(_figure("Tree sizes", "Tokens per second; the best is framed.", some, charts.sweep))
        body.append(_table(some))
    words = "Share of the passes that accepted n drafted tokens and accepted another."
    body.append(_figure("Acceptance by depth", words, summaries, charts.acceptance))
    if any(run["cycles"] for run in cycles["runs"]):
        body.append(_resource("viewer.html"))
    # "</" would end the script, "<!--" begin a comment in it.
    data = json.dumps(cycles, ensure_ascii=False).replace("<", "\\u003c")
    script = f'<script type="application/json" id="cycles">{data}</script><script>{_resource("page.js")}</script>'
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>eagle-bench</title><style>{_resource('page.css')}</style>"
    inner = "\n".join(part for part in body if part)
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{inner}\n</main>{script}</body></html>\n'
    )


def _figure(title: str, words: str, summaries: Sequence[Summary], draw: Callable[[Sequence[Summary]], str]) -> str:
    """words: HTML."""
    svg = draw(summaries) if summaries else ""
    return f"<section><h3>{title}</h3><p class='words'>{words}</p>{svg}</section>" if svg else ""


def _table(summaries: Sequence[Summary]) -> str:
    head = "".join(f"<th>{title}</th>" for title in (*TITLES, *MORE_TITLES))
    rows = []
    for s in summaries:
        cells = [s.setup.bundle, s.setup.precision, s.setup.backend, s.setup.method, estimate_text(s.tok_s)]
        cells += [ratio_text(s.vs_vanilla), ratio_text(s.vs_pytorch), f"{s.tau:.2f}", f"{1e3 * s.ttft_s:.1f}"]
        cells += [shares_text(s), peak_text(s.peak), percent(s.roofline)]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<details open><summary>All figures</summary><div class='wide'>{table}</div></details>"


def _resource(name: str) -> str:
    return resources.files("eagle_tools.bench").joinpath(name).read_text(encoding="utf-8")
