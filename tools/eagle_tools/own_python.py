"""Python in a process of its own, which frees its memory when it ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence

from eagle_runtime.base.errors import RequestError


def run_python(arguments: Sequence[str], failed: str, env: Mapping[str, str] | None = None) -> str:
    """Returns what Python prints with these arguments. Raises RequestError: `failed`, and the last line on stderr."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False, env=env)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RequestError(f"{failed}: {last}")
    return done.stdout
