"""Processor time of forward passes with the portable and the native form of a bundle's target, by turns:

    python -m eagle_tools.native_passes BUNDLE --contexts 128,1024 --rows 1,4,8,16

One thread computes, so that its processor time is the pass's and other programs disturb it little."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_runtime import EagleModel
from eagle_runtime.backends import NATIVE
from eagle_runtime.command import Parser, run_command
from eagle_runtime.target import Target
from eagle_runtime.tree import Tree

BACKENDS = ("cpu", NATIVE)
TURNS, EACH = 6, 2  # passes of a backend: TURNS times EACH, after one that is not counted


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of the fastest pass over `rows` rows after `context`, by backend."""

    context: int
    rows: int
    fastest: dict[str, float]


def measure(bundle: Path, contexts: Sequence[int], counts: Sequence[int]) -> Iterator[Measured]:
    """Yields the times for each context and number of rows. Raises BackendError, BundleError."""
    size = max(contexts) + max(counts)
    with (
        EagleModel.load(bundle, backend=BACKENDS[0], threads=1, context=size, check_hashes="once") as portable,
        EagleModel.load(bundle, backend=BACKENDS[1], threads=1, context=size, check_hashes="once") as native,
    ):
        targets = {name: Target(one.sessions[0], size) for name, one in zip(BACKENDS, (portable, native), strict=True)}
        for context in contexts:
            for target in targets.values():
                target.cache.pretend(context)
            for rows in counts:
                chain = Tree(np.arange(rows), np.arange(-1, rows - 1), np.zeros(rows, np.float32))
                seconds = {name: min(_passes(target, chain)) for name, target in targets.items()}
                for _ in range(TURNS - 1):
                    again = {name: min(_passes(target, chain)) for name, target in targets.items()}
                    seconds = {name: min(seconds[name], again[name]) for name in seconds}
                yield Measured(context, rows, {name: 1e3 * value for name, value in seconds.items()})


def _passes(target: Target, tree: Tree) -> Iterator[float]:
    target.verify(tree)
    for _ in range(EACH):
        started = time.thread_time()
        target.verify(tree)
        yield time.thread_time() - started


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _parser() -> Parser:
    says = "Times passes with and without native kernels."
    parser = Parser(prog="python -m eagle_tools.native_passes", description=says)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--contexts", type=_numbers, default=(128,), help="committed tokens, such as 128,1024")
    parser.add_argument("--rows", type=_numbers, default=(1, 4, 8, 16), help="rows of a pass, such as 1,4,8,16")
    return parser


def run(args: argparse.Namespace) -> None:
    """Prints a line for each context and number of rows."""
    for each in measure(args.bundle, args.contexts, args.rows):
        times = ", ".join(f"{name} {value:.2f} ms" for name, value in each.fastest.items())
        print(f"context {each.context}, rows {each.rows}: {times}")


def main(argv: list[str] | None = None) -> int:
    """Entry point of the program."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


if __name__ == "__main__":
    raise SystemExit(main())
