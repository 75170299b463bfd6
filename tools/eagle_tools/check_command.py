"""Commands whose exit status says whether a check passed."""

import argparse
from collections.abc import Callable, Sequence

from eagle_runtime.commands.command import Parser, run_command


def run_check(
    parser: Parser,
    argv: Sequence[str] | None,
    check: Callable[[argparse.Namespace], bool],
    extra: str,
    interrupted: str,
) -> int:
    """Parse and check; returns the exit status: 0 if the check passed, 1 if not, else as run_command."""
    results: list[bool] = []
    status = run_command(parser, argv, lambda args: results.append(check(args)), extra=extra, interrupted=interrupted)
    return status or (0 if results == [True] else 1)
