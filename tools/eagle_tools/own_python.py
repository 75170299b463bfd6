"""Python in a process of its own, which frees its memory when it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from eagle_runtime.base.errors import RequestError


def run_python(arguments: Sequence[str], failed: str, env: Mapping[str, str] | None = None) -> str:
    """Returns what Python prints with these arguments. Raises RequestError: `failed`, and the last line on stderr."""
    done = ended(arguments, env)
    if done.returncode:
        raise RequestError(f"{failed}: {last_line(done)}")
    return done.stdout


def ended(
    arguments: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Returns a run of Python with these arguments. Raises OSError and TimeoutExpired."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout, check=False, env=env
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the last line on stderr of a run that failed."""
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
