"""eagle-run --worker: a model in a process of its own, which takes and answers lines of JSON (docs/worker.md)."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of a worker process, also of a frozen application's own executable. argv: BUNDLE and options; None
    takes those of the process. Returns the exit status: 0 at the end of standard input, 2 after an error."""
    from eagle_runtime.commands.worker import command

    return command.main(argv)
