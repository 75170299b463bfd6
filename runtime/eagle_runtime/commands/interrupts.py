"""Signals that stop a program: the first unwinds it, so that temporary files are removed; a later one ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from types import FrameType

# Ctrl-C, kill, a closed terminal (which Windows does not signal).
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
CLEANUP_S = 2.0  # seconds that unwinding has before the same signal ends it: a terminal and a parent may both send one


class Interrupted(BaseException):
    """Raised in the main thread by a signal to stop, with its number. It is not an Exception, so that no code handles
    it as a failure."""


@contextlib.contextmanager
def handled_interrupts(but_for: Collection[int] = ()) -> Iterator[None]:
    """Within the block the first signal raises Interrupted(number) in the main thread, after the forward pass that is
    running. The same signal, CLEANUP_S later or more, ends the process with its status. Signals that were ignored
    before, as under nohup, stay ignored. but_for: signals whose handlers stay."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS if number not in but_for}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    stopped: int | None = None
    since = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped, since
        if stopped is None:
            stopped, since = number, time.monotonic()
            raise Interrupted(number)
        if number == stopped and time.monotonic() > since + CLEANUP_S:
            os._exit(128 + number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except Exception:  # NumPy's tofile, for one, replaces Interrupted by a TypeError of its own
        if stopped is None:
            raise
        raise Interrupted(stopped) from None
    finally:
        for number in ours:  # after a stop the process is ending, and ignores signals until it has ended
            signal.signal(number, before[number] if stopped is None else signal.SIG_IGN)
