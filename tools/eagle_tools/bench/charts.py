"""Draws plots as inline SVG. Colours come from the page's style sheet, for light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from eagle_tools.bench.identity import FOREIGN, PYTORCH
from eagle_tools.bench.methods import SHAPE
from eagle_tools.bench.summary import ALPHAS, Summary

WIDTH, LABEL, VALUE = 860, 250, 150  # width of a bar chart, of its left labels, and of the values on the right
BAR, GAP = 18, 8
PARTS = ("draft", "verify", "host")
ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
PANEL, ALPHA_STEP, ALPHA_HEIGHT = 290, 56, 150  # acceptance plots: distance between plots, and the axes


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of a chart. pieces: (length, style class), drawn end to end. low, high: ends of a whisker."""

    label: str
    pieces: tuple[tuple[float, str], ...]
    value: str
    low: float | None = None
    high: float | None = None
    heading: str = ""


def speed_bars(summaries: Sequence[Summary]) -> str:
    """Returns a chart of tokens per second with intervals, grouped by bundle."""
    colours = {method: f"c{index % 8}" for index, method in enumerate(dict.fromkeys(s.setup.method for s in summaries))}
    bars = []
    for s in summaries:
        ratio = f" \N{MIDDLE DOT} {s.vs_vanilla.value:.2f}x" if s.vs_vanilla and s.vs_vanilla.value != 1 else ""
        method, speed = s.setup.method, s.tok_s
        piece = (speed.value, colours[method])
        bars.append(Bar(method, (piece,), f"{speed.value:.1f}{ratio}", speed.low, speed.high, heading_of(s)))
    return bar_chart(bars, "tokens per second")


def split_bars(summaries: Sequence[Summary]) -> str:
    """Returns a chart of milliseconds per emitted token, split into draft, verify and host."""
    bars = []
    for s in summaries:
        if s.draft is None or s.verify is None or s.host is None or not s.tok_s.value:
            continue
        ms = 1e3 / s.tok_s.value
        pieces = tuple(
            (ms * max(share, 0.0), part) for share, part in zip((s.draft, s.verify, s.host), PARTS, strict=True)
        )
        bars.append(Bar(s.setup.method, pieces, f"{ms:.2f} ms, tau {s.tau:.2f}", heading=heading_of(s)))
    return bar_chart(bars, "milliseconds per token") if bars else ""


def heading_of(s: Summary) -> str:
    if s.setup.backend == PYTORCH:
        return f"PyTorch, {s.setup.precision}"
    if s.setup.backend in FOREIGN:
        return f"{s.setup.backend}, {s.setup.precision}"
    return f"{s.setup.bundle}, {s.setup.precision}" + ("" if s.setup.backend == "cpu" else f", {s.setup.backend}")


def bar_chart(bars: Sequence[Bar], unit: str) -> str:
    """Returns a chart of horizontal bars with a common scale. A heading is written above its first bar."""
    top = max(max(sum(length for length, _ in bar.pieces), bar.high or 0.0) for bar in bars)
    scale = (WIDTH - LABEL - VALUE) / (top or 1.0)
    parts, y, heading = [], 24, ""
    for bar in bars:
        if bar.heading != heading:
            heading = bar.heading
            parts.append(_text(0, y + 14, heading, "head"))
            y += 22
        parts.append(_text(LABEL - 10, y + 13, bar.label, "label", "end"))
        x = float(LABEL)
        for length, style in bar.pieces:
            if length > 0:
                parts.append(f'<rect class="{style}" x="{x:.1f}" y="{y}" width="{scale * length:.1f}" height="{BAR}"/>')
            x += scale * length
        if bar.low is not None and bar.high is not None:
            left, right, middle = LABEL + scale * bar.low, LABEL + scale * bar.high, y + BAR / 2
            parts.append(
                f'<path class="whisker" d="M{left:.1f} {middle}H{right:.1f}'
                f'M{left:.1f} {y + 5}v8M{right:.1f} {y + 5}v8"/>'
            )
            x = max(x, right)
        parts.append(_text(x + 8, y + 13, bar.value, "value"))
        y += BAR + GAP
    for tick in ticks(top):
        x = LABEL + scale * tick
        parts.insert(0, f'<path class="grid" d="M{x:.1f} 20V{y}"/>' + _text(x, 12, f"{tick:g}", "tick", "middle"))
    return _svg(WIDTH, y, parts, unit)


