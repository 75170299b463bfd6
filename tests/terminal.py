"""A program at a terminal of its own (a pseudo-terminal), for tests that type and read."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

from patience import PATIENCE_S


class Terminal:
    """A program that reads and writes a terminal. shown: all that it has written so far."""

    def __init__(self, command: Sequence[object], env: Mapping[str, str]) -> None:
        self._ours, theirs = os.openpty()
        self.process = subprocess.Popen(
            [str(part) for part in command], stdin=theirs, stdout=theirs, stderr=theirs, env=dict(env),
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""
        self._read = 0  # characters of it that `until` has passed

    def type(self, text: str) -> None:
        """Press keys; "\\x03" is Ctrl-C, "\\x04" the end of input."""
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Press Ctrl-C, not sooner after the last time than fingers can."""
        time.sleep(0.3)
        self.type("\x03")

    def until(self, text: str) -> str:
        """Wait until a text is shown after what earlier calls have waited for, and return what is shown up to it."""
        end = time.monotonic() + PATIENCE_S
        while (place := self.shown.find(text, self._read)) < 0:
            assert time.monotonic() < end and self.more(), f"{text!r} is not shown after {self.shown[self._read :]!r}"
        passed, self._read = self.shown[self._read : place + len(text)], place + len(text)
        return passed

    def status(self) -> int:
        """The exit status, when the program has ended."""
        while self.more():
            pass
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End the program if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def more(self) -> bool:
        """Wait for something more to be shown; returns whether there was."""
        if not select.select([self._ours], [], [], PATIENCE_S)[0]:
            return False
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def _take_terminal() -> None:
    """Make the terminal on descriptor 0 the one whose Ctrl-C reaches this process."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
