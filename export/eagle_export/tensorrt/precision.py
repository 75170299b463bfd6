"""Whether TensorRT computes a bundle's graphs in the types that its precision means, checked before a build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle_export.base.errors import ExportError
from eagle_export.heads.kinds import KINDS
from eagle_runtime.bundle.manifest import Manifest

CAPABILITIES = ("8.6", "8.9", "12.0")  # GeForce RTX 30, 40 and 50; several add little to an engine's size
FP8, LEAST_FOR_FP8 = "float8_e4m3fn", (8, 9)


def default_capabilities(manifest: Manifest) -> tuple[str, ...]:
    """What engines are built for if nothing is named: the capabilities that multiply in the bundle's types."""
    return tuple(each for each in CAPABILITIES if not _in_fp8(manifest) or _has_fp8(each))


def check_capabilities(bundle: Path, manifest: Manifest, capabilities: Sequence[str]) -> None:
    """Raises ExportError for a compute capability that lacks a type in which the bundle multiplies."""
    lacking = [each for each in capabilities if not _has_fp8(each)]
    if lacking and _in_fp8(manifest):
        raise ExportError(
            f"{bundle} multiplies in fp8, which GPUs of compute capability {' and '.join(lacking)} lack; build for "
            f"{' and '.join(default_capabilities(manifest))}, or export it in int8"
        )


def _in_fp8(manifest: Manifest) -> bool:
    return any(FP8 in {weight.dtype for weight in model.graph.weights.values()} for model in manifest.models.values())


def _has_fp8(capability: str) -> bool:
    return tuple(map(int, capability.split("."))) >= LEAST_FOR_FP8


def check_precision(bundle: Path, manifest: Manifest) -> None:
    """Raises ExportError unless both graphs compute in fp16, or for a head that engines cannot draft with. TensorRT
    would build fp32 kernels for others without a warning, or fail for want of an fp32 attention kernel."""
    if manifest.head is not None and "tensorrt" in KINDS[manifest.head.kind].not_on:
        raise ExportError(
            f"{bundle} has a head of kind {manifest.head.kind}, and such heads do not run on TensorRT; export the "
            "target with another one, or alone"
        )
    for model in manifest.models.values():
        dtype = model.graph.inputs["tree_mask"].dtype
        if dtype != "float16":
            raise ExportError(
                f"{bundle} computes in {dtype}, but engines need a bundle in fp16; export it with "
                "fp16 (or int8, int8-weight, fp8, int4) for the backend tensorrt-rtx"
            )
