"""Progress of a long run on stderr: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time

TERMINAL_S, FILE_S = 1.0, 60.0  # seconds between two reports


def say(message: str) -> None:
    """Report something in a line of its own."""
    print(f"eagle-train: {message}", file=sys.stderr, flush=True)


class Progress:
    """Counts answers and their tokens."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self.begin(0, 0)

    def begin(self, total: int, done: int) -> None:
        """Begin to count. total: answers of the run. done: those that are there already."""
        self._total, self._done, self._tokens = total, done, 0
        self._start = self._last = time.monotonic()

    def advance(self, tokens: int) -> None:
        """Count an answer of that many tokens, and report if it is time."""
        self._done += 1
        self._tokens += tokens
        now = time.monotonic()
        if now - self._last >= (TERMINAL_S if self._terminal else FILE_S):
            self._last = now
            self._report("\r" if self._terminal else "", "" if self._terminal else "\n")

    def finish(self) -> None:
        """Report for the last time."""
        self._report("\r" if self._terminal else "", "\n")

    def _report(self, before: str, after: str) -> None:
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        line = f"eagle-train: {self._done} of {self._total} answers, {self._tokens} tokens, {rate:.0f} tokens/s"
        print(f"{before}{line}", end=after, file=sys.stderr, flush=True)
