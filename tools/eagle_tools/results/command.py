"""python -m eagle_tools.results: the command."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Listed, Parser
from eagle_tools.check_command import run_check
from eagle_tools.results.pairs import NAMES

ROOT = Path(__file__).resolve().parents[3]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if an output is not that of plain decoding, 2 for wrong input."""
    command = shlex.join(["python", "-m", "eagle_tools.results", *(sys.argv[1:] if argv is None else argv)])
    stopped = "interrupted; finished stages are kept, run it again to continue"
    return run_check(_parser(), argv, lambda args: run(args, command), "cpu,export,bench", stopped)


def run(args: argparse.Namespace, command: str) -> bool:
    """Make missing bundles, measure unfinished stages, write the page; returns whether all outputs were lossless.

    command: the command line, for the page."""
    from eagle_tools.bench.cli import check_output, progress, write_text
    from eagle_tools.bench.machine import physical_cores
    from eagle_tools.peers.engine import FORMATS, missing
    from eagle_tools.questions import read_sets
    from eagle_tools.results.pairs import MAKERS, QUESTIONS, drop_older
    from eagle_tools.results.stages import Sizes, finish, kept, stage_names, stages_of
    from eagle_tools.results.tables import results_page

    if min(args.count, args.sweep_count) < 1:
        raise RequestError("--count and --sweep-count must be 1 or more")
    names = [name for pair in args.pairs for name in stage_names(pair)]
    if not any(args.only in name for name in names):
        raise RequestError(f"no stage has {args.only!r} in its name; there is {', '.join(names)}")
    check_output(args.output)
    rows = args.work / "rows"
    try:
        rows.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{rows} cannot be made ({error.strerror}); give another --work") from None
    threads = physical_cores() if args.threads is None else args.threads
    sizes = Sizes(args.count, args.sweep_count, args.max_new_tokens, threads)
    questions = read_sets(args.prompts or [QUESTIONS], args.count)
    peers = tuple(form for form in FORMATS if missing(form.engine) is None)
    finished = {}
    with progress() as reporter:
        drop_older(args.work, reporter.say)
        pairs = [MAKERS[name](args.work, reporter.say) for name in args.pairs]
        wanted = [s for p in pairs for s in stages_of(p, args.work, questions, peers, sizes, reporter.say, args.only)]
        wanted.sort(key=lambda stage: kept(stage, rows) is None)  # kept stages come first
        for number, stage in enumerate(wanted, 1):
            reporter.say(f"{stage.name}, stage {number} of {len(wanted)}")
            finished[stage.name] = finish(stage, rows, reporter)
            # Written after each stage, so that an interrupted run leaves a page of those that finished.
            begun = [pair for pair in pairs if any(s.pair == pair.name for s in wanted[:number])]
            write_text(args.output, results_page(begun, finished, command))
    print(f"wrote {args.output}")
    differing = [sentence for stage in finished.values() for sentence in stage.differing]
    for sentence in differing:
        print(f"eagle_tools.results: {sentence}", file=sys.stderr)
    return not differing


def _parser() -> Parser:
    parser = Parser(
        prog="eagle_tools.results",
        description="Measure docs/results.md. The grown pair takes hours, and 24 GB of disk. Other engines run "
        "too where they are installed (extra peers).",
    )
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "results.md", metavar="FILE")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".bench", metavar="FOLDER", help="folder of pairs, bundles, rows"
    )
    parser.add_argument("--pairs", action=Listed, among=NAMES, default=list(NAMES), metavar="A,B", help="default: all")
    parser.add_argument("--only", default="", metavar="TEXT", help="stages so named, like int8 or grown-engines")
    parser.add_argument(
        "--prompts",
        action="append",
        type=Path,
        metavar="FILE",
        help="question sets, as of eagle-bench (default: tools/smollm2/heldout.jsonl)",
    )
    parser.add_argument("--count", type=int, default=8, metavar="N", help="questions of each set (default 8)")
    parser.add_argument(
        "--sweep-count", type=int, default=3, metavar="N", help="questions of a sweep of tree sizes (default 3)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="per prompt (default 64)")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of a forward pass, PyTorch's too (default: cores)"
    )
    return parser
