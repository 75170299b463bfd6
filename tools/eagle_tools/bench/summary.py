"""Computes the figures of each setup from its rows, and writes them as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from eagle_tools.bench.estimate import Estimate, median_of, paired_ratio
from eagle_tools.bench.identity import FOREIGN, PYTORCH, agreement, shared_start
from eagle_tools.bench.memory import Peak
from eagle_tools.bench.methods import SHAPE, VANILLA
from eagle_tools.bench.peers import Stored
from eagle_tools.bench.rows import Row, Setup, by_setup, speeds
from eagle_tools.markdown import markdown_table

ALPHAS = 5  # 0-alpha to 4-alpha


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one setup over its prompts; None where the rows or the machine do not provide the figure.

    tok_s: median tokens per second with its interval; 0 where every answer ended with its first forward pass.
    vs_vanilla, vs_pytorch: paired speed ratios to vanilla on the same bundle and temperature, and to PyTorch's eager
    mode in the precision closest to the checkpoint. tau: tokens per forward pass over all prompts. alphas[n]: of the
    passes that accepted n drafted tokens, the share that accepted another. ttft_s: median seconds to the first token.
    draft, verify, host: shares of the decoding time; host is the rest. roofline: bytes of the target's weights read per
    second of decoding, over the memory's bandwidth. same: number of prompts whose tokens equal vanilla's (PyTorch:
    those of the first bundle's vanilla), and number compared. shared: share of the tokens before the first that differs
    from PyTorch's eager mode. stored: size of the target. counters: the GPU's work per forward pass of the target, that
    of reading prompts included."""

    setup: Setup
    tok_s: Estimate
    vs_vanilla: Estimate | None
    vs_pytorch: Estimate | None
    tau: float
    alphas: tuple[float, ...] | None
    ttft_s: float
    draft: float | None
    verify: float | None
    host: float | None
    peak: Peak | None
    roofline: float | None
    same: tuple[int, int] | None
    shared: float | None = None
    stored: Stored | None = None
    counters: dict[str, float] | None = None


def summarise(
    rows: Sequence[Row],
    peaks: Mapping[tuple[str, ...], Peak],
    weights: Mapping[tuple[str, ...], int],
    bandwidth: Mapping[str, float | None],
    sizes: Mapping[tuple[str, ...], Stored] | None = None,
) -> list[Summary]:
    """Returns one summary per setup, sorted by temperature, then in the order in which they ran.

    peaks, weights, sizes: by `memory_key`; weights: bytes that one forward pass of the target reads. bandwidth: backend
    -> bytes per second of the memory that it reads weights from."""
    groups = by_setup(rows)
    reference = next((s for s in groups if s.backend == PYTORCH and s.method == "eager"), None)
    summaries = []
    for setup, mine in groups.items():
        vanilla = groups.get(setup._replace(method=VANILLA), [])
        if setup.backend == PYTORCH:
            vanilla = next((g for s, g in groups.items() if s.method == VANILLA and s.backend not in FOREIGN), [])
        theirs = None if reference is None or setup.temperature else groups[reference]
        decode_s = sum(row.decode_s for row in mine)
        passes = sum(row.target_passes for row in mine)
        shares = _shares(mine, decode_s)
        read = weights.get(memory_key(setup))
        speed = bandwidth.get(setup.backend)
        summaries.append(
            Summary(
                setup=setup,
                tok_s=median_of(list(speeds(mine).values()) or [0.0]),
                vs_vanilla=paired_ratio(speeds(mine), speeds(vanilla)) if setup.backend not in FOREIGN else None,
                vs_pytorch=None if theirs is None else paired_ratio(speeds(mine), speeds(theirs)),
                tau=sum(row.tau * row.target_passes for row in mine) / passes if passes else 1.0,
                alphas=alphas(mine),
                ttft_s=median(row.prefill_s for row in mine),
                draft=shares and shares[0],
                verify=shares and shares[1],
                host=shares and shares[2],
                peak=peaks.get(memory_key(setup)),
                roofline=read * passes / decode_s / speed if read and speed and decode_s else None,
                same=agreement(mine, vanilla) if vanilla else None,
                shared=None if theirs is None else shared_start(mine, theirs),
                stored=(sizes or {}).get(memory_key(setup)),
                counters=per_pass(mine),
            )
        )
    return summaries


def memory_key(setup: Setup) -> tuple[str, ...]:
    """Returns the setup without its temperature, which memory does not depend on."""
    return setup[:4]


