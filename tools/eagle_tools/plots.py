"""Plots as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

SIZE = (6.4, 4.8)  # inches


class CalibrationLine(NamedTuple):
    """Mean confidence, share accepted and number of nodes of each interval of confidence, all [intervals]."""

    label: str
    confidence: npt.NDArray[np.float64]
    accepted: npt.NDArray[np.float64]
    nodes: npt.NDArray[np.int64]


def calibration_plot(lines: Sequence[CalibrationLine], path: Path) -> None:
    """Plot the share of nodes accepted over the head's confidence (EAGLE-2, Figure 6). A point's size shows its number
    of nodes."""
    figure, axes = _new("confidence of the head", "share accepted")
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=1, label="confidence = share accepted")
    for label, confidence, accepted, nodes in lines:
        (line,) = axes.plot(confidence, accepted, linewidth=1.5, label=label)
        axes.scatter(confidence, accepted, s=10 + 40 * nodes / nodes.max(), color=line.get_color())
    axes.set(xlim=(0, 1), ylim=(0, 1))
    _save(figure, axes, path)


def precision_plot(points: Sequence[tuple[str, float | None, float]], path: Path) -> None:
    """Plot quality over speed. points: label, tokens per second with drafts (None: left out), and top-1 agreement with
    the reference."""
    figure, axes = _new("EAGLE tokens per second", "top-1 agreement with the reference")
    for label, *point in points:
        if point[0] is not None:
            axes.scatter(*point, s=40)
            axes.annotate(label, point, xytext=(6, 4), textcoords="offset points")
    axes.margins(x=0.2, y=0.15)  # room for the labels
    axes.set_xlim(left=0)
    _save(figure, axes, path)


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
