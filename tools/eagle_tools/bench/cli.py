"""eagle-bench: the command."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import replacing
from eagle_runtime.commands.command import Listed, Parser
from eagle_tools.check_command import run_check
from eagle_tools.peers.engine import FORMATS, Format, formats_of

if TYPE_CHECKING:
    from eagle_tools.bench.seeds import SeedsTable

MODES = ("eager", "compiled", "prompt-lookup")
CHARTS = (".png", ".svg", ".pdf")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if an output is not that of plain decoding, 2 for wrong input."""
    stopped = "interrupted; finished rows are in the --output file, if one was given"
    return run_check(_parser(), argv, run, extra="bench", interrupted=stopped)


def run(args: argparse.Namespace) -> bool:
    """Measure what the arguments name, print and write the results; returns whether all outputs were lossless."""
    from eagle_tools.bench.machine import physical_cores
    from eagle_tools.bench.peer_rows import passes_table
    from eagle_tools.bench.plan import Plan
    from eagle_tools.bench.run import execute
    from eagle_tools.bench.summary import as_json, category_markdown, markdown
    from eagle_tools.questions import read_sets

    for path in (args.output, args.markdown, args.html, args.chart):
        check_output(path)
    if args.chart is not None:
        if not args.table:
            raise RequestError("--chart draws the table of --table seeds; give --table seeds too")
        if args.chart.suffix not in CHARTS:
            raise RequestError(f"{args.chart} cannot be drawn; name a file that ends in {', '.join(CHARTS)}")
        import matplotlib  # noqa: F401  (a missing package is reported before the work)
    if args.prompts is None:
        raise RequestError("there is nothing to decode; give --prompts")
    must, wanted = _methods(args)
    table = _table(args) if args.table else None
    peers = _peers(args)
    plan = Plan(
        bundles=table.bundles(must) if table else tuple((Path(bundle), must) for bundle in args.bundles),
        questions=tuple(read_sets(args.prompts, args.count)),
        temperatures=tuple(args.temperature or ((0.0, 1.0) if args.trees or args.table else (0.0,))),
        max_new_tokens=args.max_new_tokens,
        wanted=wanted,
        backend=args.backend,
        threads=physical_cores() if args.threads is None else args.threads,
        context=args.context,
        seed=args.seed,
        pytorch=args.vs_pytorch,
        modes=_modes(args, bool(peers)),
        assistant=args.assistant,
        peers=peers,
        peer_folder=args.peer_folder,
        peer_rows=args.peer_rows,
        draft_bundles=tuple(args.draft_bundle or ()),
        datastore=args.datastore,
        rows=args.output,
        record=args.html is not None,
    )
    with progress() as reporter:
        outcome = execute(plan, reporter)
    facts = [*outcome.facts, "prompts of " + ", ".join(path.name for path in args.prompts)]
    text = "".join(f"- {line}\n" for line in (*facts, *outcome.notes))
    text += "\n" + markdown(outcome.summaries, outcome.rows)
    text += "\n" + table.markdown(outcome.rows) if table else category_markdown(outcome.rows)
    text += "\n" + passes_table(outcome.passes) if outcome.passes else ""
    if not args.json:
        print(text, end="")
    if args.markdown is not None:
        write_text(args.markdown, text)
    if table and args.chart is not None:
        table.draw(outcome.rows, args.chart)
    if args.html is not None:
        from eagle_tools.bench.page import page

        write_text(args.html, page(outcome.summaries, facts, [*outcome.differing, *outcome.notes], outcome.cycles))
    for sentence in outcome.differing:
        print(f"eagle-bench: {sentence}", file=sys.stderr)
    if args.json:
        report: dict[str, object] = {
            "facts": facts,
            "notes": outcome.notes,
            "differing": outcome.differing,
            "passes": outcome.passes,
        }
        report |= {"lossless": not outcome.differing, "setups": [as_json(s) for s in outcome.summaries]}
        print(json.dumps(report if table is None else {**report, **table.as_json(outcome.rows)}))
    return not outcome.differing


@contextlib.contextmanager
def progress() -> Iterator[Any]:
    """Yields a Reporter that draws bars on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from eagle_tools.bench.run import Reporter

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[now]}"))
    console = Console(stderr=True)
    quiet = not sys.stderr.isatty()
    with Progress(TextColumn("{task.description}"), *columns, console=console, disable=quiet, transient=True) as bars:

        class Bars(Reporter):
            task: Any = None

            def say(self, line: str) -> None:
                print(line, file=sys.stderr)

            def expect(self, what: str, count: int) -> None:
                if self.task is not None:
                    bars.remove_task(self.task)
                self.task = bars.add_task(what, total=count, now="")

            def step(self, what: str) -> None:
                bars.update(self.task, advance=1, now=what)

        yield Bars()


def check_output(path: Path | None) -> None:
    """Raises RequestError, before any work, for a file that cannot be written."""
    if path is None:
        return
    if path.is_dir():
        raise RequestError(f"{path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise RequestError(f"{path.absolute().parent} does not exist; create it first")


def write_text(path: Path, text: str) -> None:
    """Write a file that is the old one or the complete new one at any time; raises RequestError."""
    try:
        with replacing(path) as new:
            new.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"{path} cannot be written ({error.strerror})") from None


def _methods(args: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the methods that every bundle must run, and those that it runs if it can."""
    from eagle_runtime.drafting.methods import NAMES, TREES
    from eagle_tools.bench.methods import VANILLA, offered, sweep

    must = tuple(args.methods) if args.methods is not None else (VANILLA,)
    wanted: list[str] = []
    if args.methods is None and not (args.trees or args.sweep or args.table):
        wanted += [name for name in offered() if name in NAMES]
    if args.trees:
        wanted += TREES
    if args.sweep:
        wanted += sweep()
    return must, tuple(name for name in dict.fromkeys(wanted) if name not in must)


