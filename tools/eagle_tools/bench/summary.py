"""Rows to figures: one Summary per setup, and the Markdown that shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median

from eagle_tools.bench.estimate import Estimate, median_of, paired_ratio
from eagle_tools.bench.identity import PYTORCH, agreement
from eagle_tools.bench.memory import Peak
from eagle_tools.bench.methods import SHAPE, VANILLA
from eagle_tools.bench.rows import Row, Setup, by_setup

ALPHAS = 5  # 0-alpha to 4-alpha


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one setup over its prompts; None: nothing to tell it from.

    tok_s: median with its interval. vs_vanilla, vs_pytorch: paired ratios, to vanilla on the same bundle and
    temperature and to PyTorch's eager mode in the precision closest to the checkpoint. tau: of all tokens and passes.
    alphas[n]: share of the passes that accepted n drafted tokens which accepted another. ttft_s: median time to the
    first token. draft, verify, host: shares of the decoding time; host is all that is neither of the others. roofline:
    bytes of the target's weights that the passes read, per second of decoding, over the memory's bandwidth. same: on
    how many of how many prompts the tokens are those of vanilla (PyTorch: of the first bundle's)."""

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


def summarise(
    rows: Sequence[Row],
    peaks: Mapping[tuple[str, ...], Peak],
    weights: Mapping[tuple[str, ...], int],
    bandwidth: Mapping[str, float | None],
) -> list[Summary]:
    """One summary per setup, by temperature, then as they ran.

    peaks, weights: by `memory_key`; weights: bytes that one pass of the target reads. bandwidth: backend -> bytes per
    second of the memory it runs from."""
    groups = by_setup(rows)
    reference = next((s for s in groups if s.backend == PYTORCH and s.method == "eager"), None)
    found = []
    for setup, mine in groups.items():
        vanilla = groups.get(setup._replace(method=VANILLA), [])
        if setup.backend == PYTORCH:
            vanilla = next((g for s, g in groups.items() if s.method == VANILLA and s.backend != PYTORCH), [])
        decode_s = sum(row.decode_s for row in mine)
        passes = sum(row.target_passes for row in mine)
        shares = _shares(mine, decode_s)
        read = weights.get(memory_key(setup))
        speed = bandwidth.get(setup.backend)
        found.append(
            Summary(
                setup=setup,
                tok_s=median_of([row.tok_s for row in mine]),
                vs_vanilla=paired_ratio(_speeds(mine), _speeds(vanilla)) if setup.backend != PYTORCH else None,
                vs_pytorch=None if reference is None or setup.temperature else _against(mine, groups[reference]),
                tau=sum(row.new_tokens - 1 for row in mine) / passes if passes else 1.0,
                alphas=alphas(mine),
                ttft_s=median(row.prefill_s for row in mine),
                draft=shares and shares[0],
                verify=shares and shares[1],
                host=shares and shares[2],
                peak=peaks.get(memory_key(setup)),
                roofline=read * passes / decode_s / speed if read and speed and decode_s else None,
                same=agreement(mine, vanilla) if vanilla else None,
            )
        )
    return found


def memory_key(setup: Setup) -> tuple[str, ...]:
    """What shares a measurement of memory: temperature costs none."""
    return setup[:4]


def alphas(rows: Sequence[Row]) -> tuple[float, ...] | None:
    """0-alpha, 1-alpha, ... as far as any pass went."""
    if any(row.accepted_per_depth is None for row in rows):
        return None
    counts = [sum(row.target_passes for row in rows)]
    for depth in range(ALPHAS):
        counts.append(sum((*(row.accepted_per_depth or ()), *[0] * ALPHAS)[depth] for row in rows))
    return tuple(after / before for before, after in pairwise(counts) if before and counts[1])


def by_category(rows: Sequence[Row]) -> dict[str, dict[Setup, tuple[float, Estimate | None]]]:
    """category -> setup -> tau and speed-up over vanilla, for sets that have several categories."""
    categories = list(dict.fromkeys(row.category for row in rows))
    found: dict[str, dict[Setup, tuple[float, Estimate | None]]] = {}
    for category in categories if len(categories) > 1 else []:
        some = summarise([row for row in rows if row.category == category], {}, {}, {})
        found[category] = {s.setup: (s.tau, s.vs_vanilla) for s in some}
    return found


def fastest_line(summaries: Sequence[Summary], rows: Sequence[Row]) -> str | None:
    """The fastest setup of ours over PyTorch's fastest, both by their median; None without PyTorch."""
    theirs = [s for s in summaries if s.setup.backend == PYTORCH]
    ours = [s for s in summaries if s.setup.backend != PYTORCH and s.setup.temperature == 0]
    if not theirs or not ours:
        return None
    one, other = (max(side, key=lambda s: s.tok_s.value) for side in (ours, theirs))
    groups = by_setup(rows)
    ratio = _against(groups[one.setup], groups[other.setup])
    return (
        f"The fastest here, {one.setup.method} {one.setup.precision} ({one.setup.bundle}), is {ratio_text(ratio)} the "
        f"fastest mode of PyTorch, {other.setup.method} {other.setup.precision}."
    )


