"""Which engines can run on this machine, and what each of the others lacks."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

TIMEOUT = 120  # seconds for importing a library; a cold disk takes some
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # device attributes of CUDA's driver API


@dataclass(frozen=True, slots=True)
class Finding:
    """works: whether it answers. says: what it is, or else what is missing and how to get it; one line."""

    works: bool
    says: str


def find_engines() -> dict[str, Finding]:
    """Every backend, by the name that --backend knows it under."""
    gpu = nvidia_gpu()
    return {
        "cpu": _onnxruntime("cpu", "CPUExecutionProvider", None),
        "cuda": _onnxruntime("cuda", "CUDAExecutionProvider", gpu),
        "tensorrt-rtx": _tensorrt("tensorrt-rtx", "tensorrt_rtx", gpu),
        "tensorrt": _tensorrt("tensorrt", "tensorrt", gpu),
    }


def nvidia_gpu() -> Finding:
    """The first GPU that the NVIDIA driver names; asked of the driver itself, so that no package is needed."""
    library = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    try:
        driver: Any = ctypes.CDLL(library)
    except OSError:
        return Finding(False, f"no NVIDIA driver is installed ({library} is missing)")
    number, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if error := driver.cuInit(0):
        return Finding(False, f"the NVIDIA driver does not start (error {error} of cuInit): look at nvidia-smi")
    if driver.cuDeviceGetCount(ctypes.byref(number)) or number.value == 0:
        return Finding(False, "the NVIDIA driver sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    driver.cuDeviceGetName(name, len(name), 0)
    compute = []
    for attribute in (COMPUTE_MAJOR, COMPUTE_MINOR):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, 0)
        compute.append(str(number.value))
    driver.cuDriverGetVersion(ctypes.byref(number))
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    return Finding(True, f"{name.value.decode(errors='replace')}, compute {'.'.join(compute)}, driver for CUDA {cuda}")


def _onnxruntime(extra: str, provider: str, gpu: Finding | None) -> Finding:
    module = _imported("onnxruntime", "[m.__version__, m.get_available_providers()]", extra)
    if not isinstance(module, list):
        return _joined("", [module, gpu])
    version, providers = module
    name = f"onnxruntime {version} ({', '.join(providers)})"
    if provider in providers:
        return _joined(name, [gpu])
    lack = f"{name} has no {provider}: pip uninstall onnxruntime, then pip install 'eagle-edge[{extra}]'"
    return _joined("", [Finding(False, lack), gpu])


def _tensorrt(extra: str, library: str, gpu: Finding) -> Finding:
    module = _imported(library, "[m.__version__]", extra)
    if not isinstance(module, list):
        return _joined("", [module, gpu])
    bindings = _imported("cuda.bindings.runtime", "[]", extra)
    return _joined(f"{library} {module[0]}", [bindings if isinstance(bindings, Finding) else None, gpu])


def _joined(name: str, parts: list[Finding | None]) -> Finding:
    """All that is missing, or the name with what works."""
    found = [part for part in parts if part is not None]
    if lacking := [part.says for part in found if not part.works]:
        return Finding(False, "; ".join(lacking))
    return Finding(True, ", ".join([name, *(part.says for part in found)]))


def _imported(library: str, expression: str, extra: str) -> list[Any] | Finding:
    """`expression` of the library m. Imported in a process of its own, which a broken library may bring down."""
    code = f"import importlib, json; m = importlib.import_module({library!r}); print(json.dumps({expression}))"
    hint = f"pip install 'eagle-edge[{extra}]'"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(False, f"{library} could not be tried ({type(error).__name__})")
    if done.returncode == 0:
        answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    if last.startswith("ModuleNotFoundError"):
        return Finding(False, f"{library} is not installed: {hint}")
    return Finding(False, f"{library} does not load ({last[:200]}): {hint} again")
