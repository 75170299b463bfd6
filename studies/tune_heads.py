"""Tune heads on quantised targets, and measure what that does to the tokens per forward pass.

    python -m studies tune_heads TARGET HEAD... --learn-from PROMPTS --prompts HELDOUT -p int8 int4 --steps 400 -w WORK

exports every head with the target in fp32 and in each precision, lets each quantised target answer the prompts, trains
the heads further on what it returns (`eagle-train head --target-bundle --init`) and exports them again. It prints a row
per head and precision: tau on the held-out prompts (greedy, dynamic trees of the default size) before and after, its
distance from fp32's. What stands in WORK is not made again, so an interrupted run goes on; take a new folder after a
change of recipes. `tools/train_demo_pair.py data` writes prompts for the shipped pair (greedy-prompts.jsonl).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Listed, Parser
from eagle_tools.markdown import markdown_table
from eagle_train.cli import main as eagle_train
from studies.harness import add_prompts, prompts_of

RESAMPLED = 500  # sets of prompts drawn for a standard error
LEARNING = {"eagle1": ["--classification", "1"], "eagle3": ["--ttt-steps", "3"]}  # of heads that are trained already


@dataclass(frozen=True, slots=True)
class Tau:
    """Tokens per forward pass of the target over a set of prompts. error: its standard error over prompts."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.error:.2f}"


def add_options(parser: Parser) -> None:
    """What is trained, and on what it is measured."""
    parser.add_argument("target", type=Path, help="folder of the target")
    parser.add_argument("heads", type=Path, nargs="+", help="folders of its heads, one of each kind at most")
    parser.add_argument("--learn-from", type=Path, required=True, metavar="FILE", help="JSONL of prompts")
    add_prompts(parser)
    parser.add_argument("-p", "--precisions", action=Listed, default=["int8", "int4"], metavar="A,B")
    parser.add_argument("--steps", type=int, default=400, help="of 8 answers (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=5e-4, help="peak rate (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="of an answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    parser.add_argument("-w", "--work", type=Path, required=True, help="folder of bundles, answers and heads")


def report(args: argparse.Namespace) -> str:
    """Returns the table of all heads and precisions."""
    prompts = prompts_of(args.prompts, args.count)
    kinds = {_kind(args.target, head): head for head in args.heads}
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind, head in kinds.items():
        exact = _tau(_bundle(args, head, "fp32", args.work / f"{kind}-fp32"), prompts, args.threads)
        rows.append([kind, "fp32", str(exact), "", "", ""])
        for precision in args.precisions:
            bundle = _bundle(args, head, precision, args.work / f"{kind}-{precision}")
            answers = args.work / f"answers-{precision}.jsonl"
            target = ["--target-bundle", str(bundle), "--threads", str(args.threads)]
            if not answers.is_file():
                limit = ["--max-new-tokens", str(args.max_new_tokens)]
                _run("generate", str(args.target), *target, *limit, "--data", str(args.learn_from), "-o", str(answers))
            tuned = args.work / f"{kind}-{precision}-head"
            if not (tuned / "model.safetensors").is_file():
                options = ["--kind", kind, "--init", str(head), "--steps", str(args.steps), "--lr", str(args.lr)]
                options += [*LEARNING[kind], "--data", str(answers), "-o", str(tuned)]
                resume = ["--resume"] if (tuned / "training").is_dir() else []
                _run("head", str(args.target), *target, *options, *resume)
            before = _tau(bundle, prompts, args.threads)
            new_bundle = _bundle(args, tuned, precision, args.work / f"{kind}-{precision}-tuned")
            after = _tau(new_bundle, prompts, args.threads)
            far = [f"{tau.value / exact.value - 1:+.1%}" for tau in (before, after)]
            rows.append([kind, precision, str(before), far[0], str(after), far[1]])
    return markdown_table(["head", "target", "tau", "from fp32's", "tau, tuned", "from fp32's"], rows)


def _kind(target: Path, head: Path) -> str:
    part = open_pair(target, head).head
    assert part is not None
    return part.config.kind


def _bundle(args: argparse.Namespace, head: Path, precision: str, bundle: Path) -> Path:
    """Returns a bundle of the target and a head, exported unless it exists."""
    if not bundle.is_dir():
        export(args.target, head, bundle, Settings(precision=precision, certify=False))
    return bundle


def _run(*arguments: str) -> None:
    if eagle_train(list(arguments)) != 0:
        raise RequestError(f"eagle-train {arguments[0]} stopped; what it printed above says what to do")


def _tau(bundle: Path, prompts: Sequence[str], threads: int) -> Tau:
    settings: dict[str, Any] = {"tree": "dynamic", "sampling": SamplingParams(), "max_new_tokens": 96}
    with EagleModel.load(bundle, threads=threads) as model:
        chat = model.text.chat
        asked = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in prompts]
        usages = [model.generate(prompt, **settings).usage for prompt in asked]
    tokens, passes = np.array([(usage.new_tokens - 1, usage.target_passes) for usage in usages]).T
    drawn = np.random.default_rng(0).integers(0, len(usages), (RESAMPLED, len(usages)))
    resampled = tokens[drawn].sum(1) / np.maximum(passes[drawn].sum(1), 1)
    return Tau(float(tokens.sum() / max(passes.sum(), 1)), float(resampled.std()))
