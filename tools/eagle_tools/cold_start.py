"""What it costs to know nothing of a machine: generations that begin with costs made of shapes, beside generations that
begin with measured ones and beside plain decoding, in turns."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime import EagleModel
from eagle_runtime.command import Parser, run_command
from eagle_runtime.drafting.choose import Method
from eagle_runtime.errors import RequestError
from eagle_tools.bench.contenders import by_turns
from eagle_tools.questions import read_questions

NAMES = ("plain", "measured", "shapes")  # what a generation begins with


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. first_s: seconds until the first token."""

    name: str
    tokens_per_s: float
    first_s: float
    token_ids: tuple[int, ...]


def compare(
    bundle: Path, prompts: Sequence[str | Sequence[int]], threads: int | None, method: Method | None, new_tokens: int
) -> list[dict[str, Run]]:
    """Of every prompt the runs by name; those of the first prompt are each model's first. What is learned is kept
    nowhere. Raises RequestError where outputs differ."""
    found = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(cache_in(stack.enter_context(tempfile.TemporaryDirectory())))
        models = {name: stack.enter_context(EagleModel.load(bundle, backend="cpu", threads=threads)) for name in NAMES}
        models["measured"].costs(measure_again=True)
        for number, prompt in enumerate(prompts):
            order = NAMES[number % len(NAMES) :] + NAMES[: number % len(NAMES)]
            runs = [generate(name, models[name], prompt, method, new_tokens) for name in order]
            found.append({run.name: run for _, run in by_turns(runs)})
            if len({run.token_ids for run in found[-1].values()}) > 1:
                raise RequestError(f"prompt {number}: output with drafts is not that of plain decoding")
    return found


def generate(
    name: str, model: EagleModel, prompt: str | Sequence[int], method: Method | None, new_tokens: int
) -> Generator[int, None, Run]:
    """One generation, which others may take turns with between its pieces."""
    asked: Method | None = "vanilla" if name == "plain" else method
    count = 0
    for piece in model.stream(prompt, method=asked, max_new_tokens=new_tokens, ignore_eos=True):
        count += len(piece.token_ids)
        if piece.result is not None:
            stats = piece.result.stats
            return Run(name, stats.tokens_per_s, stats.prefill_s, piece.result.token_ids)
        yield count
    raise AssertionError("a stream ends with a result")


def table(found: Sequence[dict[str, Run]]) -> str:
    """Markdown: medians over prompts, ratios being medians of single prompts' ratios."""
    lines = [
        "| begins with | tok/s | x measured | x measured, first third | first token of all, ms |",
        "|---" * 5 + "|",
    ]
    for name in NAMES:
        ratios = [runs[name].tokens_per_s / runs["measured"].tokens_per_s for runs in found]
        cells = [
            f"{statistics.median(runs[name].tokens_per_s for runs in found):.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{statistics.median(ratios[: -(-len(ratios) // 3)]):.2f}",
            f"{1e3 * found[0][name].first_s:.1f}",
        ]
        lines.append("| " + " | ".join([name, *cells]) + " |")
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Within the block `folder` takes the place of the user's cache folder."""
    before = os.environ.get("EAGLE_CACHE")
    os.environ["EAGLE_CACHE"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["EAGLE_CACHE"]
        else:
            os.environ["EAGLE_CACHE"] = before


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m eagle_tools.cold_start", description=__doc__)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument("--count", type=int, metavar="N", help="take the first N questions (default: all)")
    parser.add_argument("--method", choices=["eagle", "eagle+lookup", "lookup"], help="default: the bundle's")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="per prompt (default 96)")
    parser.add_argument("--threads", type=int, metavar="N", help="of one pass (default: the engine's choice)")

    def run(args: argparse.Namespace) -> None:
        prompts = [question.turns[0] for question in read_questions(args.prompts, args.count)]
        found = compare(args.bundle, prompts, args.threads, args.method, args.max_new_tokens)
        print(table(found), end="")

    return run_command(parser, argv, run, extra="bench", interrupted="interrupted; nothing was measured")


if __name__ == "__main__":
    raise SystemExit(main())
