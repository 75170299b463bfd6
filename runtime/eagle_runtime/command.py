"""What all commands share: one-line errors, exit statuses, and a clean end when told to stop."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from eagle_runtime.errors import EagleError, EagleWarning

# What ends a program politely: Ctrl-C, kill, a closed terminal (which Windows does not signal).
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument as all other errors are: in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def run_command(
    parser: Parser,
    argv: Sequence[str] | None,
    run: Callable[[argparse.Namespace], None],
    extra: str,
    interrupted: str,
) -> int:
    """Parse and run; returns the exit status: 0, 2 after an error that is the input's, 130 or 143 when stopped.

    extra: of this distribution, that brings what `run` imports. interrupted: what to say after a stop."""
    args = parser.parse_args(argv)
    try:
        with _clean_stops(), _plain_warnings(parser.prog):
            run(args)
    except EagleError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("eagle_"):
            raise
        print(f"{parser.prog}: needs {error.name!r}; pip install 'eagle-edge[{extra}]'", file=sys.stderr)
        return 2
    except _Stopped as stop:
        print(f"{parser.prog}: {interrupted}", file=sys.stderr)
        return 128 + int(stop.args[0])
    return 0


@contextlib.contextmanager
def _plain_warnings(program: str) -> Iterator[None]:
    """Within the block our own warnings take one line, as errors do, and no line of source code."""
    with warnings.catch_warnings():
        warnings.simplefilter("default", EagleWarning)
        show = warnings.showwarning

        def show_plainly(message: Any, category: type[Warning], *rest: Any, **more: Any) -> None:
            if issubclass(category, EagleWarning):
                print(f"{program}: warning: {message}", file=sys.stderr)
            else:
                show(message, category, *rest, **more)

        warnings.showwarning = show_plainly
        yield


class _Stopped(BaseException):
    """A signal to stop, raised where the program stands. Not an Exception, so nothing takes it for a failure."""


@contextlib.contextmanager
def _clean_stops() -> Iterator[None]:
    """Within the block Ctrl-C and a polite kill unwind alike, so that temporary files go too. Only the first counts:
    another one would break off the clearing away. What is ignored already, as under nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's to handle
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        for other in ours:
            signal.signal(other, signal.SIG_IGN)
        raise _Stopped(number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        if not stopped:  # else the process is ending, and stays deaf until it has
            for number in ours:
                signal.signal(number, before[number])
