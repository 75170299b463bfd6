"""Writes docs/results.md from the rows of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from eagle_tools.bench.estimate import median_of, paired_ratio
from eagle_tools.bench.identity import FOREIGN
from eagle_tools.bench.methods import SHAPE
from eagle_tools.bench.rows import Row, by_setup, speeds
from eagle_tools.bench.summary import Summary, by_category, estimate_text, fastest_line, percent, ratio_text, summarise
from eagle_tools.markdown import markdown_table
from eagle_tools.results.pairs import MEASURED, PRECISIONS, Pair
from eagle_tools.results.recipe_sums import recipes_line
from eagle_tools.results.stages import LONG, METHODS, SHOWN, Finished, setup_name

Stages = Mapping[str, Finished]

HEADER = """# Results

Speed, tokens per forward pass (tau) and memory of every decoding method, on a published model. To measure a bundle of
your own likewise:

```console
$ eagle-bench .demo/eagle1 --prompts tools/demo_pair/heldout.jsonl --count 1 --max-new-tokens 16 \\
    --methods vanilla,static
...
| bundle | precision | backend | method | tok/s | x vanilla | tau | ...
| eagle1 | fp32 | cpu | vanilla | ...
| eagle1 | fp32 | cpu | static | ...
```

The model is SmolLM2-135M-Instruct. Its weights come from a four-bit file, and every engine runs the same weights. Its
EAGLE-3 head is the one in `tools/smollm2`, whose README says how it was trained. A grown form, where one is
listed, gives the small model's text at the cost of a model of its size, by function-preserving steps
(`tools/grow.py`); it is not a trained model of that size.

Speeds are medians over prompts, ratios are medians of the ratios on single prompts, and brackets hold 95 % bootstrap
intervals. All rows of a table took turns in one run: bundles and other engines by tenths of a second, PyTorch by
prompts. Every output was compared with that of plain decoding with the same seed."""


def results_page(pairs: Sequence[Pair], stages: Stages, command: str) -> str:
    """Returns the page as Markdown. command: the command line that measured it."""
    facts = [f"measured on {line}" for line in dict.fromkeys(stage.measured for stage in stages.values())]
    facts += [f"command: `{command}`", recipes_line(MEASURED), *next(iter(stages.values())).facts]
    parts = [HEADER, "\n".join(f"- {fact}" for fact in facts)]
    if wrong := [sentence for finished in stages.values() for sentence in finished.differing]:
        parts.append("**Outputs that differ from plain decoding:**\n\n" + "\n".join(f"- {line}" for line in wrong))
    for pair in pairs:
        parts.append(f"## {pair.title}")
        for heading, content in _sections(pair.name, stages):
            parts += [f"### {heading}", pair.caption, *content]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _sections(pair: str, stages: Stages) -> Iterator[tuple[str, list[str]]]:
    """Yields the heading and the contents of each section about a pair, as far as its stages are finished."""
    if finished := stages.get(f"{pair}-engines"):
        notes = "\n".join(f"- {note}" for note in finished.notes)
        yield (
            f"Compared with other engines (greedy, {_prompts(finished.rows)} prompts)",
            [engines_table(finished), notes],
        )
    by_precision = {p: stages[f"{pair}-methods-{p}"] for p in PRECISIONS if f"{pair}-methods-{p}" in stages}
    if by_precision:
        count = _prompts(next(iter(by_precision.values())).rows)
        yield f"Methods (in the form of EAGLE-2's Table 1; {count} prompts)", [methods_table(by_precision)]
    if SHOWN in by_precision:
        yield f"tau and speed-up by question set ({SHOWN})", [sets_table(by_precision[SHOWN].rows)]
    if finished := stages.get(f"{pair}-sweep"):
        yield f"Tree sizes ({SHOWN}, {_prompts(finished.rows)} prompts)", [sweep_table(finished.rows)]
    if finished := stages.get(f"{pair}-long"):
        count = _prompts(finished.rows) // len(LONG)
        yield f"Long context ({SHOWN}, {count} prompts of each length)", [long_table(finished.rows)]


def _prompts(rows: Sequence[Row]) -> int:
    return len({row.prompt_id for row in rows})


def methods_table(finished: Mapping[str, Finished]) -> str:
    """Returns a table of speed-up and tau of every method in each precision; of heads that were not measured none."""
    titles = ["T", "method", *(f"{p} {what}" for p in finished for what in ("speed-up", "tau"))]
    known = {precision: _summaries(stage.rows) for precision, stage in finished.items()}
    temperatures = sorted({s.setup.temperature for summaries in known.values() for s in summaries})
    lines = []
    for temperature in temperatures:
        for label, head, method in METHODS:
            row = [_find(summaries, head, method, temperature) for summaries in known.values()]
            if any(row):
                figures = (("-", "-") if s is None else (ratio_text(s.vs_vanilla), f"{s.tau:.2f}") for s in row)
                lines.append([f"{temperature:g}", label, *(cell for pair in figures for cell in pair)])
    return markdown_table(titles, lines)


def sets_table(rows: Sequence[Row]) -> str:
    """Returns a table of tau and speed-up of every method on each set of questions (or category of one set)."""
    sets = by_category(rows)
    temperatures = sorted({row.temperature for row in rows})
    lines = []
    for temperature in temperatures:
        for label, head, method in METHODS:
            cells = [f"{temperature:g}", label]
            for figures in sets.values():
                known = {(s.bundle, s.method, s.temperature): figure for s, figure in figures.items()}
                name = next((key for key in known if head in key[0] and key[1:] == (method, temperature)), None)
                tau, ratio = (0.0, None) if name is None else known[name]
                cells.append("-" if ratio is None else f"{tau:.2f}, {ratio.value:.2f}x")
            if any(cell != "-" for cell in cells[2:]) and method != "vanilla":
                lines.append(cells)
    return markdown_table(["T", "method", *sets], lines) if sets else ""


def engines_table(finished: Finished) -> str:
    """Returns a table of all contenders, the fastest first: ours, other engines and PyTorch."""
    rows, summaries = finished.rows, _summaries(finished.rows)
    lines = []
    for s in sorted(summaries, key=lambda s: -s.tok_s.value):
        name = setup_name(s.setup)
        bits, peak = finished.bits.get(name), finished.peaks.get(name)
        cells = [s.setup.backend if s.setup.backend in FOREIGN else "eagle-edge", s.setup.precision, s.setup.method]
        cells += [estimate_text(s.tok_s), ratio_text(s.vs_pytorch), f"{s.tau:.2f}", f"{1e3 * s.ttft_s:.0f}"]
        cells += [
            percent(s.shared),
            "-" if bits is None else f"{bits:.1f}",
            "-" if peak is None else f"{peak / 1e6:.0f}",
        ]
        lines.append(cells)
    titles = ["engine", "precision", "method", "tok/s", "x PyTorch eager", "tau", "first token, ms"]
    titles += ["before the first difference from PyTorch", "bits per weight", "peak MB"]
    return markdown_table(titles, lines) + "\n" + (fastest_line(summaries, rows) or "")


def sweep_table(rows: Sequence[Row]) -> str:
    """Returns a table of the fastest fixed size that was tried, EAGLE-2's size, and the cost-aware tree, in SHOWN."""
    summaries, groups = _summaries(rows), by_setup(rows)
    sizes = [s for s in summaries if SHAPE.fullmatch(s.setup.method)]
    best = max(sizes, key=lambda s: s.tok_s.value)
    dynamic, aware = (next(s for s in summaries if s.setup.method == name) for name in ("dynamic", "cost-aware"))
    ratios = [paired_ratio(speeds(groups[aware.setup]), speeds(groups[s.setup])) for s in (best, dynamic)]
    cells = [SHOWN, f"{len(sizes)}", best.setup.method, *(estimate_text(s.tok_s) for s in (best, dynamic, aware))]
    cells += [ratio_text(ratio) for ratio in (*ratios, aware.vs_vanilla)]
    titles = ["precision", "sizes tried", "best size", "best, tok/s", "default size, tok/s", "cost-aware, tok/s"]
    return markdown_table([*titles, "cost-aware / best", "cost-aware / default size", "cost-aware / vanilla"], [cells])


