"""Writes docs/results.md from the rows of the stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from eagle_tools.bench.estimate import median_of, paired_ratio
from eagle_tools.bench.identity import PYTORCH
from eagle_tools.bench.methods import SHAPE
from eagle_tools.bench.rows import Row
from eagle_tools.bench.summary import Summary, estimate_text, fastest_line, ratio_text, summarise
from eagle_tools.markdown import markdown_table
from eagle_tools.results.pairs import PRECISIONS, Pair
from eagle_tools.results.stages import ABLATION, LONG, Finished, peak_name

Stages = Mapping[str, Finished]

METHODS = (  # name, head, method
    ("Vanilla", "eagle1", "vanilla"),
    ("Prompt lookup", "eagle1", "lookup:chain"),
    ("Lookup, cost-aware", "eagle1", "lookup"),
    ("EAGLE-1, chain", "eagle1", "chain"),
    ("EAGLE-1", "eagle1", "static"),
    ("EAGLE-2", "eagle1", "dynamic"),
    ("EAGLE-3", "eagle3", "dynamic"),
    ("EAGLE-1 head, cost-aware", "eagle1", "cost-aware"),
    ("EAGLE-3 head, cost-aware", "eagle3", "cost-aware"),
    ("EAGLE-1 head + lookup, cost-aware", "eagle1", "eagle+lookup"),
)
ABLATIONS = (
    ("w/o both", "no-value-no-rerank"),
    ("w/o value", "no-value"),
    ("w/o reranking", "no-rerank"),
    ("EAGLE-2", "dynamic"),
)


HEADER = """# Results

Speed, tokens per forward pass (tau) and memory of every decoding method. To measure a bundle of your own likewise:

```console
$ eagle-bench .demo/eagle1 --prompts tools/demo_pair/heldout.jsonl --count 1 --max-new-tokens 16 \\
    --methods vanilla,static
...
| bundle | precision | backend | method | tok/s | x vanilla | tau | ...
| eagle1 | fp32 | cpu | vanilla | ...
| eagle1 | fp32 | cpu | static | ...
```

There are two models: the shipped pair, a Llama of 5.6 M parameters with its heads, and the same pair grown to 1.0 B
parameters by function-preserving steps (`tools/grow.py`). The grown pair gives the small pair's outputs at the cost of
a Llama of its size. It is no trained model of 1.0 B parameters: its tau is that of the small pair.

Speeds are medians over prompts, ratios are medians of the ratios on single prompts, and brackets hold 95 % bootstrap
intervals. All rows of a table took turns in one run: bundles by tenths of a second, PyTorch by prompts. Every output
was compared with that of plain decoding with the same seed."""


def results_page(pairs: Sequence[Pair], stages: Stages, command: str) -> str:
    """Returns the page as Markdown. command: the command line that measured it."""
    facts = [f"measured on {line}" for line in dict.fromkeys(stage.measured for stage in stages.values())]
    facts += [f"command: `{command}`", *next(iter(stages.values())).facts]
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
    by_precision = {p: stages[f"{pair}-methods-{p}"] for p in PRECISIONS if f"{pair}-methods-{p}" in stages}
    if by_precision:
        yield "Methods (in the form of EAGLE-2's Table 1)", [methods_table(by_precision)]
    if ABLATION in by_precision:
        title = f"Effect of value and reranking (in the form of EAGLE-2's Table 3; {ABLATION})"
        yield title, [ablation_table(by_precision[ABLATION].rows)]
    if finished := stages.get(f"{pair}-pytorch"):
        notes = "\n".join(f"- {note}" for note in finished.notes)
        yield f"Compared with PyTorch ({_prompts(finished.rows)} prompts)", [pytorch_table(finished), notes]
    sweeps = {p: stages[f"{pair}-sweep-{p}"].rows for p in PRECISIONS if f"{pair}-sweep-{p}" in stages}
    if sweeps:
        counts = sorted({_prompts(rows) for rows in sweeps.values()})
        yield f"Tree sizes (prompts: {' to '.join(map(str, counts))})", [sweep_table(sweeps)]
    for stage, title in (("repeat", "Text that repeats itself"), ("edit", "Code that is written again with an edit")):
        if finished := stages.get(f"{pair}-{stage}"):
            table = versus_table(finished.rows, ("dynamic", "cost-aware"))
            yield f"{title} (int8, {_prompts(finished.rows)} prompts)", [table]
    if finished := stages.get(f"{pair}-long"):
        count = _prompts(finished.rows) // len(LONG)
        yield f"Long context (int8, {count} prompts of each length)", [long_table(finished.rows)]


def _prompts(rows: Sequence[Row]) -> int:
    return len({row.prompt_id for row in rows})


def methods_table(finished: Mapping[str, Finished]) -> str:
    """Returns a table of speed-up and tau of every method in each precision."""
    titles = ["T", "method", *(f"{p} {what}" for p in finished for what in ("speed-up", "tau"))]
    known = {precision: _summaries(stage.rows) for precision, stage in finished.items()}
    temperatures = sorted({s.setup.temperature for summaries in known.values() for s in summaries})
    lines = []
    for temperature in temperatures:
        for label, head, method in METHODS:
            cells = [f"{temperature:g}", label]
            for summaries in known.values():
                s = _find(summaries, head, method, temperature)
                cells += ["-", "-"] if s is None else [ratio_text(s.vs_vanilla), f"{s.tau:.2f}"]
            lines.append(cells)
    return markdown_table(titles, lines)


def ablation_table(rows: Sequence[Row]) -> str:
    """Returns a table of speed-up and tau of EAGLE-2's tree with parts left out, at each temperature."""
    summaries = _summaries(rows)
    temperatures = sorted({s.setup.temperature for s in summaries})
    lines = []
    for label, method in ABLATIONS:
        cells = [label]
        for temperature in temperatures:
            s = _find(summaries, "eagle1", method, temperature)
            cells += ["-", "-"] if s is None else [ratio_text(s.vs_vanilla), f"{s.tau:.2f}"]
        lines.append(cells)
    return markdown_table(
        ["method", *(f"T = {t:g} {what}" for t in temperatures for what in ("speed-up", "tau"))], lines
    )


