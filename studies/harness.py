"""What all studies share: their names, common options, errors of one line.

A study is a module of this folder with `add_options(parser)` and `report(args)`, which returns what is printed. Its
docstring is its help.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Parser, run_command
from eagle_tools.questions import read_questions

NAMES = (
    "block_ablation",
    "constants",
    "contexts",
    "experts",
    "kernels",
    "one_call",
    "tool_calls",
    "tune_heads",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: the name of a study and its options; what follows -- is args.rest. Returns the exit status: 0, or 2
    after an error in the input."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or given[0] not in NAMES:
        print(f"studies: name one of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    name, *options = given
    end = options.index("--") if "--" in options else len(options)
    study = importlib.import_module(f"studies.{name}")
    parser = Parser(prog=f"python -m studies {name}", description=(study.__doc__ or "").splitlines()[0])
    parser.set_defaults(rest=options[end + 1 :])
    study.add_options(parser)
    return run_command(
        parser,
        options[:end],
        lambda args: print(study.report(args), end=""),
        extra="dev",
        interrupted="interrupted; nothing was reported",
    )


def add_prompts(parser: Parser) -> None:
    """Add --prompts and --count, which `prompts_of` reads."""
    parser.add_argument("--prompts", type=Path, required=True, metavar="FILE", help='JSONL with "turns" per line')
    parser.add_argument("--count", type=int, metavar="N", help="take the first N questions (default: all)")


def prompts_of(path: Path, count: int | None) -> list[str]:
    """Returns the first turns of a question file. Raises RequestError for a file that is no such set."""
    return [question.turns[0] for question in read_questions(path, count)]


def positive(*numbers: int, names: str) -> None:
    """Raises RequestError unless all numbers are 1 or more."""
    if min(numbers) < 1:
        raise RequestError(f"{names} must be 1 or more")
