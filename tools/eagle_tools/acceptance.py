"""How well a head drafts: tokens per forward pass for each tree, acceptance by depth, and how its confidence relates to
acceptance.

    python -m eagle_tools.acceptance BUNDLE... --prompts FILE.jsonl -o FOLDER

prints a table in the form of the papers' and writes FOLDER/acceptance.md and FOLDER/calibration.png.

    tau         tokens emitted per forward pass of the target
    n-alpha     for chains: share of the drafts with n accepted tokens whose next token is accepted too; the head's
                input then contains n of its own proposals (EAGLE paper, section 5.2)
    confidence  the head's probability of a token, given the path to it; EAGLE-2's trees (section 3.2, Figure 6) assume
                that it is close to the probability of acceptance
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import TreeKind, read_manifest
from eagle_runtime.commands.command import Parser, run_command
from eagle_runtime.core.generate import Cycle
from eagle_tools.markdown import markdown_table
from eagle_tools.questions import Question, read_questions

CHAIN = 5  # drafts of a chain: 0-alpha to 4-alpha
TREES: tuple[TreeKind, ...] = ("chain", "static", "dynamic")
BINS = 10  # intervals of confidence, equally wide


@dataclass(slots=True)
class Acceptance:
    """Counts over generations with one head, one tree kind and one temperature.

    new_tokens: tokens after the first of each generation. passes: forward passes of the target. reached[d]: drafts
    longer than d tokens whose first d tokens were accepted. accepted[d]: those of them whose token d + 1 was accepted
    too. confidences, outcomes: of each cycle, as `verified_nodes` returns them."""

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
        """Returns 0-alpha, 1-alpha, ... of a chain."""
        return tuple((self.accepted / np.maximum(1, self.reached)).tolist())

    def add(self, cycle: Cycle) -> None:
        """Count the draft of one cycle."""
        depth = cycle.step.num_accepted
        self.reached[: min(depth + 1, CHAIN, cycle.tree.num_nodes - 1)] += 1
        self.accepted[:depth] += 1
        confidence, outcome = verified_nodes(cycle)
        self.confidences.append(confidence)
        self.outcomes.append(outcome)

    def calibration(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Returns mean confidence, share accepted and number of nodes for each of BINS intervals of confidence; empty
        intervals are left out."""
        confidence, outcome = np.concatenate(self.confidences), np.concatenate(self.outcomes)
        interval = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
        count = np.bincount(interval, minlength=BINS)
        used = count > 0
        means = [np.bincount(interval, weights=x, minlength=BINS)[used] / count[used] for x in (confidence, outcome)]
        return means[0], means[1], count[used]


def verified_nodes(cycle: Cycle) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Returns the confidence [n] of the children of accepted nodes, and whether each was accepted [n]. The target did
    not decide about other nodes."""
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
    on_question: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Returns the counts over all questions. A chat model answers every turn through its template; any other gets the
    first turn as plain text. on_question: called after each question."""
    counts = Acceptance(name, tree, temperature)
    for question in questions:
        messages: list[dict[str, str]] = []
        for turn in question.turns if model.text.chat else question.turns[:1]:
            messages.append({"role": "user", "content": turn})
            result = model.generate(
                messages if model.text.chat else turn,
                tree=tree,
                depth=CHAIN - 1 if tree == "chain" else None,
                sampling=SamplingParams(temperature=temperature, seed=seed),
                max_new_tokens=max_new_tokens,
                on_cycle=counts.add,
            )
            messages.append({"role": "assistant", "content": result.text or ""})
            counts.new_tokens += result.usage.new_tokens - 1
            counts.passes += result.usage.target_passes
        on_question()
    return counts


def table(rows: Sequence[Acceptance]) -> str:
    """Returns a Markdown table: tau of each tree, and n-alpha of chains."""
    titles = ["head", "T", "tree", "tau", *(f"{n}-alpha" for n in range(CHAIN))]
    lines = []
    for row in rows:
        alphas = [f"{alpha:.2f}" for alpha in row.n_alpha] if row.tree == "chain" else [""] * CHAIN
        lines.append([row.bundle, f"{row.temperature:g}", row.tree, f"{row.tau:.2f}", *alphas])
    return markdown_table(titles, lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    return run_command(_parser(), argv, run, extra="bench", interrupted="interrupted; nothing was written")


def run(args: argparse.Namespace) -> None:
    """Measure the bundles that the arguments name, print the table, write table and plot."""
    import matplotlib  # noqa: F401  (a missing package is reported before the work)
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
                name = Path(bundle).absolute().name
                for tree, temperature in settings:
                    options = (tree, temperature, args.max_new_tokens, args.seed, lambda: progress.advance(task))
                    rows.append(measure(model, name, questions, *options))
    text = table(rows)
    print(text, end="")
    if args.output is not None:
        from eagle_tools.plots import CalibrationLine, calibration_plot

        folder = Path(args.output)
        folder.mkdir(exist_ok=True)
        (folder / "acceptance.md").write_text(text, encoding="utf-8")
        dynamic = [row for row in rows if row.tree == "dynamic"]
        lines = [CalibrationLine(f"{row.bundle}, T = {row.temperature:g}", *row.calibration()) for row in dynamic]
        calibration_plot(lines, folder / "calibration.png")


def _settings(args: argparse.Namespace) -> Iterator[tuple[TreeKind, float]]:
    for temperature in args.temperature:
        for tree in TREES:
            yield tree, temperature


def _parser() -> Parser:
    parser = Parser(prog="eagle_tools.acceptance", description="How well a bundle's head drafts on a set of questions.")
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export")
    parser.add_argument("--prompts", required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument("-o", "--output", metavar="FOLDER", help="write acceptance.md and calibration.png there")
    parser.add_argument("--count", type=int, metavar="N", help="take the first N questions (default: all)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
