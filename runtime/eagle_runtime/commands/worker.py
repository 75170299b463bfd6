"""The worker's command line: the pipes are made private, the bundle is loaded, requests are served."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from eagle_runtime.app.eagle_model import EagleModel
from eagle_runtime.base.errors import MemoryLimitError
from eagle_runtime.commands.command import Parser, add_model_options, model_options, print_line, run_command, size
from eagle_runtime.commands.worker_pipes import Writer, end_with_parent, private_pipes, read_lines
from eagle_runtime.commands.worker_service import Service
from eagle_runtime.opening.draft_bundle import folders_of
from eagle_runtime.opening.hub_bundle import bundle_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    return run_command(_parser(), argv, run, extra="cpu", interrupted="interrupted")


def run(args: argparse.Namespace) -> None:
    """Serve until the end of standard input. Raises the errors of loading."""
    source, sink = private_pipes()
    end_with_parent()
    budget = None
    if args.memory_limit is not None:
        budget = _budget([bundle_folder(args.bundle), *folders_of(args.draft_bundle)], args.memory_limit)
    with EagleModel.load(kv_budget=budget, **model_options(args)) as model:
        if model.notice is not None:
            print_line("eagle-run", model.notice)
        service = Service(model, Writer(sink), args.memory_limit)
        service.run(read_lines(source))


def _budget(bundles: Sequence[Path], limit: int) -> int:
    """Bytes that are left for keys and values. Raises MemoryLimitError before anything is loaded."""
    weights = sum(path.stat().st_size for bundle in bundles for path in bundle.rglob("*") if path.is_file())
    if weights >= limit:
        raise MemoryLimitError(
            f"the files of {' and '.join(map(str, bundles))} have {weights / 1e6:.1f} MB, but --memory-limit is "
            f"{limit / 1e6:.1f} MB for weights, keys and values; raise it, or export in a smaller precision"
        )
    return limit - weights


def _parser() -> Parser:
    parser = Parser(prog="eagle-run --worker", description="Serve lines of JSON on standard input and output.")
    add_model_options(parser)
    parser.add_argument("--memory-limit", type=size, metavar="4GB", help="for weights, keys and values together")
    return parser
