"""What long contexts cost: decoding with and without drafts after prompts of several lengths, bundle against bundle.

    python -m studies contexts BUNDLE... --prompts FILE.jsonl --contexts 128,3000,8000

prints one table. A prompt is the text of all questions in a row, as often as its length takes. Bundles take turns, so
that a machine that slows down meanwhile slows them all; times are medians over the rounds. The cache's size is that of
the target's keys and values for the prompt.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

import numpy as np

from eagle_runtime import EagleModel, SamplingParams, Usage
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.commands.command import Listed, Parser
from eagle_tools.markdown import markdown_table
from eagle_tools.questions import read_questions
from studies.harness import positive

TITLES = ("context", "bundle", "method", "ms per token", "quartiles", "tau", "prefill, s", "cache, MB")


def report(args: argparse.Namespace) -> str:
    """Decode with the bundles that the arguments name; returns the table."""
    positive(args.rounds, args.max_new_tokens - 1, *args.contexts, names="--rounds, --contexts and new tokens but one")
    questions = read_questions(args.prompts)
    text = "\n".join(turn for question in questions for turn in question.turns)
    room = max(args.contexts) + args.max_new_tokens
    rows = []
    with ExitStack() as stack:
        models = {
            bundle: stack.enter_context(EagleModel.load(bundle, context=room, threads=args.threads))
            for bundle in args.bundles
        }
        for context in args.contexts:
            rows += measure(models, text, context, args.rounds, args.max_new_tokens)
    return markdown_table(TITLES, rows)


def measure(
    models: dict[str, EagleModel], text: str, context: int, rounds: int, max_new_tokens: int
) -> list[tuple[str, ...]]:
    """Returns the table's rows of one context. models: by bundle. The first round is not counted if there are more."""
    taken: dict[tuple[str, str], list[Usage]] = defaultdict(list)
    for number in range(rounds):
        for bundle, model in models.items():
            prompt = list(islice(cycle(model.text.encode(text)), context))
            for method in ("vanilla", None):
                stats = model.generate(
                    prompt, sampling=SamplingParams(), method=method, max_new_tokens=max_new_tokens
                ).usage
                if (number > 0 or rounds == 1) and stats.new_tokens > 1:
                    taken[bundle, stats.method].append(stats)
    rows: list[tuple[str, ...]] = []
    for (bundle, method), runs in taken.items():
        values = [1e3 / stats.tokens_per_s for stats in runs]
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        target = read_manifest(Path(bundle)).target
        size = 2 * target.num_layers * target.graph.kv_row_bytes * context / 1e6
        prefill = float(np.median([stats.prefill_s for stats in runs]))
        rows.append(
            (
                str(context),
                Path(bundle).absolute().name,
                method,
                f"{middle:.1f}",
                f"{low:.1f}-{high:.1f}",
                f"{runs[-1].tau:.2f}",
                f"{prefill:.1f}",
                f"{size:.3g}",
            )
        )
    return rows


def add_options(parser: Parser) -> None:
    """What the table is made of."""
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export, of one target")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument(
        "--contexts", action=Listed, of=int, default=[128, 3000], metavar="N,N", help="tokens of prompts"
    )
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="the first is not counted")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