def alphas(rows: Sequence[Row]) -> tuple[float, ...] | None:
    """Returns 0-alpha, 1-alpha, ... as deep as any pass accepted; None if a row does not have depths."""
    if any(row.accepted_per_depth is None for row in rows):
        return None
    counts = [sum(row.target_passes for row in rows)]
    for depth in range(ALPHAS):
        counts.append(sum((*(row.accepted_per_depth or ()), *[0] * ALPHAS)[depth] for row in rows))
    return tuple(after / before for before, after in pairwise(counts) if before and counts[1])


def per_pass(rows: Sequence[Row]) -> dict[str, float] | None:
    """Returns the counters of all rows per forward pass of the target; None if a row has none, or no passes."""
    passes = sum(row.target_passes for row in rows)
    counted = [row.counters for row in rows if row.counters is not None]
    if len(counted) < len(rows) or not passes:
        return None
    return {name: round(sum(counters[name] for counters in counted) / passes, 2) for name in counted[0]}


def by_category(rows: Sequence[Row]) -> dict[str, dict[Setup, tuple[float, Estimate | None]]]:
    """Returns category, or set where there are several -> setup -> tau and speed-up over vanilla; empty for a set with
    one category."""
    categories = list(dict.fromkeys(row.prompt_set or row.category for row in rows))
    figures: dict[str, dict[Setup, tuple[float, Estimate | None]]] = {}
    for category in categories if len(categories) > 1 else []:
        some = summarise([row for row in rows if (row.prompt_set or row.category) == category], {}, {}, {})
        figures[category] = {s.setup: (s.tau, s.vs_vanilla) for s in some}
    return figures


def fastest_line(summaries: Sequence[Summary], rows: Sequence[Row]) -> str | None:
    """Returns a sentence on the fastest bundle's speed over PyTorch's fastest mode; None without PyTorch."""
    theirs = [s for s in summaries if s.setup.backend == PYTORCH]
    ours = [s for s in summaries if s.setup.backend not in FOREIGN and s.setup.temperature == 0]
    if not theirs or not ours:
        return None
    one, other = (max(side, key=lambda s: s.tok_s.value) for side in (ours, theirs))
    groups = by_setup(rows)
    ratio = paired_ratio(speeds(groups[one.setup]), speeds(groups[other.setup]))
    return (
        f"The fastest here, {one.setup.method} {one.setup.precision} ({one.setup.bundle}), runs at {ratio_text(ratio)} "
        f"the speed of PyTorch's fastest mode, {other.setup.method} {other.setup.precision}."
    )


def markdown(summaries: Sequence[Summary], rows: Sequence[Row]) -> str:
    """Returns Markdown: a table per temperature and one of tree sizes, and the comparison with PyTorch's fastest
    mode."""
    parts = []
    for temperature in dict.fromkeys(s.setup.temperature for s in summaries):
        some = [s for s in summaries if s.setup.temperature == temperature]
        parts.append(
            f"Temperature {temperature:g}:\n\n" + _table([s for s in some if not SHAPE.fullmatch(s.setup.method)])
        )
        if sizes := [s for s in some if SHAPE.fullmatch(s.setup.method)]:
            parts.append("Dynamic trees by size (total_token / depth / draft_top_k):\n\n" + _size_table(sizes))
    if any(s.stored for s in summaries):
        parts.append("Against PyTorch's eager mode, greedy; the fastest first:\n\n" + _peer_table(summaries))
    if line := fastest_line(summaries, rows):
        parts.append(line + "\n")
    return "\n".join(parts)


def category_markdown(rows: Sequence[Row]) -> str:
    """Returns Markdown: the speed-ups by category, or by set where there are several; "" for one category."""
    if not (categories := by_category(rows)):
        return ""
    kind = "set" if any(row.prompt_set for row in rows) else "category"
    return f"\nSpeed-up over vanilla, and tau, by {kind}:\n\n" + _category_table(categories)


def _table(summaries: Sequence[Summary]) -> str:
    pytorch = any(s.vs_pytorch for s in summaries)
    titles = ["bundle", "precision", "backend", "method", "tok/s", "x vanilla", *(["x PyTorch"] if pytorch else [])]
    titles += ["tau", "n-alpha, n = 0..4", "first token, ms", "draft / verify / host, %", "peak MB", "roofline", "same"]
    lines = []
    for s in summaries:
        cells = [s.setup.bundle, s.setup.precision, s.setup.backend, s.setup.method, estimate_text(s.tok_s)]
        cells += [ratio_text(s.vs_vanilla), *([ratio_text(s.vs_pytorch)] if pytorch else []), f"{s.tau:.2f}"]
        cells += [" ".join(f".{round(100 * alpha):02d}" if alpha < 0.995 else "1" for alpha in s.alphas or ()) or "-"]
        cells += [f"{1e3 * s.ttft_s:.1f}", shares_text(s), peak_text(s.peak), percent(s.roofline)]
        cells += ["-" if s.same is None else f"{s.same[0]}/{s.same[1]}"]
        lines.append(cells)
    return markdown_table(titles, lines)


