"""The table of the methods that EAGLE's papers compare, measured on one runtime, and published ratios."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_tools.bench.methods import VANILLA
from eagle_tools.bench.summary import Summary
from eagle_tools.markdown import markdown_table

# Spec-Bench's leaderboard (github.com/hemingkx/Spec-Bench, arXiv 2401.07851): speed-up over all its tasks, and mean
# accepted tokens per pass, of Vicuna-7B with greedy decoding on an RTX 3090.
PUBLISHED: dict[str, tuple[str, float, float]] = {
    "lookahead": ("Lookahead", 1.13, 1.64),
    "lookup": ("PLD", 1.64, 1.73),
    "lookup:dynamic": ("REST", 1.28, 1.63),
    "draft-model": ("SpS", 1.79, 2.28),
    "eagle:static": ("EAGLE", 2.03, 3.57),
    "eagle:dynamic": ("EAGLE-2", 2.19, 4.35),
}
NOTE = (
    "Published: Spec-Bench's leaderboard (arXiv 2401.07851), Vicuna-7B on an RTX 3090, greedy, all tasks: another "
    "model, other hardware, other questions, so for the order of methods alone."
)


def seed_methods() -> tuple[str, ...]:
    """Returns the methods of the table, each run by the bundles that can run it."""
    return ("lookahead", "lookup", "lookup:dynamic", "draft-model", "eagle:static", "eagle:dynamic", "eagle+lookup")


def seeds_table(summaries: Sequence[Summary]) -> str:
    """Returns the table as Markdown: a line per bundle and method, speed-up against vanilla and tau at each
    temperature."""
    temperatures = sorted({one.setup.temperature for one in summaries})
    cells = {(one.setup.bundle, one.setup.precision, one.setup.method, one.setup.temperature): one for one in summaries}
    lines = []
    for bundle, precision, method in dict.fromkeys(key[:3] for key in cells):
        if method == VANILLA:
            continue
        line = [bundle, precision, method]
        for temperature in temperatures:
            one = cells.get((bundle, precision, method, temperature))
            ratio = None if one is None else one.vs_vanilla
            line += ["" if ratio is None else f"{ratio.value:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"]
            line += ["" if one is None else f"{one.tau:.2f}"]
        name, speed, tau = PUBLISHED.get(method, ("", None, None))
        lines.append([*line, name if speed is None else f"{name} {speed:.2f}x, {tau:.2f}"])
    header = ["bundle", "precision", "method"]
    for temperature in temperatures:
        header += [f"T = {temperature:g}: x vanilla", "tau"]
    return markdown_table([*header, "published: x plain, tau"], lines) + f"\n{NOTE}\n"
