"""What a precision costs and brings: bundles of one pair side by side, the first being the reference.

    python -m eagle_tools.precision BUNDLE... --text FILE --prompts FILE.jsonl -o FOLDER

prints a table and writes it to FOLDER/precision.md, its rows to precision.jsonl, and precision.png: quality over speed.

    KL           mean KL(reference || bundle) of the target's next token over held-out text, nats
    top-1        share of the rows whose likeliest token is the reference's
    perplexity   of the text, and its change against the reference
    tau          tokens per pass of the target, greedy, dynamic trees of 16 nodes; looked up chains without a head
    tok/s        of decoding, vanilla and with the bundle's own tree, median over the prompts
    drafting     of one such tree: all passes of the head for it, median
    pass of n    of the target over n tokens, median

All bundles are loaded at once and take turns, prompt by prompt, so that whatever else the machine does meets all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eagle_runtime import EagleModel
from eagle_runtime.command import Parser, run_command
from eagle_runtime.eagle_model import Prompt
from eagle_runtime.errors import RequestError
from eagle_runtime.generate import Cycle
from eagle_runtime.scoring import Double, divergence, log_softmax
from eagle_tools.heldout import WINDOW, read_windows
from eagle_tools.questions import Question, read_questions

WARM_UP = 8  # tokens
NODES = 16  # of the larger pass that is timed


@dataclass(slots=True)
class Closeness:
    """Sums over scored rows. kl: nats; same: rows with the reference's likeliest token; nll: nats of the text's own
    tokens."""

    rows: int = 0
    kl: float = 0.0
    same: int = 0
    nll: float = 0.0

    def add(self, reference: Double, found: Double, following: Sequence[int]) -> None:
        """reference, found [R, V]: log-probabilities; following [R]: the token that came after each row."""
        self.rows += len(found)
        self.kl += float(divergence(reference, found).sum())
        self.same += int((reference.argmax(-1) == found.argmax(-1)).sum())
        self.nll -= float(found[np.arange(len(found)), list(following)].sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.rows)


@dataclass(slots=True)
class Speed:
    """Tokens per second of every prompt, seconds of every pass by its tokens and of drafting every tree of NODES, and
    the counts behind tau."""

    vanilla: list[float] = field(default_factory=list)
    eagle: list[float] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=lambda: {1: [], NODES: []})
    drafts: list[float] = field(default_factory=list)
    new_tokens: int = 0
    target_passes: int = 0

    def pass_over(self, cycle: Cycle) -> None:
        """Note a verification, if it is of a size that is asked for."""
        if cycle.tree.num_nodes in self.passes:
            self.passes[cycle.tree.num_nodes].append(cycle.verify_s)
        if cycle.tree.num_nodes == NODES:
            self.drafts.append(cycle.draft_s)


@dataclass(frozen=True, slots=True)
class Row:
    """A bundle's figures, as the module says; perplexity_change: percent. None: the prompts gave nothing to time."""

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
    models: Sequence[EagleModel], windows: Sequence[Sequence[int]], told: Callable[[], None] = lambda: None
) -> list[Closeness]:
    """Read every window with every model; the first model is the reference. told: called after each window."""
    found = [Closeness() for _ in models]
    for window in windows:
        read = 0
        # Side by side, a piece of each at a time: whole windows of logits would take gigabytes.
        for pieces in zip(*(model.score(window[:-1]) for model in models), strict=True):
            following = window[read + 1 : read + 1 + len(pieces[0])]
            reference = log_softmax(pieces[0])
            for closeness, piece in zip(found, pieces, strict=True):
                closeness.add(reference, log_softmax(piece), following)
            read += len(following)
        told()
    return found


def time_models(
    models: Sequence[EagleModel],
    questions: Sequence[Question],
    max_new_tokens: int,
    told: Callable[[], None] = lambda: None,
) -> list[Speed]:
    """Decode every question with every model in turn, after one warm-up each. told: called after each question."""
    found = [Speed() for _ in models]
    for model in models:
        _decode(model, questions[0], WARM_UP, Speed())
    for number, question in enumerate(questions):
        first = number % len(models)  # another begins each time
        for index in (*range(first, len(models)), *range(first)):
            _decode(models[index], question, max_new_tokens, found[index])
        told()
    return found


