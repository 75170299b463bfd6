"""A precision is a recipe: a list of passes over the traced graph, each naming the tensors it changed and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Calibration, Observed
from eagle_export.errors import ExportError
from eagle_export.recipes.attention import exact_attention
from eagle_export.recipes.embedding import embedding_fp16
from eagle_export.recipes.graph import Linear, fed_by_norm, is_lm_head, narrows
from eagle_export.recipes.int4 import int4_blocks, int4_dequantized
from eagle_export.recipes.int8 import int8_per_token
from eagle_export.recipes.keep import keep
from eagle_export.recipes.qdq import int8_static, int8_weights
from eagle_export.recipes.vocabulary import trim_vocabulary

INT4_BLOCK = 32  # 128 is a little smaller, clearly less exact, and summed differently for one row and for many,
HEAD_BLOCK = 128  # which a head may be: it takes two thirds of the time, for a hundredth of what is accepted
KEEP = "kept layers"  # name of the pass before all others
INT8_COMPUTE = 4  # accuracy level of MatMulNBits: with blocks of 32, a row's result is the same beside any others

Observations = Mapping[str, Observed]


@dataclass(frozen=True, slots=True)
class Pass:
    """A change to a graph. apply returns tensor name -> what was done; a pass that finds nothing to do is an error."""

    name: str
    apply: Callable[[ir.Model], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """traced: the type that the graph is traced in. passes: given the calibration of the graph. calibrated: whether
    there must be one. target: passes for the target alone, before the others. draft: those of a head, None: `passes`.
    beside: precision of the head of such a target unless told, None: the same."""

    traced: str
    passes: Callable[[Observations | None], tuple[Pass, ...]] = lambda _: ()
    calibrated: bool = False
    target: tuple[Pass, ...] = ()
    draft: Callable[[Observations | None], tuple[Pass, ...]] | None = None
    beside: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What an export does to its graphs, traced in a type. passes: of "target" and, where there is a head, "draft"."""

    traced: str
    passes: dict[str, tuple[Pass, ...]]


def _sturdy(linear: Linear) -> bool:
    """What int4 stores in four bits: q, gate and up. The others cost more for each byte saved: o and down write what
    all later layers read, k and v are few and serve several query heads, and the LM head tells the tokens apart."""
    return fed_by_norm(linear) and not narrows(linear) and not is_lm_head(linear)


def _sensitive(linear: Linear) -> bool:
    return not _sturdy(linear)


def _not_lm_head(linear: Linear) -> bool:
    return not is_lm_head(linear)


EXACT = Pass("exact attention", exact_attention)
EMBEDDING = Pass("embedding fp16", embedding_fp16)
PER_TOKEN = Pass("int8 per token", int8_per_token)
WEIGHTS = Pass("int8 weights", int8_weights)
SENSITIVE_PER_TOKEN = Pass("int8 per token", partial(int8_per_token, wanted=_sensitive))
LM_HEAD_PER_TOKEN = Pass("int8 per token", partial(int8_per_token, wanted=is_lm_head))
SENSITIVE_WEIGHTS = Pass("int8 weights", partial(int8_weights, wanted=_sensitive))


def _static(observed: Observations | None, zero: np.int8 | np.uint8) -> Pass:
    assert observed is not None, "planned with a calibration"
    return Pass("int8 static", partial(int8_static, observed=observed, zero=zero))


def _nbits(observed: Observations | None, wanted: Callable[[Linear], bool], block: int = INT4_BLOCK) -> Pass:
    blocks = partial(int4_blocks, block=block, accuracy=INT8_COMPUTE)
    return Pass("int4 blocks", partial(blocks, wanted=wanted, observed=observed))


def _dequantized(observed: Observations | None) -> Pass:
    return Pass("int4 blocks", partial(int4_dequantized, block=INT4_BLOCK, wanted=_sturdy, observed=observed))


