"""Peak memory of one setup: a process of its own that loads it, answers the longest prompt and says what it took.

In one process all setups share the peak. The process is this module, run with a JSON object as argument.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle_runtime.errors import BackendError, EagleError
from eagle_runtime.session.trt.driver import describe

TOKENS = 16  # decoded: enough for a few trees behind the prompt
TIMEOUT = 1800  # seconds


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes. host: resident set. device: taken of a GPU's memory, None without one or without cuda-bindings."""

    host: int
    device: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """What to load and run. method: a name of the bench; of PyTorch, a mode, and then precision says in what."""

    folder: str
    backend: str
    threads: int
    method: str
    precision: str
    token_ids: tuple[int, ...]


class JobError(EagleError):
    """A job that came to no figure. It should not end a long run."""


def peak_of(job: Job) -> Peak:
    """Run the job in a new process; raises JobError if that fails."""
    command = [sys.executable, "-m", "eagle_tools.bench.memory", json.dumps(asdict(job))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"memory of {job.folder} was not measured ({type(error).__name__})") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise JobError(f"memory of {job.folder} was not measured ({last[:200]})")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def run_job(job: Job) -> Peak:
    """In this process."""
    from eagle_tools.bench.identity import PYTORCH

    free = _device_free()
    ids = list(job.token_ids)
    if job.backend == PYTORCH:
        from eagle_tools.bench.pytorch import PytorchModel

        model = PytorchModel(Path(job.folder), job.precision, job.threads, len(ids) + TOKENS, None)
        model.generate(job.method, ids, TOKENS)
    else:
        from eagle_runtime import EagleModel
        from eagle_tools.bench.methods import settings_of

        loaded = EagleModel.load(job.folder, backend=job.backend, threads=job.threads, check_hashes=False)
        settings = settings_of(job.method, loaded.manifest)
        loaded.generate(ids, max_new_tokens=TOKENS, ignore_eos=True, **settings)
    left = _device_free()
    return Peak(host_peak(), None if free is None or left is None else free - left)


def host_peak() -> int:
    """Bytes: the largest resident set this process has had."""
    if sys.platform == "win32":
        return _windows_peak()
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage on Linux counts the parent's pages too, from before the exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _windows_peak() -> int:
    from ctypes import wintypes

    class Counters(ctypes.Structure):
        """PROCESS_MEMORY_COUNTERS of psapi.h."""

        _fields_ = [
            ("cb", wintypes.DWORD),
            ("PageFaultCount", wintypes.DWORD),
            *((name, ctypes.c_size_t) for name in ("PeakWorkingSetSize", "WorkingSetSize", *"abcdef")),
        ]

    counters = Counters()
    windows: Any = ctypes
    kernel = windows.windll.kernel32
    kernel.GetCurrentProcess.restype = wintypes.HANDLE
    kernel.K32GetProcessMemoryInfo.argtypes = [wintypes.HANDLE, ctypes.c_void_p, wintypes.DWORD]
    kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), ctypes.sizeof(counters))
    return int(counters.PeakWorkingSetSize)


def _device_free() -> int | None:
    try:
        return describe().available
    except BackendError:  # no GPU, or nothing to ask it through
        return None


def main(argv: Sequence[str]) -> None:
    data = json.loads(argv[0])
    print(json.dumps(asdict(run_job(Job(**{**data, "token_ids": tuple(data["token_ids"])})))))


if __name__ == "__main__":
    main(sys.argv[1:])