def markdown(summaries: Sequence[Summary], rows: Sequence[Row]) -> str:
    """A table per temperature, the sizes of trees apart, one by category where there are several, and what PyTorch's
    fastest mode comes to."""
    parts = []
    for temperature in dict.fromkeys(s.setup.temperature for s in summaries):
        some = [s for s in summaries if s.setup.temperature == temperature]
        parts.append(
            f"Temperature {temperature:g}:\n\n" + _table([s for s in some if not SHAPE.fullmatch(s.setup.method)])
        )
        if sizes := [s for s in some if SHAPE.fullmatch(s.setup.method)]:
            parts.append("Dynamic trees by size (total_token / depth / draft_top_k):\n\n" + _size_table(sizes))
    if line := fastest_line(summaries, rows):
        parts.append(line + "\n")
    if categories := by_category(rows):
        parts.append("Speed-up over vanilla, and tau, by category:\n\n" + _category_table(categories))
    return "\n".join(parts)


def _table(summaries: Sequence[Summary]) -> str:
    pytorch = any(s.vs_pytorch for s in summaries)
    titles = ["bundle", "precision", "backend", "method", "tok/s", "x vanilla", *(["x PyTorch"] if pytorch else [])]
    titles += ["tau", "n-alpha, n = 0..4", "first token, ms", "draft / verify / host, %", "peak MB", "roofline", "same"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for s in summaries:
        cells = [s.setup.bundle, s.setup.precision, s.setup.backend, s.setup.method, estimate_text(s.tok_s)]
        cells += [ratio_text(s.vs_vanilla), *([ratio_text(s.vs_pytorch)] if pytorch else []), f"{s.tau:.2f}"]
        cells += [" ".join(f".{round(100 * alpha):02d}" if alpha < 0.995 else "1" for alpha in s.alphas or ()) or "-"]
        cells += [f"{1e3 * s.ttft_s:.1f}", shares_text(s), peak_text(s.peak), percent(s.roofline)]
        cells += ["-" if s.same is None else f"{s.same[0]}/{s.same[1]}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _size_table(summaries: Sequence[Summary]) -> str:
    """tok/s and tau of every size; the fastest of a bundle in bold."""
    bundles = list(dict.fromkeys(s.setup[1:4] for s in summaries))
    cells = {(s.setup.method, s.setup[1:4]): s for s in summaries}
    best = {
        bundle: max((s for s in summaries if s.setup[1:4] == bundle), key=lambda s: s.tok_s.value) for bundle in bundles
    }
    lines = ["| size | " + " | ".join(f"{name}, {precision}" for precision, _, name in bundles) + " |"]
    lines.append("|---" * (1 + len(bundles)) + "|")
    for size in dict.fromkeys(s.setup.method for s in summaries):
        row = [size]
        for bundle in bundles:
            s = cells.get((size, bundle))
            mark = "**" if s is best[bundle] else ""
            row.append("-" if s is None else f"{mark}{s.tok_s.value:.1f} tok/s, tau {s.tau:.2f}{mark}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _category_table(categories: Mapping[str, Mapping[Setup, tuple[float, Estimate | None]]]) -> str:
    setups = [s for s in next(iter(categories.values())) if s.backend != PYTORCH and s.method != VANILLA]
    titles = ["bundle", "precision", "method", "T", *categories]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for setup in setups:
        cells = [setup.bundle, setup.precision, setup.method, f"{setup.temperature:g}"]
        for found in categories.values():
            tau, ratio = found.get(setup, (0.0, None))
            cells.append(f"{ratio.value:.2f}x, {tau:.2f}" if ratio else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def estimate_text(found: Estimate, digits: int = 1) -> str:
    """12.3 (11.9-12.8)."""
    return f"{found.value:.{digits}f} ({found.low:.{digits}f}-{found.high:.{digits}f})"


def ratio_text(found: Estimate | None) -> str:
    """2.31x (2.20-2.44)."""
    return "-" if found is None else f"{found.value:.2f}x ({found.low:.2f}-{found.high:.2f})"


def shares_text(s: Summary) -> str:
    """30 / 65 / 5."""
    if s.draft is None or s.verify is None or s.host is None:
        return "-"
    return f"{100 * s.draft:.0f} / {100 * s.verify:.0f} / {100 * s.host:.1f}"


def peak_text(peak: Peak | None) -> str:
    """MB of host memory, and of the device's where it was told."""
    if peak is None:
        return "-"
    return f"{peak.host / 1e6:.0f}" + (f" + {peak.device / 1e6:.0f} GPU" if peak.device else "")


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def as_json(s: Summary) -> dict[str, object]:
    """For --json."""
    data = asdict(s)
    return {**s.setup._asdict(), **{key: value for key, value in data.items() if key != "setup"}}


def _shares(rows: Sequence[Row], decode_s: float) -> tuple[float, float, float] | None:
    if decode_s <= 0 or any(row.draft_s is None or row.verify_s is None for row in rows):
        return None
    draft, verify = (sum(part or 0.0 for part in column) for column in zip(*_parts(rows), strict=True))
    return draft / decode_s, verify / decode_s, 1 - (draft + verify) / decode_s


def _parts(rows: Sequence[Row]) -> Iterator[tuple[float | None, float | None]]:
    for row in rows:
        yield row.draft_s, row.verify_s


def _speeds(rows: Sequence[Row]) -> dict[int | str, float]:
    return {row.prompt_id: row.tok_s for row in rows}


def _against(rows: Sequence[Row], others: Sequence[Row]) -> Estimate | None:
    return paired_ratio(_speeds(rows), _speeds(others))
