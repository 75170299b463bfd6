"""Quality and speed of one pair's bundles in several precisions, compared with the first bundle, the reference.

    python -m eagle_tools.precision BUNDLE... --text FILE --prompts FILE.jsonl -o FOLDER

prints a table, writes it to FOLDER/precision.md and its rows to precision.jsonl, and plots quality over speed in
precision.png.

    KL           mean KL(reference || bundle) of the target's next-token distribution over held-out text, in nats
    top-1        share of the rows that rank the same token first as the reference
    perplexity   of the text, and its change against the reference
    tau          tokens per forward pass of the target: greedy, dynamic trees of 16 nodes (without a head: chains of
                 n-gram matches)
    tok/s        decoding speed, vanilla and with the bundle's own tree, median over the prompts
    drafting     time of the head's forward passes for one tree of 16 nodes, median
    pass of n    time of the target's forward pass over n tokens, median

All bundles are loaded at once and take turns (eagle_tools/turns.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eagle_calib.scoring import Double, divergence, log_softmax
from eagle_runtime import EagleModel
from eagle_runtime.command import Parser, run_command
from eagle_runtime.eagle_model import Prompt
from eagle_runtime.errors import RequestError
from eagle_runtime.generate import Cycle
from eagle_tools.heldout import WINDOW, read_windows
from eagle_tools.markdown import markdown_table
from eagle_tools.questions import Question, read_questions
from eagle_tools.turns import WARM_UP, by_turns, generation, starting_order

NODES = 16  # nodes of the fixed tree, and rows of the larger forward pass that is timed


@dataclass(slots=True)
class Closeness:
    """Sums over scored rows. kl: nats. same: number of rows that rank the same token first as the reference. nll:
    negative log-likelihood of the text, in nats."""

    rows: int = 0
    kl: float = 0.0
    same: int = 0
    nll: float = 0.0

    def add(self, reference: Double, compared: Double, following: Sequence[int]) -> None:
        """Add rows. reference, compared [R, V]: log-probabilities. following [R]: the token after each row."""
        self.rows += len(compared)
        self.kl += float(divergence(reference, compared).sum())
        self.same += int((reference.argmax(-1) == compared.argmax(-1)).sum())
        self.nll -= float(compared[np.arange(len(compared)), list(following)].sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.rows)


@dataclass(slots=True)
class Speed:
    """Measurements of one model. vanilla, eagle: tokens per second of each prompt. passes: tokens of a forward pass ->
    seconds of each. drafts: seconds of drafting each tree of NODES nodes. new_tokens, target_passes: of the generations
    with such trees, for tau."""

    vanilla: list[float] = field(default_factory=list)
    eagle: list[float] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=lambda: {1: [], NODES: []})
    drafts: list[float] = field(default_factory=list)
    new_tokens: int = 0
    target_passes: int = 0

    def add_cycle(self, cycle: Cycle) -> None:
        """Record the times of a cycle whose tree has one of the sizes that are timed."""
        if cycle.tree.num_nodes in self.passes:
            self.passes[cycle.tree.num_nodes].append(cycle.verify_s)
        if cycle.tree.num_nodes == NODES:
            self.drafts.append(cycle.draft_s)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of a bundle, see the module's docstring. perplexity_change: percent. None: no prompt gave a time."""

    bundle: str
    precision: str
    bytes: int
    kl: float
    agreement: float
    perplexity: float
    perplexity_change: float
    tau: float | None
    vanilla_tokens_per_s: float | None
    eagle_tokens_per_s: float | None
    draft_ms: float | None
    pass_1_ms: float | None
    pass_16_ms: float | None


def compare_texts(
    models: Sequence[EagleModel], windows: Sequence[Sequence[int]], on_window: Callable[[], None] = lambda: None
) -> list[Closeness]:
    """Returns the closeness of each model to the first one over all windows of token ids. on_window: called after
    each window."""
    sums = [Closeness() for _ in models]
    for window in windows:
        read = 0
        # Compared piece by piece, since the logits of whole windows would take gigabytes.
        for pieces in zip(*(model.score(window[:-1]) for model in models), strict=True):
            following = window[read + 1 : read + 1 + len(pieces[0])]
            reference = log_softmax(pieces[0])
            for closeness, piece in zip(sums, pieces, strict=True):
                closeness.add(reference, log_softmax(piece), following)
            read += len(following)
        on_window()
    return sums


def time_models(
    models: Sequence[EagleModel],
    questions: Sequence[Question],
    max_new_tokens: int,
    on_question: Callable[[], None] = lambda: None,
) -> list[Speed]:
    """Returns the speed of each model over all questions, which the models answer by turns after one warm-up each.
    on_question: called after each question."""
    speeds = [Speed() for _ in models]
    for model in models:
        list(by_turns([_answer(model, questions[0], WARM_UP, Speed())]))
    for number, question in enumerate(questions):
        order = starting_order(len(models), number)
        list(by_turns([_answer(models[index], question, max_new_tokens, speeds[index]) for index in order]))
        on_question()
    return speeds