def _table(args: argparse.Namespace) -> SeedsTable:
    from eagle_tools.bench.seeds import open_table

    return open_table(
        [Path(bundle) for bundle in args.bundles], args.draft_bundle is not None, args.datastore is not None
    )


def _modes(args: argparse.Namespace, with_peers: bool) -> tuple[str, ...]:
    usual = ("eager",) if with_peers else MODES
    return tuple(args.pytorch_methods or (*usual, *(("assisted",) if args.assistant else ())))


def _peers(args: argparse.Namespace) -> tuple[Format, ...]:
    """Returns the formats of other engines to compare with. Raises RequestError before it says which are left out."""
    if not (args.peer_formats is not None or args.peers or args.peer_rows):
        return ()
    from eagle_tools.peers.source import open_source

    if args.vs_pytorch is None:
        raise RequestError("peers run the weights that the bundles were made from; give --vs-pytorch TARGET too")
    open_source(args.vs_pytorch)
    return formats_of(args.peer_formats, FORMATS, "eagle-bench")


def _parser() -> Parser:
    parser = Parser(
        prog="eagle-bench",
        description="Compare decoding methods on a question set: tokens per second with confidence intervals, "
        "speed-up, tau, shares of the time. Every output is checked to be that of plain decoding.",
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folders written by eagle-export, of one target")
    parser.add_argument(
        "--prompts",
        type=Path,
        action="append",
        metavar="FILE",
        help='JSONL with "turns" per line, as Spec-Bench has, or a folder of such sets; may be given several times',
    )
    parser.add_argument("--count", type=int, metavar="N", help="take the first N questions of each set (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="per prompt (default 128)")
    parser.add_argument(
        "--methods",
        action=Listed,
        metavar="A,B",
        help="vanilla, eagle, dynamic, 32/4/8, ... (default: all that need no tree named)",
    )
    parser.add_argument(
        "--temperature",
        action=Listed,
        nargs="+",
        of=float,
        metavar="T,T",
        help="default 0; with --trees, --table 0 and 1",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random numbers (default 0)")
    parser.add_argument("--trees", action="store_true", help="add all tree kinds")
    parser.add_argument("--sweep", action="store_true", help="add dynamic trees of many sizes")
    parser.add_argument("--table", choices=["seeds"], help="add the methods that EAGLE's papers compare, in one table")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--backend", default="auto", help="engine to run on (default auto: the best that is here)")
    engine.add_argument("--threads", type=int, metavar="N", help="threads, PyTorch's too (default: cores)")
    engine.add_argument("--context", type=int, metavar="N", help="tokens of prompt and output to make room for")
    engine.add_argument(
        "--draft-bundle",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="bundle of a smaller model that drafts; may be repeated",
    )
    engine.add_argument("--datastore", type=Path, metavar="FILE", help="text that is searched for n-gram matches too")
    pytorch = parser.add_argument_group("comparison with PyTorch")
    pytorch.add_argument("--vs-pytorch", type=Path, metavar="TARGET", help="Hugging Face folder of the same target")
    pytorch.add_argument("--pytorch-methods", action=Listed, metavar="A,B", help=f"default {','.join(MODES)}")
    pytorch.add_argument("--assistant", type=Path, metavar="FOLDER", help="small model for PyTorch's assisted mode")
    peers = parser.add_argument_group("comparison with other engines", "of the weights in --vs-pytorch's folder")
    peers.add_argument("--peers", action="store_true", help="run those that are here, in all formats and modes")
    peers.add_argument(
        "--peer-formats", action=Listed, metavar="A,B", help="only these, as in llama.cpp/q4_0,onnxruntime-genai/int4"
    )
    peers.add_argument("--peer-rows", action="store_true", help="time forward passes of 1 to 32 rows too, of all")
    peers.add_argument("--peer-folder", type=Path, metavar="F", help="keep converted weights there (default: a cache)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write a JSON line per method, prompt by prompt"
    )
    output.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    output.add_argument("--html", type=Path, metavar="FILE", help="write one page: plots and a viewer of the cycles")
    output.add_argument("--chart", type=Path, metavar="FILE", help="with --table: draw it, as .png, .svg or .pdf")
    output.add_argument("--json", action="store_true", help="print one JSON object at the end")
    return parser
