"""What the terminal shows, and what is typed. Without a terminal there are no prompts and no escape sequences."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from types import FrameType

from eagle_runtime.commands.command import one_line

PROMPT, MORE = "> ", ". "
QUOTES = '"""'
# Shown as they are, though str.isprintable() says no: joiners of emoji and of Persian, places where a word may break
# or may not, and, as a category, spaces of all widths.
HARMLESS = "\n\t\u00ad\u200b\u200c\u200d\u2060"
SAME_S = 0.1  # seconds within which signals are one
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def shown(text: str) -> str:
    """Returns a model's text with control characters and marks of direction escaped, but for line ends and tabs."""
    return "".join(c if _is_harmless(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in HARMLESS or unicodedata.category(char) == "Zs"


def at_terminal() -> bool:
    """Whether somebody types, and reads what is printed."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))  # None: it was closed


class Screen:
    """Standard input, output and error. interactive: whether questions are typed at a terminal."""

    def __init__(self) -> None:
        self.interactive = at_terminal()
        self._dims = self.interactive and _escapes_work()
        self._column = 0  # of the text that is shown
        self._thinks = False  # whether reasoning was shown last
        if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no UTF-8 become an error of the question
            sys.stdin.reconfigure(encoding=None if self.interactive else "utf-8", errors="surrogateescape")
        if self.interactive:
            with contextlib.suppress(ImportError):  # Windows edits lines by itself
                import readline  # noqa: F401  (input() uses it from now on)

    def read(self, prefill: str = "") -> str | None:
        """Returns a line, or the lines between two \"\"\" joined; None at the end of input. prefill: what the line
        holds at first, where the terminal can. Raises KeyboardInterrupt."""
        line = self._line(PROMPT, prefill)
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        text = line.lstrip().removeprefix(QUOTES)
        while not text.rstrip().endswith(QUOTES):
            more = self._line(MORE, "")
            if more is None:
                return text
            text += "\n" + more
        return text.rstrip().removesuffix(QUOTES).strip("\n")

    def think(self, text: str) -> None:
        """Show a piece of the model's reasoning, dim; nothing without a terminal."""
        if not self.interactive:
            return
        sys.stdout.write(f"{DIM}{shown(text)}{PLAIN}" if self._dims else shown(text))
        sys.stdout.flush()
        self._thinks = self._thinks or bool(text)

    def say(self, text: str) -> None:
        """Show a piece of the model's text; what it thought before stands in lines of its own."""
        if text and self._thinks:
            sys.stdout.write("\n\n")
            self._thinks = False
        sys.stdout.write(shown(text))
        sys.stdout.flush()
        if text:
            self._column = len(text) - text.rfind("\n") - 1

    def end_line(self) -> None:
        """Go to the beginning of a line."""
        if self._column or self._thinks:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._column, self._thinks = 0, False

    def note(self, text: str) -> None:
        """Show a line that is not the model's: dim, or on standard error where no terminal is."""
        if not self.interactive:
            print(one_line(text), file=sys.stderr)
        elif self._dims:
            print(f"{DIM}{one_line(text)}{PLAIN}", flush=True)
        else:
            print(one_line(text), flush=True)

    def _line(self, prompt: str, prefill: str) -> str | None:
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        with _prefilled(prefill):
            try:
                return input(prompt)
            except EOFError:
                print()
                return None


class Interrupt:
    """Ctrl-C, where the program is to go on: it calls `stop` where there is one, and else raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._stop: Callable[[], None] | None = None
        self._latest = 0.0

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Within the block this object handles the signal."""
        before = signal.signal(signal.SIGINT, self._pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def calls(self, stop: Callable[[], None]) -> Iterator[None]:
        """Within the block the signal calls `stop`."""
        self._stop = stop
        try:
            yield
        finally:
            self._stop = None

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now < self._latest + SAME_S:  # the same signal, sent again (commands.interrupts)
            return
        self._latest = now
        if self._stop is None:
            raise KeyboardInterrupt
        self._stop()


@contextlib.contextmanager
def _prefilled(text: str) -> Iterator[None]:
    readline = sys.modules.get("readline") if text else None
    if readline is None:
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(text))
    try:
        yield
    finally:
        readline.set_startup_hook()


def _escapes_work() -> bool:
    """Whether a terminal takes escape sequences, and its user wants them (no-color.org)."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return sys.platform != "win32" or "WT_SESSION" in os.environ
