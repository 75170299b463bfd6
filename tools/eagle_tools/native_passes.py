"""Processor time of forward passes with the portable and the native form of a bundle's graphs, by turns:

    python -m eagle_tools.native_passes BUNDLE --contexts 128,1024 --rows 1,4,8,16

One thread computes, so that its processor time is the pass's and other programs disturb it little."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from eagle_runtime.base.backend_names import NATIVE
from eagle_runtime.base.tree import Tree
from eagle_runtime.commands.command import Listed, Parser, run_command
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.head import Head, Scratch
from eagle_runtime.opening.hub_bundle import bundle_folder
from eagle_runtime.opening.loading import open_bundle

BACKENDS = ("cpu", NATIVE)
TURNS, EACH = 6, 2  # passes of a backend: TURNS times EACH, after one that is not counted


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds of the fastest pass of a graph over `rows` rows after `context`, by backend."""

    graph: str
    context: int
    rows: int
    fastest: dict[str, float]


def measure(bundle: Path, contexts: Sequence[int], counts: Sequence[int]) -> Iterator[Measured]:
    """Yields the times for each context and number of rows. Raises BackendError, BundleError."""
    size = max(contexts) + max(counts)
    with contextlib.ExitStack() as stack:
        sessions = {}
        for name in BACKENDS:
            opened = open_bundle(bundle_folder(bundle), name, size, 1, "once")
            stack.callback(opened.engines.close)
            sessions[name] = opened.engines.sessions
        targets = {name: Target(both[0], size) for name, both in sessions.items()}
        heads = {name: Head(both[1], size, max(counts)) for name, both in sessions.items() if len(both) > 1}
        width = 0 if opened.manifest.head is None else opened.manifest.head.hidden_size
        for context in contexts:
            for target in targets.values():
                target.cache.pretend(context)
            for rows in counts:
                chain = Tree(np.arange(rows), np.arange(-1, rows - 1), np.zeros(rows, np.float32))
                verify = {name: partial(target.verify, chain) for name, target in targets.items()}
                yield Measured("target", context, rows, _fastest(verify))
                if heads:
                    levels = {name: _level(head, width, context, rows) for name, head in heads.items()}
                    yield Measured("head", context, rows, _fastest(levels))


def _level(head: Head, width: int, context: int, rows: int) -> Callable[[], object]:
    """A pass of the head over a level of `rows` nodes below the root's children, `context` rows being committed."""
    head.cache.pretend(context)
    tokens, hidden = np.arange(rows), np.zeros((rows, width), np.float32)

    def grow() -> None:
        with Scratch(head) as scratch:
            scratch.feed(tokens, hidden, np.full(rows, -1))

    return grow


def _fastest(passes: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of the fastest of each, which take turns."""
    seconds: dict[str, float] = {}
    for _ in range(TURNS):
        for name, one in passes.items():
            seconds[name] = min(seconds.get(name, np.inf), *_passes(one))
    return {name: 1e3 * value for name, value in seconds.items()}


def _passes(one: Callable[[], object]) -> Iterator[float]:
    one()
    for _ in range(EACH):
        started = time.thread_time()
        one()
        yield time.thread_time() - started


def _parser() -> Parser:
    says = "Times passes with and without native kernels."
    parser = Parser(prog="python -m eagle_tools.native_passes", description=says)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--contexts", action=Listed, of=int, default=[128], metavar="128,1024", help="committed tokens")
    parser.add_argument("--rows", action=Listed, of=int, default=[1, 4, 8, 16], metavar="1,4,8", help="of a pass")
    return parser


def run(args: argparse.Namespace) -> None:
    """Prints a line for each context and number of rows."""
    for each in measure(args.bundle, args.contexts, args.rows):
        times = ", ".join(f"{name} {value:.2f} ms" for name, value in each.fastest.items())
        print(f"{each.graph}, context {each.context}, rows {each.rows}: {times}", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the program."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


if __name__ == "__main__":
    raise SystemExit(main())
