"""Plots as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SIZE = (6.4, 4.8)  # inches


def precision_plot(points: Sequence[tuple[str, float | None, float]], path: Path) -> None:
    """Plot quality over speed. points: label, tokens per second with drafts (None: left out), and top-1 agreement with
    the reference."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=SIZE, dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="EAGLE tokens per second", ylabel="top-1 agreement with the reference")
    axes.grid(alpha=0.3)
    for label, speed, agreement in points:
        if speed is not None:
            axes.scatter(speed, agreement, s=40)
            axes.annotate(label, (speed, agreement), xytext=(6, 4), textcoords="offset points")
    axes.margins(x=0.2, y=0.15)  # room for the labels
    axes.set_xlim(left=0)
    figure.savefig(path)


def ratio_plot(panels: Mapping[str, Sequence[tuple[str, float, float, float]]], x: str, path: Path) -> None:
    """Plot ratios as horizontal bars with their intervals, and a line at 1: one panel next to another, by title.
    panels: title -> (label, ratio, low, high)."""
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(label for bars in panels.values() for label, *_ in bars))
    height = 1.2 + 0.28 * len(labels)
    figure = Figure(figsize=(3.6 + 3.0 * len(panels), height), dpi=120, layout="constrained")
    for axes, (title, bars) in zip(
        np.atleast_1d(figure.subplots(1, len(panels), sharey=True)), panels.items(), strict=True
    ):
        at = [labels.index(label) for label, *_ in bars]
        values, low, high = (np.array(column) for column in list(zip(*bars, strict=True))[1:])
        axes.barh(at, values, xerr=[values - low, high - values], height=0.7, ecolor="black", capsize=2)
        for place, value, end in zip(at, values, high, strict=True):
            axes.text(end, place, f" {value:.2f}", va="center", fontsize=8)
        axes.axvline(1.0, color="grey", linestyle="--", linewidth=1)
        axes.set(title=title, xlabel=x)
        axes.margins(x=0.15)
        axes.set_xlim(left=0)
        axes.grid(axis="x", alpha=0.3)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    figure.savefig(path)