def acceptance(summaries: Sequence[Summary]) -> str:
    """Returns a chart of n-alpha over n: one panel per bundle and temperature, one line per drafting method."""
    drawn = [s for s in summaries if s.alphas and len(s.alphas) > 1 and not SHAPE.fullmatch(s.setup.method)]
    if not drawn:
        return ""
    styles = {method: f"s{index % 8}" for index, method in enumerate(dict.fromkeys(s.setup.method for s in drawn))}
    parts, x = [], 0.0
    for method, style in styles.items():
        parts.append(f'<path class="line {style}" d="M{x:.1f} 10h20"/>' + _text(x + 26, 14, method, "value"))
        x += 52 + 7.2 * len(method)
    panels: dict[str, list[Summary]] = {}
    for s in drawn:
        panels.setdefault(f"{heading_of(s)}, T = {s.setup.temperature:g}", []).append(s)
    for index, (heading, some) in enumerate(panels.items()):
        left, top = 36 + PANEL * (index % 3), 62 + 222 * (index // 3)
        parts.append(_text(left, top - 12, heading, "head"))
        parts += _alpha_axes(left, top)
        for s in some:
            style = styles[s.setup.method]
            points = [
                (left + ALPHA_STEP * n, top + ALPHA_HEIGHT * (1 - alpha)) for n, alpha in enumerate(s.alphas or ())
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="line {style}" points="{path}"/>')
            parts += [f'<circle class="{style} dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in points]
    width = max(WIDTH, x)
    return _svg(int(width), 62 + 222 * ((len(panels) + 2) // 3), parts, "share of passes accepting one more")


def _alpha_axes(left: float, top: float) -> list[str]:
    parts = []
    for tenth in range(0, 11, 2):
        y = top + ALPHA_HEIGHT * (1 - tenth / 10)
        parts.append(f'<path class="grid" d="M{left} {y:.1f}h{ALPHA_STEP * (ALPHAS - 1)}"/>')
        parts.append(_text(left - 8, y + 4, f"{tenth / 10:g}", "tick", "end"))
    for n in range(ALPHAS):
        parts.append(
            _text(left + ALPHA_STEP * n, top + ALPHA_HEIGHT + 16, f"{n}-\N{GREEK SMALL LETTER ALPHA}", "tick", "middle")
        )
    return parts


def sweep(summaries: Sequence[Summary]) -> str:
    """Returns a map per bundle of tokens per second by tree size: rows are depth and top_k, columns total_token."""
    maps: dict[str, list[Summary]] = {}
    for s in summaries:
        if SHAPE.fullmatch(s.setup.method):
            maps.setdefault(heading_of(s), []).append(s)
    parts: list[str] = []
    y = 0
    for heading, some in maps.items():
        parts.append(_text(0, y + 14, heading, "head"))
        y = _heat_map(some, parts, y + 20)
    return _svg(WIDTH, y, parts, "tokens per second") if parts else ""


def _heat_map(summaries: Sequence[Summary], parts: list[str], y: int) -> int:
    """Append a map below y to `parts`; returns the y of its lower end."""
    speeds = {tuple(map(int, s.setup.method.split("/"))): s.tok_s.value for s in summaries}
    low, high = min(speeds.values()), max(speeds.values())
    columns = {total: LABEL + 100 * i for i, total in enumerate(sorted({total for total, *_ in speeds}))}
    parts.append(_text(LABEL - 10, y + 14, "depth / top_k over total_token", "tick", "end"))
    parts += [_text(x + 48, y + 14, str(total), "tick", "middle") for total, x in columns.items()]
    y += 22
    for depth, k in sorted({(depth, k) for _, depth, k in speeds}):
        parts.append(_text(LABEL - 10, y + 19, f"{depth} / {k}", "label", "end"))
        for total, x in columns.items():
            if speed := speeds.get((total, depth, k)):
                heat = 0.12 + 0.78 * (speed - low) / ((high - low) or 1.0)
                best = " best" if speed == high else ""
                size = f'x="{x}" y="{y}" width="96" height="28" rx="3"'
                parts.append(f'<rect class="heat{best}" style="fill-opacity:{heat:.2f}" {size}/>')
                parts.append(_text(x + 48, y + 19, f"{speed:.1f}", "value", "middle"))
        y += 32
    return y + 14


def ticks(top: float) -> list[float]:
    """Returns about five round numbers from 0 to `top`."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** (len(f"{int(top)}") - 1) if top >= 1 else 0.1
    while power > top:
        power /= 10
    step = next(power * factor / 5 for factor in (*ROUND, 20.0) if top / (power * factor / 5) <= 6 or factor == 20.0)
    return [step * index for index in range(int(top / step) + 1)]


def _text(x: float, y: float, words: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(width: int, height: float, parts: Sequence[str], title: str) -> str:
    name = escape(title)
    head = f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{name}"><title>{name}</title>'
    return f"{head}{''.join(parts)}</svg>"