def _answer(model: EagleModel, question: Question, max_new_tokens: int, speed: Speed) -> Generator[int, None, None]:
    """A run (eagle_tools/turns.py) that answers the question without drafts, with the bundle's own tree, and with the
    fixed tree, and adds the measurements to `speed`."""
    prompt: Prompt = question.turns[0]
    if model.text.chat:
        prompt = [{"role": "user", "content": question.turns[0]}]
    limit: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    plain = yield from generation(model, prompt, method="vanilla", on_cycle=speed.add_cycle, **limit)
    count = plain.stats.new_tokens
    eagle = yield from generation(model, prompt, earlier_tokens=count, **limit)
    count += eagle.stats.new_tokens
    tree: dict[str, Any] = {"tree": "dynamic", "total_token": NODES}
    if model.manifest.head is None:
        tree = {"tree": "chain", "total_token": NODES, "depth": NODES - 2}
    fixed = yield from generation(model, prompt, earlier_tokens=count, on_cycle=speed.add_cycle, **limit, **tree)
    if eagle.stats.target_passes:
        speed.vanilla.append(plain.stats.tokens_per_s)
        speed.eagle.append(eagle.stats.tokens_per_s)
        speed.new_tokens += fixed.stats.new_tokens - 1
        speed.target_passes += fixed.stats.target_passes


def rows_of(
    bundles: Sequence[Path], models: Sequence[EagleModel], texts: Sequence[Closeness], speeds: Sequence[Speed]
) -> list[Row]:
    """Returns one row per bundle, in order."""
    rows = []
    for bundle, model, text, speed in zip(bundles, models, texts, speeds, strict=True):
        target = model.manifest.precision["target"]
        draft = model.manifest.precision.get("draft", target)
        rows.append(
            Row(
                bundle=bundle.absolute().name,
                precision=target if target == draft else f"{target}, head {draft}",
                bytes=sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()),
                kl=text.kl / text.rows,
                agreement=text.same / text.rows,
                perplexity=text.perplexity,
                perplexity_change=100 * (text.perplexity / texts[0].perplexity - 1),
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


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    titles = ["bundle", "precision", "MB", "KL", "top-1", "perplexity", "change", "tau", "vanilla tok/s"]
    titles += ["drafted tok/s", "drafting, ms", "pass of 1, ms", f"pass of {NODES}, ms"]
    lines = []
    for row in rows:
        cells = [row.bundle, row.precision, f"{row.bytes / 1e6:.1f}", f"{row.kl:.2g}", f"{row.agreement:.2%}"]
        cells += [f"{row.perplexity:.3f}", f"{row.perplexity_change:+.2f} %", _cell(row.tau, 2)]
        cells += [_cell(row.vanilla_tokens_per_s, 1), _cell(row.eagle_tokens_per_s, 1)]
        cells += [_cell(row.draft_ms, 2), _cell(row.pass_1_ms, 2), _cell(row.pass_16_ms, 2)]
        lines.append(cells)
    return markdown_table(titles, lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    return run_command(_parser(), argv, run, extra="bench", interrupted="interrupted; nothing was written")


def run(args: argparse.Namespace) -> None:
    """Measure the bundles that the arguments name, print the table, write table, rows and plot."""
    import matplotlib  # noqa: F401  (a missing package is reported before the work)
    from rich.console import Console
    from rich.progress import Progress

    folder, bundles = Path(args.output), [Path(bundle) for bundle in args.bundles]
    _check_folder(folder)
    questions = read_questions(Path(args.prompts), args.count)
    if args.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {args.max_new_tokens}, but must be 1 or more")
    with contextlib.ExitStack() as stack:
        models = [stack.enter_context(EagleModel.load(bundle, threads=args.threads)) for bundle in bundles]
        _check_vocabularies(bundles, models)
        longest = min(WINDOW, *(model.context for model in models))
        windows = read_windows(Path(args.text), models[0], longest, args.tokens)
        progress = stack.enter_context(Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()))
        task = progress.add_task("reading", total=len(windows))
        texts = compare_texts(models, windows, lambda: progress.advance(task))
        task = progress.add_task("decoding", total=len(questions))
        speeds = time_models(models, questions, args.max_new_tokens, lambda: progress.advance(task))
        rows = rows_of(bundles, models, texts, speeds)
    text = table(rows)
    print(text, end="")
    from eagle_tools.plots import precision_plot

    folder.mkdir(exist_ok=True)
    (folder / "precision.md").write_text(text, encoding="utf-8")
    lines = [json.dumps(dataclasses.asdict(row)) + "\n" for row in rows]
    (folder / "precision.jsonl").write_text("".join(lines), encoding="utf-8")
    points = [(row.bundle, row.eagle_tokens_per_s, row.agreement) for row in rows]
    precision_plot(points, folder / "precision.png")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} exists and is no folder; choose another name")
    if not folder.absolute().parent.is_dir():
        raise RequestError(f"{folder.absolute().parent} does not exist; create it first")


def _check_vocabularies(bundles: Sequence[Path], models: Sequence[EagleModel]) -> None:
    """Raises RequestError unless all bundles have the same vocabulary."""
    vocabularies = [(m.manifest.target.vocab_size, m.manifest.files.get("tokenizer.json")) for m in models]
    for bundle, vocabulary in zip(bundles, vocabularies, strict=True):
        if vocabulary != vocabularies[0]:
            raise RequestError(f"{bundle} has another vocabulary than {bundles[0]}; give bundles of one target")


def _parser() -> Parser:
    parser = Parser(
        prog="eagle_tools.precision",
        description="How close bundles of one pair are to the first one, and how fast.",
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export")
    parser.add_argument("--text", required=True, metavar="FILE", help='held-out text, or JSONL with "text" or "ids"')
    parser.add_argument("--prompts", required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="write precision.md, .jsonl, .png there"
    )
    parser.add_argument("--count", type=int, metavar="N", help="take the first N prompts (default: all)")
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="tokens of the text to read (default 8192)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default 128)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
