"""Whether TensorRT computes a bundle's graphs in the types that its precision means, checked before a build."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_runtime.bundle.manifest import Manifest


def check_precision(bundle: Path, manifest: Manifest) -> None:
    """Raises ExportError unless both graphs compute in fp16. TensorRT would build fp32 kernels for others without a
    warning, or fail for want of an fp32 attention kernel."""
    for model in manifest.models.values():
        dtype = model.graph.inputs["tree_mask"].dtype
        if dtype != "float16":
            raise ExportError(
                f"{bundle} computes in {dtype}, but engines need a bundle in fp16; export it with "
                "fp16 (or int8, int8-weight, int4) for the backend tensorrt-rtx"
            )


def check_sums(bundle: Path, manifest: Manifest) -> None:
    """Raises ExportError if a product of bytes is scaled in fp16, as older bundles have it: TensorRT
    would store its sums in fp16 before it scales them, and many are beyond the range of fp16."""
    for model in manifest.models.values():
        graph = ir.load(bundle / model.graph.file).graph
        if any(_scales_bytes_in_fp16(node) for node in graph):
            raise ExportError(
                f"{bundle / model.graph.file} scales products of bytes in fp16, whose sums overflow in TensorRT's "
                "kernels; export the bundle again"
            )


def _scales_bytes_in_fp16(node: ir.Node) -> bool:
    """Whether a node is a product of two quantised values whose scales are in fp16."""
    if node.op_type != "MatMul":
        return False
    made = [value.producer() for value in node.inputs if value is not None]
    scales = [each.inputs[1] for each in made if each is not None and each.op_type == "DequantizeLinear"]
    return len(scales) == 2 and any(scale is not None and scale.dtype == ir.DataType.FLOAT16 for scale in scales)
