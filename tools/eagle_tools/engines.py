"""Finds the engines that can run on this machine, and what is missing for the others."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from typing import Any

from eagle_runtime.base.backend_names import BACKENDS, NATIVE
from eagle_runtime.base.errors import BackendError
from eagle_runtime.machine.nvidia import first_gpu
from eagle_tools.own_python import ended, last_line

TIMEOUT = 120  # seconds for importing a library, which takes long from a cold disk
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}  # of ONNX Runtime


@dataclass(frozen=True, slots=True)
class Finding:
    """One engine or GPU. works: whether it can be used. says: in one line its name, or what is missing and how to get
    it."""

    works: bool
    says: str


def find_engines(gpu: Finding | None = None) -> dict[str, Finding]:
    """Returns a finding for every backend by name, in the order in which "auto" tries them. gpu: the result of
    nvidia_gpu, if it is known already."""
    gpu = gpu or nvidia_gpu()
    findings = {
        "tensorrt-rtx": _tensorrt("tensorrt-rtx", "tensorrt_rtx", gpu),
        "tensorrt": _tensorrt("tensorrt", "tensorrt", gpu),
        "cuda": _onnxruntime("cuda", PROVIDERS["cuda"], gpu),
        NATIVE: _native(),
        "cpu": _onnxruntime("cpu", PROVIDERS["cpu"], None),
    }
    assert tuple(findings) == BACKENDS
    return findings


def nvidia_gpu() -> Finding:
    """Returns the first GPU, or why there is none."""
    try:
        return Finding(True, str(first_gpu()))
    except BackendError as error:
        return Finding(False, str(error))


def _onnxruntime(extra: str, provider: str, gpu: Finding | None) -> Finding:
    module = _imported("onnxruntime", "[m.__version__, m.get_available_providers()]", extra)
    if not isinstance(module, list):
        return _joined("", [module, gpu])
    version, providers = module
    name = f"onnxruntime {version} ({', '.join(providers)})"
    if provider in providers:
        return _joined(name, [gpu])
    missing = f"{name} has no {provider}: pip uninstall onnxruntime, then pip install 'eagle-edge[{extra}]'"
    return _joined("", [Finding(False, missing), gpu])


def _native() -> Finding:
    tried = "[(one := m.native_operators()).instructions, one.reason]"
    found = _imported("eagle_runtime.ort.operators", tried, "cpu")
    if isinstance(found, Finding):
        return found
    instructions, reason = found
    if reason:
        return Finding(False, reason)
    return Finding(True, f"eagle-edge-kernels ({instructions})")


def _tensorrt(extra: str, library: str, gpu: Finding) -> Finding:
    module = _imported(library, "[m.__version__]", extra)
    if not isinstance(module, list):
        return _joined("", [module, gpu])
    bindings = _imported("cuda.bindings.runtime", "[]", extra)
    return _joined(f"{library} {module[0]}", [bindings if isinstance(bindings, Finding) else None, gpu])


def _joined(name: str, parts: list[Finding | None]) -> Finding:
    """Returns all that is missing, or else the name."""
    if lacking := [part.says for part in parts if part is not None and not part.works]:
        return Finding(False, "; ".join(lacking))
    return Finding(True, name)


def _imported(library: str, expression: str, extra: str) -> list[Any] | Finding:
    """Returns the value of `expression` with the library as m, or why it does not load. The import runs in a process of
    its own, which a broken library may crash."""
    code = f"import importlib, json; m = importlib.import_module({library!r}); print(json.dumps({expression}))"
    hint = f"pip install 'eagle-edge[{extra}]'"
    env = {"ORT_DISABLE_TELEMETRY": "1", **os.environ}
    try:
        done = ended(["-c", code], env, TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(False, f"{library} could not be tried ({type(error).__name__})")
    if done.returncode == 0:
        answer: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    last = last_line(done)
    if last.startswith("ModuleNotFoundError"):
        return Finding(False, f"{library} is not installed: {hint}")
    return Finding(False, f"{library} does not load ({last[:200]}): {hint} again")
