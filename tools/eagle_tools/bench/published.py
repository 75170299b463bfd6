"""Ratios that papers and a leaderboard published for the methods of `eagle-bench --table seeds`, for reference.

All figures are speed-ups over plain decoding with the mean number of tokens per pass of the target (tau), and None
where the source has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from eagle_tools.markdown import markdown_table

# Question sets of EAGLE-2's and EAGLE-3's papers: name of the file -> name in the papers, in their order.
SETS = {"mt_bench": "MT-bench", "humaneval": "HumanEval", "gsm8k": "GSM8K"}
SETS |= {"alpaca": "Alpaca", "sum": "CNN/DM", "qa": "NQ"}
NO_FIGURE = "-"

Ratio = tuple[float, float]  # speed-up, tau


@dataclass(frozen=True, slots=True)
class Published:
    """One method. greedy: at temperature 0 on MT-bench, HumanEval, GSM8K, Alpaca, CNN/DM and their mean; sampled_mean:
    at temperature 1; both of Table 1 of EAGLE-3's paper. spec_bench: of Spec-Bench's leaderboard. own: what the
    method's own authors wrote."""

    name: str
    greedy: tuple[Ratio, ...] | None = None
    sampled_mean: Ratio | None = None
    spec_bench: Ratio | None = None
    own: str = NO_FIGURE


PUBLISHED = {
    "SpS": Published(
        "speculative sampling (Vicuna-68M)",
        ((1.93, 2.27), (2.23, 2.57), (1.77, 2.01), (1.76, 2.03), (1.93, 2.33), (1.92, 2.24)),
        (1.60, 1.84),
        (1.54, 2.19),
        "2-3x, T5-XXL (arXiv 2211.17192); 2-2.5x, Chinchilla 70B (2302.01318)",
    ),
    "Lookahead": Published(
        "lookahead",
        ((1.65, 1.69), (1.71, 1.75), (1.81, 1.90), (1.46, 1.51), (1.46, 1.50), (1.62, 1.67)),
        None,
        (1.30, 1.63),
        "up to 1.8x, MT-bench (2402.02057)",
    ),
    "PLD": Published(
        "prompt lookup",
        ((1.58, 1.63), (1.85, 1.93), (1.68, 1.73), (1.16, 1.19), (2.42, 2.50), (1.74, 1.80)),
        None,
        (1.56, 1.67),
    ),
    "REST": Published("REST", spec_bench=(1.38, 1.82), own="1.62-2.36x, 7B and 13B models (2311.08252)"),
    "Recycling": Published("token recycling", spec_bench=(2.17, 2.73), own="about 2x (2408.08696)"),
    "SAM": Published(
        "suffix automaton", own="2.27x with token recycling, Vicuna-7B on Spec-Bench's questions (2411.10666v2)"
    ),
    "Medusa": Published(
        "Medusa",
        ((2.07, 2.59), (2.50, 2.78), (2.23, 2.64), (2.08, 2.45), (1.71, 2.09), (2.12, 2.51)),
        None,
        (1.80, 2.39),
        "over 2.2x, Medusa-1 (2401.10774)",
    ),
    "Hydra": Published(
        "Hydra",
        ((2.88, 3.65), (3.28, 3.87), (2.93, 3.66), (2.86, 3.53), (2.05, 2.81), (2.80, 3.50)),
        None,
        (2.20, 3.35),
        "up to 2.70x, Hydra++ (2402.05109)",
    ),
    "EAGLE": Published(
        "EAGLE",
        ((3.07, 3.98), (3.58, 4.39), (3.08, 3.97), (3.03, 3.95), (2.49, 3.52), (3.05, 3.96)),
        (2.44, 3.45),
        (2.16, 3.64),
        "2.90x, 3.07x, 2.95x: MT-bench, Vicuna 7B, 13B, 33B, greedy (2401.15077)",
    ),
    "EAGLE-2": Published(
        "EAGLE-2",
        ((4.26, 4.83), (4.96, 5.41), (4.22, 4.79), (4.25, 4.89), (3.40, 4.21), (4.22, 4.83)),
        (3.76, 4.41),
        (2.46, 4.43),
        "3.05x-4.26x, six sets (2406.16858)",
    ),
    "EAGLE-3": Published(
        "EAGLE-3",
        ((5.58, 6.65), (6.47, 7.54), (5.32, 6.29), (5.16, 6.17), (5.01, 6.47), (5.51, 6.62)),
        (4.65, 5.67),
        (3.02, 5.71),
        "up to 6.5x (2503.01840)",
    ),
    "SAMD": Published("suffix automaton and EAGLE-2", spec_bench=(2.77, 4.52)),
    "DFlash": Published(
        "DFlash, DSpark",
        own="tau 4.07 and 4.81 where EAGLE-3 has 3.80: Qwen3-8B, chains of 7, T = 1 (DSpark's paper, Table 1)",
    ),
}
SOURCES = (
    "Published figures are speed-up, tau. By set, and their means: Vicuna-13B, Table 1 of EAGLE-3's paper "
    "(arXiv 2503.01840), which names no GPU and leaves out methods that are not lossless at T = 1. Spec-Bench: its "
    "leaderboard of April 2025 (github.com/hemingkx/Spec-Bench), Vicuna-13B on an A100, greedy, fp16, six tasks of its "
    "own. The last column is what each method's authors wrote of other models and machines. All are of large models on "
    "GPUs: compare the order of methods with them, not the ratios."
)


def published_table() -> str:
    """Returns Markdown: the published figures, and a paragraph that says what they are of."""
    sets = list(SETS.values())[:5]
    titles = ["published", *(f"T = 0: {sets[0]}", *sets[1:]), "mean", "T = 1: mean", "Spec-Bench", "its own authors"]
    lines = []
    for one in PUBLISHED.values():
        greedy = [_text(ratio) for ratio in one.greedy or (None,) * 6]
        lines.append([one.name, *greedy, _text(one.sampled_mean), _text(one.spec_bench), one.own])
    return markdown_table(titles, lines) + f"\n{SOURCES}\n"


def published_json() -> Iterator[dict[str, object]]:
    """Yields the figures as data for --json."""
    for key, one in PUBLISHED.items():
        yield {"key": key, **asdict(one)}


def _text(ratio: Ratio | None) -> str:
    return NO_FIGURE if ratio is None else f"{ratio[0]:.2f}x, {ratio[1]:.2f}"
