"""Which engines can run on this machine, and what each of the others lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from eagle_runtime.backends import BACKENDS
from eagle_runtime.errors import BackendError
from eagle_runtime.machine.nvidia import first_gpu

TIMEOUT = 120  # seconds for importing a library; a cold disk takes some
PROVIDERS = {"cuda": "CUDAExecutionProvider", "cpu": "CPUExecutionProvider"}  # of ONNX Runtime


@dataclass(frozen=True, slots=True)
class Finding:
    """works: whether it answers. says: what it is, or else what is missing and how to get it; one line."""

    works: bool
    says: str


def find_engines(gpu: Finding | None = None) -> dict[str, Finding]:
    """Every backend, by the name that --backend knows it under, in the order of --backend auto. gpu: of nvidia_gpu, if
    it was asked already."""
    gpu = gpu or nvidia_gpu()
    found = {
        "tensorrt-rtx": _tensorrt("tensorrt-rtx", "tensorrt_rtx", gpu),
        "tensorrt": _tensorrt("tensorrt", "tensorrt", gpu),
        "cuda": _onnxruntime("cuda", PROVIDERS["cuda"], gpu),
        "cpu": _onnxruntime("cpu", PROVIDERS["cpu"], None),
    }
    assert tuple(found) == BACKENDS
    return found


def nvidia_gpu() -> Finding:
    """The first GPU, or why there is none."""
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
    lack = f"{name} has no {provider}: pip uninstall onnxruntime, then pip install 'eagle-edge[{extra}]'"
    return _joined("", [Finding(False, lack), gpu])


def _tensorrt(extra: str, library: str, gpu: Finding) -> Finding:
    module = _imported(library, "[m.__version__]", extra)
    if not isinstance(module, list):
        return _joined("", [module, gpu])
    bindings = _imported("cuda.bindings.runtime", "[]", extra)
    return _joined(f"{library} {module[0]}", [bindings if isinstance(bindings, Finding) else None, gpu])


def _joined(name: str, parts: list[Finding | None]) -> Finding:
    """All that is missing, or the name."""
    if lacking := [part.says for part in parts if part is not None and not part.works]:
        return Finding(False, "; ".join(lacking))
    return Finding(True, name)


def _imported(library: str, expression: str, extra: str) -> list[Any] | Finding:
    """`expression` of the library m. Imported in a process of its own, which a broken library may bring down."""
    code = f"import importlib, json; m = importlib.import_module({library!r}); print(json.dumps({expression}))"
    hint = f"pip install 'eagle-edge[{extra}]'"
    env = {"ORT_DISABLE_TELEMETRY": "1", **os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, check=False, env=env
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
