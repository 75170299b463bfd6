"""A precision is a recipe: a list of passes over the traced graph, each naming the tensors it changed and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_export.recipes.attention import exact_attention
from eagle_export.recipes.embedding import embedding_fp16
from eagle_export.recipes.graph import Linear, is_lm_head
from eagle_export.recipes.int4 import int4_blocks
from eagle_export.recipes.int8 import int8_per_token

INT4_BLOCK = 32
FP32_COMPUTE = 1  # MatMulNBits: its int8 kernels round differently for one row and for many


@dataclass(frozen=True, slots=True)
class Pass:
    """A change to a graph. apply returns tensor name -> what was done; a pass that finds nothing to do is an error."""

    name: str
    apply: Callable[[ir.Model], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """traced: the type that the graph is traced in. target, draft: passes over either graph, in order."""

    traced: str
    target: tuple[Pass, ...] = ()
    draft: tuple[Pass, ...] = ()


def _not_lm_head(linear: Linear) -> bool:
    return not is_lm_head(linear)


EXACT = Pass("exact attention", exact_attention)
EMBEDDING = Pass("embedding fp16", embedding_fp16)
INT8 = Pass("int8 per token", int8_per_token)
INT4 = Pass("int4 blocks", partial(int4_blocks, block=INT4_BLOCK, accuracy=FP32_COMPUTE, wanted=_not_lm_head))
INT8_LM_HEAD = Pass("int8 lm_head", partial(int8_per_token, wanted=is_lm_head))

# By precision, for ONNX Runtime on a CPU. A head's precision changes speed and acceptance, never the output, so its
# attention stays in fp32.
CPU = {
    "fp32": Recipe("fp32"),
    "fp16": Recipe("fp16"),
    "int8": Recipe("fp32", (EXACT, EMBEDDING, INT8), (EMBEDDING, INT8)),
    "int4": Recipe("fp32", (EXACT, EMBEDDING, INT4, INT8_LM_HEAD), (EMBEDDING, INT4, INT8_LM_HEAD)),
}


def passes_for(precision: str, draft_precision: str) -> tuple[str, tuple[Pass, ...], tuple[Pass, ...]]:
    """The type to trace in, the target's passes, the head's passes. Raises ExportError if the two do not mix."""
    target, draft = CPU[precision], CPU[draft_precision]
    if target.traced != draft.traced:
        raise ExportError(
            f"a target in {precision} hands {target.traced} features to its head, which a head in {draft_precision} "
            "cannot read; choose the same precision for both, or none of them fp16"
        )
    return target.traced, target.target, draft.draft


def apply(passes: tuple[Pass, ...], model: ir.Model) -> dict[str, str]:
    """Run passes over a graph, in place. Returns tensor name -> what was done to it. Raises ExportError."""
    done: dict[str, str] = {}
    for step in passes:
        changed = step.apply(model)
        if not changed:
            raise ExportError(f"pass {step.name!r} found nothing to change in the graph; report this as a bug")
        done |= changed
    return done
