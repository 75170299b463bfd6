"""Signals that stop a program: the first unwinds it, so that temporary files are removed; the second ends it.

Python runs signal handlers between two bytecodes of the main thread, which an endless forward pass never reaches. So
a thread of its own reads the signals from the file descriptor to which the interpreter writes them (set_wakeup_fd), and
can end the process during such a pass: engines release the interpreter's lock meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from types import FrameType

# Ctrl-C, kill, a closed terminal; on Windows the last is SIGBREAK, as Ctrl-Break is.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name)]
# Chosen, as what somebody at a terminal does not notice or waits for.
SAME_S = 0.3  # seconds within which signals count as one: a terminal and a parent process may both send it
AGAIN_S = 0.05  # seconds after which a signal that others handle is sent to the main thread once more
CLEANUP_S = 2.0  # seconds after the first signal that unwinding may take, however soon a second one comes


class Interrupted(BaseException):
    """Raised in the main thread by a signal to stop, with its number. It is not an Exception, so that no code handles
    it as a failure."""


@contextlib.contextmanager
def handled_interrupts(but_for: Collection[int] = ()) -> Iterator[None]:
    """Within the block the first signal raises Interrupted(number) in the main thread, and again soon if that came to
    nothing, as in a finaliser. One more that comes after SAME_S ends the process, with the status of that signal:
    CLEANUP_S after the first signal, or at once if it comes later. Signals that were ignored before, as under nohup,
    stay ignored. but_for: signals whose handlers stay. The main thread gets these twice, AGAIN_S apart: an engine's
    thread may have got the first, or a call just begun to wait."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS if number not in but_for}
    ours = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    stopped: int | None = None
    raised: weakref.ref[Interrupted] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped, raised
        if raised is not None and (raised() is not None or sys.exc_info()[0] is not None):  # the program unwinds
            return
        stopped = number  # a callback of a library may have swallowed the error before, which is gone then
        error = Interrupted(number)
        raised = weakref.ref(error)
        try:
            raise error
        finally:
            del error  # or this frame, which its traceback holds, would keep it

    with _watched(frozenset(ours), frozenset(but_for)):
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


@contextlib.contextmanager
def _watched(numbers: frozenset[int], others: frozenset[int]) -> Iterator[None]:
    """Within the block a thread reads the signals that arrive. others: signals that are only sent again."""
    reader, writer = socket.socketpair()  # not a pipe: Windows takes only sockets
    writer.setblocking(False)
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(reader, numbers, others, done), name="eagle-interrupts", daemon=True)
    watch.start()
    if hasattr(os, "register_at_fork"):  # or a signal that a forked child gets would count here
        os.register_at_fork(after_in_child=lambda: None if done.is_set() else _reset_wakeup())
    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier, warn_on_full_buffer=False)
        done.set()
        writer.close()
        watch.join()
        reader.close()


def _reset_wakeup() -> None:
    with contextlib.suppress(ValueError):  # raised in all threads but the main one
        signal.set_wakeup_fd(-1)


def _watch(reader: socket.socket, numbers: frozenset[int], others: frozenset[int], done: threading.Event) -> None:
    """Read the numbers of signals until the other end is closed."""
    if hasattr(signal, "pthread_sigmask"):  # or the system may deliver to this thread what should wake the main one
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers | others)
    first: float | None = None
    unsent, on_its_way = 2, False  # signals that this thread sends the main one after the first, one after the other
    again: int | None = None
    while data := _received(reader):
        if data[0] in others and hasattr(signal, "pthread_kill"):
            again = None if again == data[0] else data[0]
            if again is not None and not done.wait(AGAIN_S):
                signal.pthread_kill(threading.main_thread().ident or 0, again)
        if data[0] not in numbers:
            continue
        now = time.monotonic()
        if first is not None and not on_its_way and now > first + SAME_S:
            if not done.wait(max(0.0, first + CLEANUP_S - now)):
                os._exit(128 + data[0])
            return
        # An engine's thread may have got it, which does not wake the main one; and the main one may just then begin to
        # wait for a line, which only a signal that comes later ends. Each is sent when the one before has come: two
        # that are on their way at once may come as one, and what a user sends would be taken for the other.
        pause, on_its_way = 0.0 if first is None else AGAIN_S, False
        first = now if first is None else first
        if unsent and hasattr(signal, "pthread_kill") and not done.wait(pause):
            unsent, on_its_way = unsent - 1, True
            signal.pthread_kill(threading.main_thread().ident or 0, data[0])


def _received(reader: socket.socket) -> bytes:
    """Wait for the next byte and return it; b"" when the other end is closed."""
    try:
        return reader.recv(1)
    except OSError:  # Windows may report the closed end so
        return b""