def pytorch_table(finished: Finished) -> str:
    """Returns a table of all contenders, each compared with PyTorch's eager mode and with its fastest one."""
    rows, summaries = finished.rows, _summaries(finished.rows)
    fastest = max((s for s in summaries if s.setup.backend == PYTORCH), key=lambda s: s.tok_s.value)
    theirs = _speeds(rows, fastest)
    lines = []
    for s in summaries:
        head = "EAGLE-3 head" if "eagle3" in s.setup.bundle else "EAGLE-1 head"
        where = "PyTorch" if s.setup.backend == PYTORCH else f"eagle-edge, {head}"
        cells = [where, s.setup.precision, s.setup.method, estimate_text(s.tok_s), ratio_text(s.vs_pytorch)]
        cells += [ratio_text(paired_ratio(_speeds(rows, s), theirs)), f"{s.tau:.2f}", f"{1e3 * s.ttft_s:.0f}"]
        peak = finished.peaks.get(peak_name(s.setup))
        cells += ["-" if peak is None else f"{peak / 1e6:.0f}", f"{s.same[0]}/{s.same[1]}" if s.same else "-"]
        lines.append(cells)
    titles = ["", "precision", "method", "tok/s", "x PyTorch eager", "x PyTorch fastest", "tau", "first token, ms"]
    titles += ["peak MB", "tokens as ours"]
    return markdown_table(titles, lines) + "\n" + (fastest_line(summaries, rows) or "")


def sweep_table(by_precision: Mapping[str, Sequence[Row]]) -> str:
    """Returns a table of the fastest fixed size that was tried, EAGLE-2's size, and the cost-aware tree."""
    lines = []
    for precision, rows in by_precision.items():
        summaries = _summaries(rows)
        sizes = [s for s in summaries if SHAPE.fullmatch(s.setup.method)]
        best = max(sizes, key=lambda s: s.tok_s.value)
        dynamic, aware = (next(s for s in summaries if s.setup.method == name) for name in ("dynamic", "cost-aware"))
        mine = _speeds(rows, aware)
        cells = [precision, f"{len(sizes)}", best.setup.method, estimate_text(best.tok_s), estimate_text(dynamic.tok_s)]
        cells += [estimate_text(aware.tok_s), ratio_text(paired_ratio(mine, _speeds(rows, best)))]
        lines.append([*cells, ratio_text(paired_ratio(mine, _speeds(rows, dynamic))), ratio_text(aware.vs_vanilla)])
    titles = ["precision", "sizes tried", "best size", "best, tok/s", "default size, tok/s", "cost-aware, tok/s"]
    return markdown_table([*titles, "cost-aware / best", "cost-aware / default size", "cost-aware / vanilla"], lines)


def versus_table(rows: Sequence[Row], others: Sequence[str]) -> str:
    """Returns a table of every method compared with vanilla and with some other methods."""
    summaries = _summaries(rows)
    lines = []
    for s in summaries:
        cells = [s.setup.method, estimate_text(s.tok_s), f"{s.tau:.2f}", ratio_text(s.vs_vanilla)]
        for other in others:
            theirs = next(o for o in summaries if o.setup.method == other)
            cells.append(ratio_text(paired_ratio(_speeds(rows, s), _speeds(rows, theirs))))
        lines.append(cells)
    return markdown_table(["method", "tok/s", "tau", "x vanilla", *(f"x {other}" for other in others)], lines)


def long_table(rows: Sequence[Row]) -> str:
    """Returns a table of the speed after long prompts and after short ones with the same end. The time per cycle is
    given too, since the accepted tokens change with the text."""
    names = [f"{length} tokens" for length in LONG]
    lines = []
    for method in dict.fromkeys(row.method for row in rows):
        mine = [row for row in rows if row.method == method]
        both = [{_place(row): row for row in mine if row.category == name} for name in names]
        speeds = [{place: row.tok_s for place, row in side.items()} for side in both]
        passes = [
            {place: 1e3 * row.decode_s / max(1, row.target_passes) for place, row in side.items()} for side in both
        ]
        cells = [method]
        cells += [estimate_text(median_of(list(side.values()))) for side in speeds]
        cells += [ratio_text(paired_ratio(speeds[1], speeds[0]))]
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


def _speeds(rows: Sequence[Row], s: Summary) -> dict[int | str, float]:
    return {row.prompt_id: row.tok_s for row in rows if row.setup == s.setup}
