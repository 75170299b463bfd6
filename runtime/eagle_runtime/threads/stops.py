"""Being told to stop: the first signal unwinds the program, so that temporary files go; the second ends it.

Python handles signals between two steps of its own. A pass of an engine that hangs never gets there, so the second is
counted where the interpreter's own handler notes it: a thread reads the numbers as they come, and may end the process
while the pass hangs (engines let other threads run meanwhile).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

# What ends a program politely: Ctrl-C, kill, a closed terminal (which Windows does not signal).
STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
SAME_S = 0.3  # seconds in which signals count as one: a terminal and a program in between may both send it
CLEARING_S = 2.0  # seconds after the first that unwinding may take, however soon a second comes


class Stopped(BaseException):
    """A signal to stop, raised where the program stands. Not an Exception, so nothing takes it for a failure."""


@contextlib.contextmanager
def clean_stops() -> Iterator[None]:
    """Within the block the first signal raises Stopped(its number) in the main thread; another one that comes after
    SAME_S ends the process CLEARING_S after the first, or at once if that is over, with the status of the signal. What
    is ignored already, as under nohup, stays so."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's to handle
        yield
        return
    before = {number: signal.getsignal(number) for number in STOPS}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = True
            raise Stopped(number)

    with _noted(frozenset(ours)):
        for number in ours:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number in ours:  # after a stop the process is ending, and stays deaf until it has
                signal.signal(number, signal.SIG_IGN if stopped else before[number])


@contextlib.contextmanager
def _noted(numbers: frozenset[int]) -> Iterator[None]:
    """Within the block a thread watches the signals that come."""
    receive, send, close = _channel()
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(receive, numbers, done), name="eagle-stops", daemon=True)
    watch.start()
    if hasattr(os, "register_at_fork"):  # else a signal that a forked child gets would count here
        os.register_at_fork(after_in_child=lambda: None if done.is_set() else _forget())
    earlier = signal.set_wakeup_fd(send, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
        done.set()
        close()
        watch.join()


def _forget() -> None:
    with contextlib.suppress(ValueError):  # in the main thread alone
        signal.set_wakeup_fd(-1)


def _watch(receive: Callable[[], bytes], numbers: frozenset[int], done: threading.Event) -> None:
    if hasattr(signal, "pthread_sigmask"):  # else the system may hand this thread what should wake the main one
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    first = echo = None
    while data := receive():
        if data[0] not in numbers:
            continue
        now = time.monotonic()
        if first is None:
            first = now
            if hasattr(signal, "pthread_kill"):  # an engine's thread may have got it, while the main one sleeps on
                echo = data[0]
                signal.pthread_kill(threading.main_thread().ident or 0, echo)
        elif data[0] == echo:
            echo = None
        elif now > first + SAME_S:
            if not done.wait(max(0.0, first + CLEARING_S - now)):
                os._exit(128 + data[0])
            return


def _channel() -> tuple[Callable[[], bytes], int, Callable[[], None]]:
    """A function that waits for a byte, b"" at the end; the descriptor that bytes are written to; what ends it."""
    if sys.platform == "win32":  # where only sockets serve
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def close_sockets() -> None:
            theirs.close()

        def receive() -> bytes:
            with contextlib.suppress(OSError):
                if data := ours.recv(1):
                    return data
            ours.close()
            return b""

        return receive, theirs.fileno(), close_sockets
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_inheritable(writer, False)

    def read() -> bytes:
        if data := os.read(reader, 1):
            return data
        os.close(reader)
        return b""

    return read, writer, lambda: os.close(writer)
