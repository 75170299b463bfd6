"""What drafting's constants are worth: tokens per second with each of them halved and doubled, against what it is.

    python -m studies constants BUNDLE --prompts tools/demo_pair/heldout.jsonl tools/demo_pair/edits.jsonl --count 12

prints one row per constant and method. Passes take the seconds of a made-up machine (TARGET, LEVEL), so that figures
repeat on every computer; drafts are as in generation. Every other answer is sampled, at temperature 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime import EagleModel
from eagle_runtime.base.tree import node_depths
from eagle_runtime.commands.command import Parser
from eagle_runtime.drafting import recycling
from eagle_runtime.drafting.cost_learning import unknown
from eagle_runtime.drafting.cost_model import Costs, Pass, Timings
from eagle_runtime.drafting.cost_storage import LearnedCosts
from eagle_runtime.drafting.rank_acceptance import Ranks
from eagle_runtime.opening.loading import open_bundle
from eagle_runtime.opening.opened import OpenBundle
from eagle_tools.markdown import markdown_table
from studies.harness import prompts_of

# Seconds: a pass of the target reads its weights in 20 ms, and a further row takes 0.4 ms; a level of the head 1.5 ms.
TARGET = Timings((1, 64), (64,), ((0.020, 0.0452),))
LEVEL = Timings((1, 32), (64,), ((0.0015, 0.0018),))
CONSTANTS = {  # method, tree if it is not the usual one -> module of drafting/, names in it
    "eagle": (
        ("acceptance", "PRIOR", "FADE"),
        ("cost_aware", "MAX_LEVELS", "CHILD_CHANCES", "NEWEST"),
        ("coupling", "HEAD_NOISE"),
    ),
    "eagle+lookup": (
        ("acceptance", "PRIOR", "MATCHED"),
        ("cost_aware", "MAX_MATCHED"),
        ("matches", "PLACES", "LONGEST"),
    ),
    "eagle sequoia": (
        ("rank_acceptance", "PRIOR", "FADE"),
        ("sequoia", "LEAST_NEW", "SHARE_NEW", "RANKS"),
    ),
    "recycling": (
        ("habits", "SUCCESSORS", "NEAR", "KEPT", "FADE", "SHORTER"),
        ("recycling", "SUCCESSORS", "HALF", "LEVEL_S"),
        ("matches", "HOPS"),
    ),
}
FADING = ("FADE",)  # what is left: half and double of what is lost


class Fixed(LearnedCosts):
    """Costs that stay as they are, whatever passes take."""

    def __init__(self) -> None:
        super().__init__(unknown(Costs(TARGET, LEVEL)))
        self._now = Costs(TARGET, LEVEL)

    @property
    def asks_for_plain(self) -> bool:
        return False

    def learn(self, passes: Sequence[Pass]) -> None:
        pass


def report(args: argparse.Namespace) -> str:
    """Decode with each value; returns the table."""
    prompts = [text for path in args.prompts for text in prompts_of(path, args.count)]
    rows = []
    opened = open_bundle(args.bundle, "auto", None, args.threads, check_hashes=True)
    with EagleModel(opened):
        for method, modules in CONSTANTS.items():
            recycling.NEWEST = 0.0  # type: ignore[attr-defined]  # a level's time stays what it is before any was timed
            usual = rate(opened, prompts, method, args.max_new_tokens)
            for module, *names in modules:
                for name in names:
                    ratios = []
                    for factor in (0.5, 2.0):
                        with changed(f"eagle_runtime.drafting.{module}", name, factor):
                            ratios.append(rate(opened, prompts, method, args.max_new_tokens) / usual)
                    rows.append((f"{module}.{name}", method, *(f"{100 * (ratio - 1):+.1f} %" for ratio in ratios)))
                    print(*rows[-1], flush=True)
    return markdown_table(("constant", "method", "half", "double"), rows)


def rate(opened: OpenBundle, prompts: Sequence[str], method: str, count: int) -> float:
    """Returns the tokens per second of the made-up machine. method: as in CONSTANTS."""
    bundle = dataclasses.replace(
        opened.with_new_caches(), costs=Fixed(), acceptance={}, ranks=Ranks(), habits=_fresh(opened)
    )
    method, _, tree = method.partition(" ")
    tokens, seconds = 0, 0.0

    def spend(cycle: Any) -> None:
        nonlocal seconds
        levels = int(node_depths(cycle.tree.parents).max()) if method != "recycling" else 0
        seconds += float(TARGET.at(0)[cycle.tree.num_nodes]) + levels * float(LEVEL.at(0)[10])

    other = EagleModel(bundle)
    for number, prompt in enumerate(prompts):
        result = other.generate(
            prompt,
            method=method,
            tree=tree or None,
            temperature=float(number % 2),
            seed=number,
            max_new_tokens=count,
            on_cycle=spend,
        )
        tokens += result.usage.new_tokens - 1
    return tokens / seconds


def _fresh(opened: OpenBundle) -> Any:
    return importlib.import_module("eagle_runtime.drafting.habits").Habits(opened.manifest.target.vocab_size)


@contextmanager
def changed(module: str, name: str, factor: float) -> Iterator[None]:
    """Within the block a constant is that many times what it is."""
    owner = importlib.import_module(module)
    value = getattr(owner, name)

    def scaled(x: Any) -> Any:
        return 1 - factor * (1 - x) if name in FADING else type(x)(factor * x)

    if isinstance(value, tuple):
        new: Any = tuple(map(scaled, value))
    elif isinstance(value, np.ndarray):
        new = value ** (1 / factor)  # chances stay below 1
    else:
        new = scaled(value)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, value)


def add_options(parser: Parser) -> None:
    """What is measured."""
    parser.add_argument("bundle", type=Path, help="with an autoregressive head")
    parser.add_argument(
        "--prompts", type=Path, action="append", required=True, metavar="FILE", help="question file; may be repeated"
    )
    parser.add_argument("--count", type=int, metavar="N", help="take the first N questions of each (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of an answer (default 96)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of a forward pass (default 1)")