def _decode(model: EagleModel, question: Question, max_new_tokens: int, found: Speed) -> None:
    prompt: Prompt = question.turns[0]
    if model.text.chat:
        prompt = [{"role": "user", "content": question.turns[0]}]
    plain = model.generate(prompt, method="vanilla", max_new_tokens=max_new_tokens, on_cycle=found.pass_over)
    eagle = model.generate(prompt, max_new_tokens=max_new_tokens)
    tree: dict[str, Any] = {"tree": "dynamic", "total_token": NODES}
    if model.manifest.head is None:
        tree = {"tree": "chain", "total_token": NODES, "depth": NODES - 2}
    fixed = model.generate(prompt, max_new_tokens=max_new_tokens, on_cycle=found.pass_over, **tree)
    if eagle.stats.target_passes:
        found.vanilla.append(plain.stats.tokens_per_s)
        found.eagle.append(eagle.stats.tokens_per_s)
        found.new_tokens += fixed.stats.new_tokens - 1
        found.target_passes += fixed.stats.target_passes


def rows_of(
    bundles: Sequence[Path], models: Sequence[EagleModel], texts: Sequence[Closeness], speeds: Sequence[Speed]
) -> list[Row]:
    """One row per bundle, in order."""
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
    """Markdown."""
    titles = ["bundle", "precision", "MB", "KL", "top-1", "perplexity", "change", "tau", "vanilla tok/s"]
    titles += ["drafted tok/s", "drafting, ms", "pass of 1, ms", f"pass of {NODES}, ms"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for row in rows:
        cells = [row.bundle, row.precision, f"{row.bytes / 1e6:.1f}", f"{row.kl:.2g}", f"{row.agreement:.2%}"]
        cells += [f"{row.perplexity:.3f}", f"{row.perplexity_change:+.2f} %", _cell(row.tau, 2)]
        cells += [_cell(row.vanilla_tokens_per_s, 1), _cell(row.eagle_tokens_per_s, 1)]
        cells += [_cell(row.draft_ms, 2), _cell(row.pass_1_ms, 2), _cell(row.pass_16_ms, 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error that is the input's."""
    return run_command(_parser(), argv, run, extra="bench", interrupted="interrupted; nothing was written")


def run(args: argparse.Namespace) -> None:
    """Measure what the parsed arguments name, print the table, write it with rows and plot."""
    import matplotlib  # noqa: F401  (missing packages show before the work)
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
    precision_plot(rows, folder / "precision.png")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} exists and is no folder; choose another name")
    if not folder.absolute().parent.is_dir():
        raise RequestError(f"{folder.absolute().parent} does not exist; create it first")


def _check_vocabularies(bundles: Sequence[Path], models: Sequence[EagleModel]) -> None:
    """Ids must mean the same to all; raises RequestError."""
    seen = [(m.manifest.target.vocab_size, m.manifest.files.get("tokenizer.json")) for m in models]
    for bundle, vocabulary in zip(bundles, seen, strict=True):
        if vocabulary != seen[0]:
            raise RequestError(f"{bundle} has another vocabulary than {bundles[0]}; give bundles of one target")


def _parser() -> Parser:
    parser = Parser(
        prog="eagle_tools.precision",
        description="Bundles of one pair in several precisions: how close to the first, and how fast.",
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export")
    parser.add_argument("--text", required=True, metavar="FILE", help='held-out text, or JSONL with "text" or "ids"')
    parser.add_argument("--prompts", required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="write precision.md, .jsonl, .png there"
    )
    parser.add_argument("--count", type=int, metavar="N", help="take the first N prompts (default: all)")
    parser.add_argument(
        "--tokens", type=int, default=8192, metavar="N", help="of the text that are read (default 8192)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default 128)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of one pass (default: physical cores)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
