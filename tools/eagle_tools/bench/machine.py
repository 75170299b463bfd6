"""Describes the machine that measures: names, cores, and the bandwidth of its memory."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np

from eagle_runtime.machine.host import processor_name
from eagle_tools.engines import nvidia_gpu

SAMPLE_BYTES = 1 << 29  # bytes read per try, more than most caches hold
TRIES = 5
PACKAGES = ["eagle-edge", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "tensorrt", "torch", "transformers"]
PACKAGES += ["llama-cpp-python", "onnxruntime-genai", "openvino"]


def physical_cores() -> int:
    """Returns the number of cores of this process without hyper-threads; all logical cores if that is unknown."""
    logical = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in logical:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return len(logical)
    return len(siblings)


def read_bandwidth(threads: int) -> float:
    """Returns the bytes per second that `threads` threads together read from memory: the best of a few tries."""
    parts = [np.ones(SAMPLE_BYTES // threads // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(TRIES):
            started = time.perf_counter()
            list(pool.map(np.max, parts))  # NumPy releases the interpreter's lock
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best


def device_bandwidth() -> float | None:
    """Returns the bytes per second of the CUDA device's memory, by copying; None without torch and a device."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    source = torch.ones(SAMPLE_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(TRIES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        best = max(best, 2 * SAMPLE_BYTES / (time.perf_counter() - started))
    return best


def describe(threads: int) -> list[str]:
    """Returns the machine in a few phrases: processor, threads, GPU, versions."""
    gpu = nvidia_gpu()
    names = [f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}", *([gpu.says] if gpu.works else [])]
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return [*names, f"{platform.system()}, Python {platform.python_version()}", *versions]
