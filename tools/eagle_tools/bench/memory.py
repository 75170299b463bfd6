"""Measures the peak memory of one setup in a process of its own, which loads it and answers the longest prompt.

In one process all setups would share the peak. The process runs this module with a JSON object as argument.
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

from eagle_runtime.base.errors import BackendError, EagleError
from eagle_runtime.trt.driver import CudaDriver
from eagle_tools.own_python import ended, last_line

TOKENS = 16  # decoded tokens: enough for a few trees after the prompt
TIMEOUT = 1800  # seconds


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak memory in bytes. host: resident set. device: memory of a GPU; None without one or without cuda-bindings."""

    host: int
    device: int | None


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """What to load and run. backend: of a bundle, or PyTorch or another engine. method: a name of the bench, or a mode
    of that engine. precision: of PyTorch. draft_bundles: that draft. datastore: that is searched, if one is."""

    folder: str
    backend: str
    threads: int
    method: str
    precision: str
    token_ids: tuple[int, ...]
    draft_bundles: tuple[str, ...] = ()
    datastore: str | None = None


class JobError(EagleError):
    """A job failed. A long run should go on without its figure."""


def peak_of(job: MemoryRun) -> Peak:
    """Run the job in a new process; returns its peak memory. Raises JobError if that fails."""
    try:
        done = ended(["-m", "eagle_tools.bench.memory", json.dumps(asdict(job))], timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise JobError(f"memory of {job.folder} was not measured ({type(error).__name__})") from None
    if done.returncode:
        raise JobError(f"memory of {job.folder} was not measured ({last_line(done)[:200]})")
    return Peak(**json.loads(done.stdout.splitlines()[-1]))


def run_job(job: MemoryRun) -> Peak:
    """Run the job in this process; returns its peak memory."""
    from eagle_tools.bench.identity import FOREIGN, PYTORCH

    free = _device_free()
    ids = list(job.token_ids)
    if job.backend == PYTORCH:
        from eagle_tools.bench.pytorch import PytorchModel

        model = PytorchModel(Path(job.folder), job.precision, job.threads, len(ids) + TOKENS, None)
        model.generate(job.method, ids, TOKENS)
    elif job.backend in FOREIGN:
        from eagle_tools.peers.worker import open_engine

        engine = open_engine(job.backend, Path(job.folder), job.threads, len(ids) + TOKENS)
        decoding, count = engine.decoding(job.method, ids, TOKENS), 0
        while count < TOKENS:
            count += len(decoding.advance())
    else:
        from eagle_runtime import EagleModel, SamplingParams
        from eagle_tools.bench.methods import settings_of

        loaded = EagleModel.load(
            job.folder,
            backend=job.backend,
            threads=job.threads,
            check_hashes=False,
            draft_bundle=job.draft_bundles,
            datastore=job.datastore,
        )
        settings = settings_of(job.method)
        loaded.generate(ids, sampling=SamplingParams(), max_new_tokens=TOKENS, ignore_eos=True, **settings)
    left = _device_free()
    return Peak(host_peak(), None if free is None or left is None else free - left)


def host_peak() -> int:
    """Returns the maximum resident set of this process in bytes."""
    if sys.platform == "win32":
        return _windows_peak()
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage on Linux counts the parent's pages too, from before the exec
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
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
        return CudaDriver().describe().available
    except BackendError:  # no GPU, or no cuda-bindings
        return None


def main(argv: Sequence[str]) -> None:
    data = json.loads(argv[0])
    print(json.dumps(asdict(run_job(MemoryRun(**{**data, "token_ids": tuple(data["token_ids"])})))))


if __name__ == "__main__":
    main(sys.argv[1:])
