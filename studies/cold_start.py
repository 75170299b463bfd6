"""How much speed cost-aware trees lose on a new machine: generations that begin with costs estimated from the graphs'
shapes, with measured costs, and plain decoding, by turns.

    python -m studies cold_start BUNDLE --prompts FILE.jsonl"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from eagle_runtime import EagleModel, Result
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Parser
from eagle_runtime.drafting.methods import METHODS
from eagle_tools.markdown import markdown_table
from eagle_tools.turns import by_turns, generation, starting_order
from studies.harness import add_prompts, prompts_of

SIZED = [method.name for method in METHODS if method.trees[0].kinds[:1] == ("cost-aware",)]
NAMES = ("plain", "measured", "shapes")  # plain decoding, and the two kinds of costs to begin with


def compare(
    bundle: Path, prompts: Sequence[str | Sequence[int]], threads: int | None, method: str | None, new_tokens: int
) -> list[dict[str, Result]]:
    """Returns the results of each prompt by name; on the first prompt each model generates for the first time. The
    learned costs are discarded. Raises RequestError where outputs differ."""
    compared = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(cache_in(stack.enter_context(tempfile.TemporaryDirectory())))
        models = {name: stack.enter_context(EagleModel.load(bundle, backend="cpu", threads=threads)) for name in NAMES}
        models["measured"].costs(measure_again=True)
        for number, prompt in enumerate(prompts):
            names = [NAMES[index] for index in starting_order(len(NAMES), number)]
            methods = {name: "vanilla" if name == "plain" else method for name in names}
            settings = {"max_new_tokens": new_tokens, "ignore_eos": True}
            runs = [generation(models[name], prompt, method=methods[name], **settings) for name in names]
            compared.append({names[index]: result for index, result in by_turns(runs)})
            if len({result.token_ids for result in compared[-1].values()}) > 1:
                raise RequestError(f"prompt {number}: output with drafts is not that of plain decoding")
    return compared


def table(compared: Sequence[dict[str, Result]]) -> str:
    """Returns a Markdown table of medians over prompts; a ratio is the median of the ratios on single prompts."""
    titles = ["begins with", "tok/s", "x measured", "x measured, first third", "first token of all, ms"]
    lines = []
    for name in NAMES:
        speeds = [results[name].usage.tokens_per_s for results in compared]
        ratios = [results[name].usage.tokens_per_s / results["measured"].usage.tokens_per_s for results in compared]
        cells = [f"{median(speeds):.0f}", f"{median(ratios):.2f}", f"{median(ratios[: -(-len(ratios) // 3)]):.2f}"]
        lines.append([name, *cells, f"{1e3 * compared[0][name].usage.prefill_s:.1f}"])
    return markdown_table(titles, lines)


@contextlib.contextmanager
def cache_in(folder: str) -> Iterator[None]:
    """Within the block `folder` replaces the user's cache folder."""
    before = os.environ.get("EAGLE_CACHE")
    os.environ["EAGLE_CACHE"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["EAGLE_CACHE"]
        else:
            os.environ["EAGLE_CACHE"] = before


def add_options(parser: Parser) -> None:
    """What the table is made of."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    add_prompts(parser)
    parser.add_argument("--method", choices=SIZED, help="default: the bundle's")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="per prompt (default 96)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a pass (default: the engine's choice)")


def report(args: argparse.Namespace) -> str:
    """Returns the table."""
    prompts = prompts_of(args.prompts, args.count)
    return table(compare(args.bundle, prompts, args.threads, args.method, args.max_new_tokens))
