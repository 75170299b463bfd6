"""The figures of each compared model, and their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from eagle_tools.bench.peers import Stored
from eagle_tools.markdown import markdown_table
from eagle_tools.precision.closeness import Closeness
from eagle_tools.precision.speed import NODES, Speed, same_start

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a bundle or a peer, see the package's docstring. name: the folder's, or ENGINE/FORMAT. bytes,
    bits: of the target. own_, text_: over the reference's own text, and the held-out text. perplexity_change: percent.
    None: not measured, because a text is missing, the weights' number is unknown, or no prompt gave a time."""

    name: str
    precision: str
    bytes: int
    bits: float | None
    own_kl: float | None
    own_kl_percentiles: tuple[float, ...] | None
    own_agreement: float | None
    same_start: float
    text_kl: float | None
    text_agreement: float | None
    perplexity: float | None
    perplexity_change: float | None
    tau: float | None
    vanilla_tokens_per_s: float | None
    eagle_tokens_per_s: float | None
    draft_ms: float | None
    pass_1_ms: float | None
    pass_16_ms: float | None


def rows_of(
    names: Sequence[tuple[str, str]],
    sizes: Sequence[Stored],
    own: Sequence[Closeness],
    texts: Sequence[Closeness],
    speeds: Sequence[Speed],
) -> list[Row]:
    """Returns one row per model, in order. names: with precisions. own, texts: without rows where no such text was
    read."""
    rows = []
    for (name, precision), size, mine, text, speed in zip(names, sizes, own, texts, speeds, strict=True):
        perplexity = text.perplexity if text.rows else None
        rows.append(
            Row(
                name=name,
                precision=precision,
                bytes=size.bytes,
                bits=size.bits,
                own_kl=mine.kl if mine.rows else None,
                own_kl_percentiles=tuple(mine.percentile(share) for share in PERCENTILES) if mine.rows else None,
                own_agreement=mine.agreement if mine.rows else None,
                same_start=same_start(speeds[0], speed),
                text_kl=text.kl if text.rows else None,
                text_agreement=text.agreement if text.rows else None,
                perplexity=perplexity,
                perplexity_change=perplexity and 100 * (perplexity / texts[0].perplexity - 1),
                tau=speed.new_tokens / speed.target_passes if speed.target_passes else None,
                vanilla_tokens_per_s=_median(speed.vanilla),
                eagle_tokens_per_s=_median(speed.eagle),
                draft_ms=_median(speed.drafts, 1e3),
                pass_1_ms=_median(speed.passes[1], 1e3),
                pass_16_ms=_median(speed.passes[NODES], 1e3),
            )
        )
    return rows


def _median(values: Sequence[float], unit: float = 1.0) -> float | None:
    return unit * median(values) if values else None


def tables(rows: Sequence[Row]) -> str:
    """Returns Markdown: a table of quality and one of speed, without the columns of what was not measured for any."""
    quality, speed = [], []
    for row in rows:
        shares = row.own_kl_percentiles or (None,) * len(PERCENTILES)
        quality.append(
            {
                "": row.name,
                "precision": row.precision,
                "MB": f"{row.bytes / 1e6:.1f}",
                "bits per weight": _cell(row.bits, ".2f"),
                "own text: top-1": _cell(row.own_agreement, ".2%"),
                "KL": _cell(row.own_kl, ".2g"),
                **{f"KL {share} %": _cell(kl, ".2g") for share, kl in zip(PERCENTILES, shares, strict=True)},
                "same start, tokens": f"{row.same_start:g}",
                "given text: top-1": _cell(row.text_agreement, ".2%"),
                "KL, given text": _cell(row.text_kl, ".2g"),
                "perplexity": _cell(row.perplexity, ".3f"),
                "change": _cell(row.perplexity_change, "+.2f", " %"),
            }
        )
        speed.append(
            {
                "": row.name,
                "precision": row.precision,
                "tau": _cell(row.tau, ".2f"),
                "vanilla tok/s": _cell(row.vanilla_tokens_per_s, ".1f"),
                "drafted tok/s": _cell(row.eagle_tokens_per_s, ".1f"),
                "drafting, ms": _cell(row.draft_ms, ".2f"),
                "pass of 1, ms": _cell(row.pass_1_ms, ".2f"),
                f"pass of {NODES}, ms": _cell(row.pass_16_ms, ".2f"),
            }
        )
    return _filled(quality) + "\n" + _filled(speed)


def _filled(lines: Sequence[dict[str, str]]) -> str:
    titles = [title for title in lines[0] if any(line[title] != "-" for line in lines)]
    return markdown_table(titles, [[line[title] for title in titles] for line in lines])


def _cell(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else format(value, form) + unit
