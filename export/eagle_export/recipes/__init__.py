"""A precision is a recipe: a list of passes over the traced graph, each naming the tensors it changed and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from eagle_calib.calibration import Calibration, Observed
from eagle_export.errors import ExportError
from eagle_export.recipes.attention import exact_attention
from eagle_export.recipes.embedding import embedding_fp16
from eagle_export.recipes.graph import Linear, is_lm_head
from eagle_export.recipes.int4 import int4_blocks, int4_dequantized
from eagle_export.recipes.int8 import int8_per_token
from eagle_export.recipes.qdq import int8_static, int8_weights
from eagle_export.recipes.vocabulary import trim_vocabulary

INT4_BLOCK = 32  # 128 is a little smaller and clearly less exact
FP32_COMPUTE = 1  # MatMulNBits: its int8 kernels round differently for one row and for many

Observations = Mapping[str, Observed]


@dataclass(frozen=True, slots=True)
class Pass:
    """A change to a graph. apply returns tensor name -> what was done; a pass that finds nothing to do is an error."""

    name: str
    apply: Callable[[ir.Model], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """traced: the type that the graph is traced in. passes: given the calibration of the graph. calibrated: whether
    there must be one. target: passes for the target alone, before the others."""

    traced: str
    passes: Callable[[Observations | None], tuple[Pass, ...]] = lambda _: ()
    calibrated: bool = False
    target: tuple[Pass, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What an export does to its two graphs, traced in a type."""

    traced: str
    target: tuple[Pass, ...]
    draft: tuple[Pass, ...]


def _not_lm_head(linear: Linear) -> bool:
    return not is_lm_head(linear)


EXACT = Pass("exact attention", exact_attention)
EMBEDDING = Pass("embedding fp16", embedding_fp16)
PER_TOKEN = Pass("int8 per token", int8_per_token)
WEIGHTS = Pass("int8 weights", int8_weights)
PER_TOKEN_LM_HEAD = Pass("int8 lm_head", partial(int8_per_token, wanted=is_lm_head))
WEIGHTS_LM_HEAD = Pass("int8 lm_head", partial(int8_weights, wanted=is_lm_head))


def _static(observed: Observations | None) -> Pass:
    assert observed is not None, "planned with a calibration"
    return Pass("int8 static", partial(int8_static, observed=observed))


def _nbits(observed: Observations | None) -> Pass:
    blocks = partial(int4_blocks, block=INT4_BLOCK, accuracy=FP32_COMPUTE)
    return Pass("int4 blocks", partial(blocks, wanted=_not_lm_head, observed=observed))


def _dequantized(observed: Observations | None) -> Pass:
    return Pass("int4 blocks", partial(int4_dequantized, block=INT4_BLOCK, wanted=_not_lm_head, observed=observed))


# A target's exact attention makes quantised decoding the same to the bit with and without drafts. A head's precision
# changes speed and acceptance, never the output.
CPU = {
    "fp32": Recipe("fp32"),
    "fp16": Recipe("fp16"),
    "int8": Recipe("fp32", lambda _: (EMBEDDING, PER_TOKEN), target=(EXACT,)),
    "int8-static": Recipe("fp32", lambda seen: (EMBEDDING, _static(seen)), calibrated=True, target=(EXACT,)),
    "int8-weight": Recipe("fp32", lambda _: (EMBEDDING, WEIGHTS), target=(EXACT,)),
    "int4": Recipe("fp32", lambda seen: (EMBEDDING, _nbits(seen), PER_TOKEN_LM_HEAD), target=(EXACT,)),
}
TENSORRT = {
    "fp16": Recipe("fp16"),
    "int8": Recipe("fp16", lambda seen: (_static(seen),), calibrated=True),
    "int8-weight": Recipe("fp16", lambda _: (WEIGHTS,)),
    "int4": Recipe("fp16", lambda seen: (_dequantized(seen), WEIGHTS_LM_HEAD)),
}
RECIPES = {"cpu": CPU, "tensorrt-rtx": TENSORRT, "tensorrt": TENSORRT}


def plan(
    backend: str,
    precision: str,
    draft_precision: str,
    calibration: Calibration | None,
    draft_vocab: int | None = None,
) -> Plan:
    """The passes for a pair. draft_vocab: tokens that the head keeps, None for all that it knows.

    Raises ExportError for a precision that the backend cannot run, precisions that do not mix, and a calibration that
    is missing."""
    recipes = RECIPES[backend]
    for name in (precision, draft_precision):
        if name not in recipes:
            raise ExportError(f"backend {backend} does not run {name}; choose one of {', '.join(recipes)}")
        if recipes[name].calibrated and calibration is None:
            raise ExportError(
                f"{name} for backend {backend} needs the ranges of its inputs; export in fp32, run eagle-calib on the "
                "bundle and give its folder with --calibration"
            )
    target, draft = recipes[precision], recipes[draft_precision]
    if target.traced != draft.traced:
        raise ExportError(
            f"a target in {precision} hands {target.traced} features to its head, which a head in {draft_precision} "
            "cannot read; choose the same precision for both, or none of them fp16"
        )
    trim: tuple[Pass, ...] = ()
    if draft_vocab is not None:
        if calibration is None:
            raise ExportError(
                "a draft vocabulary is chosen by how often tokens occur; export in fp32, run eagle-calib on the bundle "
                "and give its folder with --calibration"
            )
        trim = (Pass("draft vocabulary", partial(trim_vocabulary, size=draft_vocab, counts=calibration.token_counts)),)
    seen = (None, None) if calibration is None else (calibration.target, calibration.draft)
    return Plan(target.traced, target.target + target.passes(seen[0]), trim + draft.passes(seen[1]))


def apply(passes: tuple[Pass, ...], model: ir.Model) -> dict[str, str]:
    """Run passes over a graph, in place. Returns tensor name -> what was done to it. Raises ExportError."""
    done: dict[str, str] = {}
    for step in passes:
        changed = step.apply(model)
        if not changed:
            raise ExportError(f"pass {step.name!r} found nothing to change in the graph; report this as a bug")
        done |= changed
    return done
