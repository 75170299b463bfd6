"""--tune: what passes over more rows cost here, measured beforehand; trees of the kind "cost-aware" are sized by it,
and correct it from then on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_runtime import EagleModel
from eagle_runtime.drafting.costs.tables import Costs, Timings
from eagle_tools.bench.charts import line_chart
from eagle_tools.bench.plan import bundle_names
from eagle_tools.bench.rows import precision_name

Measured = Sequence[tuple[str, Costs]]


def tune(bundles: Sequence[Path], backend: str, context: int | None, threads: int | None) -> list[tuple[str, Costs]]:
    """Measure the passes of every bundle, which cost-aware decoding from now on begins with. threads: None is another
    setting than a number, and remembered apart."""
    found = []
    for name, bundle in zip(bundle_names(bundles), bundles, strict=True):
        with EagleModel.load(bundle, backend=backend, context=context, threads=threads) as model:
            costs = model.costs(measure_again=True)
            found.append((f"{name}, {precision_name(model.manifest)}, {model.backend}", costs))
    return found


def tune_table(measured: Measured) -> str:
    """Markdown: milliseconds by rows of a pass, and how many times those of one row."""
    parts = []
    for name, costs in measured:
        for model, timings in _graphs(costs):
            if timings is not None:
                parts.append(f"{name}, {model}:\n\n{_table(timings)}")
    return "\n".join(parts)


def tune_chart(measured: Measured) -> str:
    """SVG: milliseconds over rows, a line per model and context."""
    lines = {}
    for name, costs in measured:
        for model, timings in _graphs(costs):
            if timings is not None:
                for context, seconds in zip(timings.contexts, timings.seconds, strict=True):
                    points = [(rows, 1e3 * s) for rows, s in zip(timings.rows, seconds, strict=True)]
                    lines[f"{name}, {model} behind {context} tokens"] = points
    return line_chart(lines, "rows of a pass", "milliseconds")


def _graphs(costs: Costs) -> tuple[tuple[str, Timings | None], ...]:
    return ("target", costs.target), ("head, first level", costs.first), ("head, further levels", costs.head)


def _table(timings: Timings) -> str:
    titles = ["rows", *(f"behind {context} tokens, ms" for context in timings.contexts)]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for index, rows in enumerate(timings.rows):
        cells = [f"{1e3 * line[index]:.2f} ({line[index] / line[0]:.2f}x)" for line in timings.seconds]
        lines.append("| " + " | ".join([str(rows), *cells]) + " |")
    return "\n".join(lines) + "\n"