# A target's exact attention makes quantised decoding the same to the bit with and without drafts. A head's precision
# changes speed and acceptance, never the output.
CPU = {
    "fp32": Recipe("fp32"),
    "fp16": Recipe("fp16"),
    "int8": Recipe("fp32", lambda _: (EMBEDDING, PER_TOKEN), target=(EXACT,), beside="int4"),
    "int8-static": Recipe(
        "fp32", lambda seen: (EMBEDDING, _static(seen, np.uint8(128)), PER_TOKEN), calibrated=True, target=(EXACT,)
    ),
    "int8-weight": Recipe("fp32", lambda _: (EMBEDDING, WEIGHTS), target=(EXACT,)),
    "int4": Recipe(
        "fp32",
        lambda seen: (EMBEDDING, _nbits(seen, _sturdy), SENSITIVE_PER_TOKEN),
        target=(EXACT,),
        draft=lambda seen: (EMBEDDING, _nbits(seen, _not_lm_head, HEAD_BLOCK), LM_HEAD_PER_TOKEN),
    ),
}
TENSORRT = {
    "fp16": Recipe("fp16"),
    "int8": Recipe("fp16", lambda seen: (_static(seen, np.int8(0)), WEIGHTS), calibrated=True),
    "int8-weight": Recipe("fp16", lambda _: (WEIGHTS,)),
    "int4": Recipe("fp16", lambda seen: (_dequantized(seen), SENSITIVE_WEIGHTS)),
}
CUDA = {
    "fp32": Recipe("fp32"),
    "fp16": Recipe("fp16"),
    "int4": Recipe("fp16", lambda seen: (_nbits(seen, _not_lm_head),)),
}
RECIPES = {"cpu": CPU, "tensorrt-rtx": TENSORRT, "tensorrt": TENSORRT, "cuda": CUDA}


def draft_precision_beside(backend: str, precision: str) -> str:
    """Precision of a head whose own was not named, by its target's."""
    recipe = RECIPES[backend].get(precision)
    return precision if recipe is None or recipe.beside is None else recipe.beside


def plan(
    backend: str,
    precision: str,
    draft_precision: str | None,
    calibration: Calibration | None,
    draft_vocab: int | None = None,
    kept: Sequence[str] = (),
) -> Plan:
    """The passes for a target and its head. draft_precision: None for a target alone. draft_vocab: tokens that the head
    keeps, None for all that it knows. kept: patterns of the target's layers that are left as they are traced.

    Raises ExportError for a precision that the backend cannot run, precisions that do not mix, and a calibration that
    is missing."""
    recipes = RECIPES[backend]
    for name in (precision, draft_precision or precision):
        if name not in recipes:
            raise ExportError(f"backend {backend} does not run {name}; choose one of {', '.join(recipes)}")
        if recipes[name].calibrated and calibration is None:
            raise ExportError(
                f"{name} for backend {backend} needs the ranges of its inputs; export in fp32, run eagle-calib on the "
                "bundle and give its folder with --calibration"
            )
    seen = (None, None) if calibration is None else (calibration.target, calibration.draft)
    target = recipes[precision]
    passes = {"target": target.target + target.passes(seen[0])}
    if kept:
        if not passes["target"]:
            raise ExportError(f"{precision} keeps every layer as it is; name layers to keep with a narrower precision")
        passes["target"] = (Pass(KEEP, partial(keep, patterns=kept)), *passes["target"])
    if draft_precision is None:
        return Plan(target.traced, passes)
    draft = recipes[draft_precision]
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
    return Plan(target.traced, {**passes, "draft": trim + (draft.draft or draft.passes)(seen[1])})


def apply(passes: tuple[Pass, ...], model: ir.Model) -> dict[str, str]:
    """Run passes over a graph, in place. Returns tensor name -> what was done to it. Raises ExportError."""
    done: dict[str, str] = {}
    for step in passes:
        changed = step.apply(model)
        if not changed and passes[0].name == KEEP:
            raise ExportError(f"no layer is left for pass {step.name!r}; keep fewer, or choose a wider precision")
        if not changed:
            raise ExportError(f"pass {step.name!r} found nothing to change in the graph; report this as a bug")
        done |= changed
    return done