def _peer_table(summaries: Sequence[Summary]) -> str:
    """Returns a table of speed, closeness and size of all greedy setups."""
    titles = ["engine", "precision", "method", "ms per token", "x PyTorch", "tokens before the first difference"]
    lines = []
    for s in sorted(summaries, key=lambda s: -s.tok_s.value):
        if s.setup.temperature == 0:
            engine = s.setup.backend if s.setup.backend in FOREIGN else f"ours, {s.setup.bundle}"
            cells = [engine, s.setup.precision, s.setup.method, f"{1e3 / s.tok_s.value:.1f}" if s.tok_s.value else "-"]
            cells += [ratio_text(s.vs_pytorch), percent(s.shared)]
            cells += [f"{s.stored.bytes / 1e6:.0f}", f"{s.stored.bits or 0:.1f}"] if s.stored else ["-", "-"]
            lines.append(cells)
    return markdown_table([*titles, "MB", "bits per weight"], lines)


def _size_table(summaries: Sequence[Summary]) -> str:
    """Returns a table of tok/s and tau of every size, the fastest of each bundle in bold."""
    bundles = list(dict.fromkeys(s.setup[1:4] for s in summaries))
    cells = {(s.setup.method, s.setup[1:4]): s for s in summaries}
    best = {
        bundle: max((s for s in summaries if s.setup[1:4] == bundle), key=lambda s: s.tok_s.value) for bundle in bundles
    }
    lines = []
    for size in dict.fromkeys(s.setup.method for s in summaries):
        row = [size]
        for bundle in bundles:
            s = cells.get((size, bundle))
            mark = "**" if s is best[bundle] else ""
            row.append("-" if s is None else f"{mark}{s.tok_s.value:.1f} tok/s, tau {s.tau:.2f}{mark}")
        lines.append(row)
    return markdown_table(["size", *(f"{name}, {precision}" for precision, _, name in bundles)], lines)


def _category_table(categories: Mapping[str, Mapping[Setup, tuple[float, Estimate | None]]]) -> str:
    setups = [s for s in next(iter(categories.values())) if s.backend not in FOREIGN and s.method != VANILLA]
    lines = []
    for setup in setups:
        cells = [setup.bundle, setup.precision, setup.method, f"{setup.temperature:g}"]
        for figures in categories.values():
            tau, ratio = figures.get(setup, (0.0, None))
            cells.append(f"{ratio.value:.2f}x, {tau:.2f}" if ratio else "-")
        lines.append(cells)
    return markdown_table(["bundle", "precision", "method", "T", *categories], lines)


def estimate_text(estimate: Estimate) -> str:
    """Returns the median and its interval, as in "12.3 (11.9-12.8)"."""
    return f"{estimate.value:.1f} ({estimate.low:.1f}-{estimate.high:.1f})"


def ratio_text(ratio: Estimate | None) -> str:
    """Returns a ratio and its interval, as in "2.31x (2.20-2.44)"."""
    return "-" if ratio is None else f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def shares_text(s: Summary) -> str:
    """Returns the percentages of draft, verify and host, as in "30 / 65 / 5.0"."""
    if s.draft is None or s.verify is None or s.host is None:
        return "-"
    return f"{100 * s.draft:.0f} / {100 * s.verify:.0f} / {100 * s.host:.1f}"


def peak_text(peak: Peak | None) -> str:
    """Returns the MB of host memory, and those of the GPU if they were measured."""
    if peak is None:
        return "-"
    return f"{peak.host / 1e6:.0f}" + (f" + {peak.device / 1e6:.0f} GPU" if peak.device else "")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def as_json(s: Summary) -> dict[str, object]:
    """Returns the summary as data for --json."""
    data = asdict(s)
    return {**s.setup._asdict(), **{key: value for key, value in data.items() if key != "setup"}}


def _shares(rows: Sequence[Row], decode_s: float) -> tuple[float, float, float] | None:
    if decode_s <= 0 or any(row.draft_s is None or row.verify_s is None for row in rows):
        return None
    draft, verify = sum(row.draft_s or 0.0 for row in rows), sum(row.verify_s or 0.0 for row in rows)
    return draft / decode_s, verify / decode_s, 1 - (draft + verify) / decode_s
