"""Describes the machine that measures: names, cores, and the bandwidth of its memory."""

from __future__ import annotations

import platform
import time
from importlib import metadata

from eagle_export.inspection.bandwidth import SAMPLE_BYTES, TRIES
from eagle_export.inspection.bandwidth import physical_cores as physical_cores
from eagle_export.inspection.bandwidth import read_bandwidth as read_bandwidth
from eagle_runtime.machine.host import processor_features, processor_name
from eagle_tools.engines import nvidia_gpu

PACKAGES = ["eagle-edge", "onnxruntime", "onnxruntime-gpu", "tensorrt-rtx", "tensorrt", "torch", "transformers"]
PACKAGES += ["llama-cpp-python", "onnxruntime-genai", "openvino"]


# Instruction sets that decide how fast products of bytes are, by the names that Linux lists.
INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "asimddp": "dotprod",
    "i8mm": "i8mm",
}


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
    has = processor_features()
    sets = ", ".join(name for feature, name in INSTRUCTIONS.items() if feature in has)
    processor = f"{processor_name()}{f' with {sets}' if sets else ''}"
    names = [f"{processor}, {threads} thread{'s' if threads > 1 else ''}", *([gpu.says] if gpu.works else [])]
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return [*names, f"{platform.system()}, Python {platform.python_version()}", *versions]
