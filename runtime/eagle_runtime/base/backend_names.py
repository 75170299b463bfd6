"""The names of backends, and what they say by themselves."""

from __future__ import annotations

NATIVE = "native"  # the CPU with the operators of eagle-edge-kernels
BACKENDS = ("tensorrt-rtx", "tensorrt", "cuda", NATIVE, "cpu")  # as "auto" tries them: faster ones first
AUTO = "auto"


def on_cpu(backend: str) -> bool:
    """Whether a backend computes on the CPU."""
    return backend in (NATIVE, "cpu")
