"""Plots as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle_tools.acceptance import Acceptance
    from eagle_tools.precision import Row

SIZE = (6.4, 4.8)  # inches


def calibration_plot(rows: Sequence[Acceptance], path: Path) -> None:
    """Plot the share of nodes accepted over the head's confidence, one line per row (EAGLE-2, Figure 6). A point's size
    shows its number of nodes."""
    figure, axes = _new("confidence of the head", "share accepted")
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="confidence = share accepted")
    for row in rows:
        confidence, accepted, count = row.calibration()
        (line,) = axes.plot(confidence, accepted, linewidth=1.5, label=f"{row.bundle}, T = {row.temperature:g}")
        axes.scatter(confidence, accepted, s=10 + 40 * count / count.max(), color=line.get_color())
    axes.set(xlim=(0, 1), ylim=(0, 1))
    _save(figure, axes, path)


def scaling_plot(lines: Mapping[str, Sequence[tuple[float, float]]], path: Path) -> None:
    """Plot tau over the number of training tokens (EAGLE-3, Figure 1). lines: label -> (tokens, tau) points."""
    figure, axes = _new("training tokens", "tau: tokens per forward pass of the target")
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    ticks = sorted({tokens for points in lines.values() for tokens, _ in points})
    axes.set_xticks(ticks, [f"{tokens / 1e3:,.0f} k" for tokens in ticks])
    _save(figure, axes, path)


def precision_plot(rows: Sequence[Row], path: Path) -> None:
    """Plot quality over speed: top-1 agreement with the reference over tokens per second with drafts, one labelled
    point per bundle."""
    figure, axes = _new("EAGLE tokens per second", "top-1 agreement with the reference")
    for row in rows:
        if row.eagle_tokens_per_s is not None:
            point = (row.eagle_tokens_per_s, row.agreement)
            axes.scatter(*point, s=40)
            axes.annotate(row.bundle, point, xytext=(6, 4), textcoords="offset points")
    axes.margins(x=0.2, y=0.15)  # room for the labels
    axes.set_xlim(left=0)
    _save(figure, axes, path)


def _new(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=SIZE, dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    figure.savefig(path)
