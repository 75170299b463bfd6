"""How well a head drafts: tokens per pass for each tree shape, acceptance by depth, and whether its confidence is true.

    python -m eagle_tools.acceptance BUNDLE... --prompts FILE.jsonl -o FOLDER

prints a table of the papers' shape and writes FOLDER/acceptance.md and FOLDER/calibration.png.

    tau         tokens emitted per pass of the target
    n-alpha     share of drafts accepted n + 1 tokens deep, among those accepted n deep, in a chain: the head's input
                then holds n of its own proposals (EAGLE paper, section 5.2)
    confidence  the head's probability for a token, given the path to it; EAGLE-2 (section 3.2, Figure 6) builds its
                trees on this being close to the chance of acceptance
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import TreeKind, read_manifest
from eagle_runtime.command import Parser, run_command
from eagle_runtime.errors import RequestError
from eagle_runtime.generate import Cycle
from eagle_tools.questions import Question, read_questions

CHAIN = 5  # drafts of a chain: 0-alpha to 4-alpha
TREES: tuple[TreeKind, ...] = ("chain", "static", "dynamic")
BINS = 10  # of confidence, equally wide


@dataclass(slots=True)
class Acceptance:
    """Counts over generations with one head, one tree shape and one temperature.

    new_tokens: emitted after the first of each; passes of the target; reached[d], accepted[d]: drafts whose first d
    tokens were accepted and that went on, and those among them whose token d + 1 was accepted too."""

    bundle: str
    tree: TreeKind
    temperature: float
    new_tokens: int = 0
    passes: int = 0
    reached: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CHAIN, np.int64))
    accepted: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(CHAIN, np.int64))
    confidences: list[npt.NDArray[np.float32]] = field(default_factory=list)
    outcomes: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    @property
    def tau(self) -> float:
        return self.new_tokens / max(1, self.passes)

    @property
    def n_alpha(self) -> tuple[float, ...]:
        """0-alpha, 1-alpha, ... of a chain."""
        return tuple((self.accepted / np.maximum(1, self.reached)).tolist())

    def add(self, cycle: Cycle) -> None:
        """Count one verification."""
        depth = cycle.step.num_accepted
        self.reached[: min(depth + 1, CHAIN, cycle.tree.num_nodes - 1)] += 1
        self.accepted[:depth] += 1
        confidence, outcome = fate_of_nodes(cycle)
        self.confidences.append(confidence)
        self.outcomes.append(outcome)

    def calibration(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Mean confidence, share accepted and number of the nodes in each of BINS intervals of confidence; empty
        intervals are left out."""
        confidence, outcome = np.concatenate(self.confidences), np.concatenate(self.outcomes)
        interval = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        count = np.bincount(interval, minlength=BINS)
        full = count > 0
        means = [np.bincount(interval, weights=x, minlength=BINS)[full] / count[full] for x in (confidence, outcome)]
        return means[0], means[1], count[full]


def fate_of_nodes(cycle: Cycle) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Confidence and fate of the drafted nodes that the target had a say on: those under an accepted node."""
    tree, path = cycle.tree, cycle.step.path
    nodes = np.flatnonzero(np.isin(tree.parents, path))
    confidence = np.exp(tree.scores[nodes] - tree.scores[tree.parents[nodes]])
    return confidence.astype(np.float32), np.isin(nodes, path)


def measure(
    model: EagleModel,
    name: str,
    questions: Sequence[Question],
    tree: TreeKind,
    temperature: float,
    max_new_tokens: int,
    seed: int = 0,
    told: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Decode every question; told is called after each one. A chat model is asked through its template, turn by turn;
    any other gets the first turn as text."""
    found = Acceptance(name, tree, temperature)
    for question in questions:
        messages: list[dict[str, str]] = []
        for turn in question.turns if model.text.chat else question.turns[:1]:
            messages.append({"role": "user", "content": turn})
            result = model.generate(
                messages if model.text.chat else turn,
                tree=tree,
                depth=CHAIN - 1 if tree == "chain" else None,
                temperature=temperature,
                max_new_tokens=max_new_tokens,
                seed=seed,
                on_cycle=found.add,
            )
            messages.append({"role": "assistant", "content": result.text or ""})
            found.new_tokens += result.stats.new_tokens - 1
            found.passes += result.stats.target_passes
        told()
    return found


def table(rows: Sequence[Acceptance]) -> str:
    """Markdown: tau by tree, and n-alpha beside the chain."""
    titles = ["head", "T", "tree", "tau", *(f"{n}-alpha" for n in range(CHAIN))]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        alphas = [f"{alpha:.2f}" for alpha in row.n_alpha] if row.tree == "chain" else [""] * CHAIN
        cells = [row.bundle, f"{row.temperature:g}", row.tree, f"{row.tau:.2f}", *alphas]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error that is the input's."""
    return run_command(_parser(), argv, run, extra="bench", interrupted="interrupted; nothing was written")


def run(args: argparse.Namespace) -> None:
    """Measure what the parsed arguments name, print the table, write it with the plot."""
    import matplotlib  # noqa: F401  (missing packages show before the work)
    from rich.console import Console
    from rich.progress import Progress

    questions = read_questions(Path(args.prompts), args.count)
    if args.output is not None and not Path(args.output).absolute().parent.is_dir():
        raise RequestError(f"{Path(args.output).absolute().parent} does not exist; create it first")
    for bundle in args.bundles:
        if read_manifest(Path(bundle)).head is None:
            raise RequestError(f"{bundle} has no draft head to measure; give bundles that were exported with one")
    rows = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        settings = list(_settings(args))
        task = progress.add_task("decoding", total=len(settings) * len(args.bundles) * len(questions))
        for bundle in args.bundles:
            with EagleModel.load(bundle, threads=args.threads) as model:
                for tree, temperature in settings:
                    name = Path(bundle).absolute().name
                    rows.append(
                        measure(
                            model,
                            name,
                            questions,
                            tree,
                            temperature,
                            args.max_new_tokens,
                            args.seed,
                            lambda: progress.advance(task),
                        )
                    )
    text = table(rows)
    print(text, end="")
    if args.output is not None:
        from eagle_tools.plots import calibration_plot

        folder = Path(args.output)
        folder.mkdir(exist_ok=True)
        (folder / "acceptance.md").write_text(text, encoding="utf-8")
        calibration_plot([row for row in rows if row.tree == "dynamic"], folder / "calibration.png")


def _settings(args: argparse.Namespace) -> Iterator[tuple[TreeKind, float]]:
    for temperature in args.temperature:
        for tree in TREES:
            yield tree, temperature


def _parser() -> Parser:
    parser = Parser(prog="eagle_tools.acceptance", description="How well a bundle's head drafts, on a question set.")
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument("-o", "--output", metavar="FOLDER", help="write acceptance.md and calibration.png there")
    parser.add_argument("--count", type=int, metavar="N", help="take the first N questions (default: all)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of one pass (default: physical cores)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
