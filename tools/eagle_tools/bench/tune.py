"""eagle-bench --tune: measures the time of forward passes by their rows, by which cost-aware trees choose their
size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_runtime import EagleModel
from eagle_runtime.drafting.cost_model import Costs, Timings
from eagle_tools.bench.plan import bundle_names
from eagle_tools.bench.rows import precision_name
from eagle_tools.markdown import markdown_table

Measured = Sequence[tuple[str, Costs]]


def tune(bundles: Sequence[Path], backend: str, context: int | None, threads: int | None) -> list[tuple[str, Costs]]:
    """Returns (name, costs) of each bundle, measured; cost-aware decoding begins with them from now on. Costs are kept
    per number of threads, and for None, the engine's choice, apart."""
    measured = []
    for name, bundle in zip(bundle_names(bundles), bundles, strict=True):
        with EagleModel.load(bundle, backend=backend, context=context, threads=threads) as model:
            costs = model.costs(measure_again=True)
            measured.append((f"{name}, {precision_name(model.manifest)}, {model.backend}", costs))
    return measured


def tune_table(measured: Measured) -> str:
    """Returns Markdown tables: milliseconds by rows of a forward pass, and the ratio to a pass of one row."""
    parts = []
    for name, costs in measured:
        for model, timings in _graphs(costs):
            if timings is not None:
                parts.append(f"{name}, {model}:\n\n{_table(timings)}")
    return "\n".join(parts)


def _graphs(costs: Costs) -> tuple[tuple[str, Timings | None], ...]:
    return ("target", costs.target), ("head", costs.head)


def _table(timings: Timings) -> str:
    titles = ["rows", *(f"after {context} tokens, ms" for context in timings.contexts)]
    lines = []
    for index, rows in enumerate(timings.rows):
        cells = (f"{1e3 * seconds[index]:.2f} ({seconds[index] / seconds[0]:.2f}x)" for seconds in timings.seconds)
        lines.append([str(rows), *cells])
    return markdown_table(titles, lines)
