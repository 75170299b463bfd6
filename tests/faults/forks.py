"""A process that has imported the exporter and forks a child for each export, so that dozens can be killed in minutes.

It takes JSON lines on stdin: {"command", "argv", "kill_at", "under"}. The child kills itself before its kill_at-th
operation on files under a folder; if it ends by itself, the number of operations is reported with its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = ("os.", "shutil.", "open")  # audit events with a path
COMMANDS = ("eagle_export", "eagle_calib")


@dataclass(frozen=True)
class Kill:
    """When: before the n-th operation on files, or after some time."""

    at_operation: int | None = None
    after_s: float | None = None


NEVER = Kill()


class Forks:
    """The process, seen from the tests."""

    def __enter__(self) -> Forks:
        path = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        )
        self._hear()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, argv: Sequence[str | Path], under: Path, kill: Kill = NEVER) -> dict[str, Any]:
        """Run one of COMMANDS with its arguments to the end, or kill it. under: folder whose operations count. Returns
        "status" (-9 if it was killed), "operations" counted, if it lived, and "seconds"."""
        assert self._process.stdin is not None
        command, *arguments = map(str, argv)
        case = {"command": command, "argv": arguments, "kill_at": kill.at_operation, "under": str(under)}
        started = time.perf_counter()
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        child = int(self._hear()["pid"])
        if kill.after_s is not None:
            time.sleep(kill.after_s)
            os.kill(child, signal.SIGKILL)  # it is waited for after the next line alone, so its number is still its own
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return {**self._hear(), "seconds": time.perf_counter() - started}

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Serve until stdin ends."""
    import eagle_calib.calibrate
    import eagle_calib.cli
    import eagle_export.bundle
    import eagle_export.commands.cli

    mains = {"eagle_export": eagle_export.commands.cli.main, "eagle_calib": eagle_calib.cli.main}
    print("{}", flush=True)
    while line := sys.stdin.readline():
        case = json.loads(line)
        ours, theirs = os.pipe()
        if (child := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            operations = count_operations(case["under"], case["kill_at"])
            status = mains[case["command"]](case["argv"])
            os.write(theirs, str(operations[0]).encode())
            os._exit(status)
        os.close(theirs)
        print(json.dumps({"pid": child}), flush=True)
        sys.stdin.readline()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        count = os.read(ours, 100)
        os.close(ours)
        print(json.dumps({"status": status, "operations": int(count) if count else None}), flush=True)


def count_operations(under: str, kill_at: int | None) -> list[int]:
    """Returns a list whose one number grows with every operation on files below a folder."""
    count = [0]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not event.startswith(EVENTS) or not any(str(arg).startswith(under) for arg in args[:2]):
            return
        count[0] += 1
        if count[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return count


if __name__ == "__main__":
    main()