def long_table(rows: Sequence[Row]) -> str:
    """Returns a table of the speed after long prompts and after short ones with the same end. The time per cycle is
    given too, since the accepted tokens change with the text."""
    names = [f"{length} tokens" for length in LONG]
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        both = [{_place(row): row for row in mine if row.category == name} for name in names]
        rates = [{place: row.tok_s for place, row in side.items()} for side in both]
        passes = [
            {place: 1e3 * row.decode_s / max(1, row.target_passes) for place, row in side.items()} for side in both
        ]
        cells = [method]
        cells += [estimate_text(median_of(list(side.values()))) for side in rates]
        cells += [ratio_text(paired_ratio(rates[1], rates[0]))]
        cells += [f"{median(row.tau for row in side.values()):.2f}" for side in both]
        cells += [f"{median(side.values()):.1f}" for side in passes]
        cells += [ratio_text(paired_ratio(passes[1], passes[0]))]
        lines.append(cells)
    titles = ["method", f"tok/s after {names[0]}", f"after {names[1]}", "ratio", "tau, short", "long"]
    return markdown_table([*titles, "ms per cycle, short", "long", "ratio"], lines)


def _place(row: Row) -> str:
    """Returns the number of the place in the text at which a prompt of either length ends."""
    return str(row.prompt_id).partition("-")[2]


def _summaries(rows: Sequence[Row]) -> list[Summary]:
    return summarise(rows, {}, {}, {})


def _find(summaries: Sequence[Summary], head: str, method: str, temperature: float) -> Summary | None:
    wanted = (method, temperature)
    return next(
        (s for s in summaries if head in s.setup.bundle and (s.setup.method, s.setup.temperature) == wanted), None
    )
