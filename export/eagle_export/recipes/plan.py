"""Which passes rewrite which graph, in which order: one table per backend.

A precision traces both graphs in one type ("fp32" or "fp16") and then applies a list of passes to each, from left to
right. PLACES says why each pass stands where it does. A pass whose pattern matches nothing stops the export.

Only targets get ExactAttention: it makes quantised decoding equal to the last bit with and without drafts, while a head
changes speed and acceptance, never the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Calibration, Observed
from eagle_export.base.errors import ExportError
from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.blocks import Grid
from eagle_export.recipes.embedding import EmbeddingBlocks, EmbeddingFp16
from eagle_export.recipes.fp16_sums import Fp16Sums
from eagle_export.recipes.graph import KEPT_WIDE, Linear, Pass, fed_by_norm, is_lm_head, linears, narrows
from eagle_export.recipes.int8 import Int8PerToken, simulated_tokens
from eagle_export.recipes.int8_cache import Int8Cache
from eagle_export.recipes.keep import KeepLayers
from eagle_export.recipes.qdq import Fp8Static, Int8Static, Int8Weights, simulated_static
from eagle_export.recipes.smooth import Simulate, Smooth
from eagle_export.recipes.vocabulary import TrimVocabulary
from eagle_export.recipes.weight_blocks import Int4Dequantized, StoredBlocks, WeightBlocks, simulated_blocks

# Blocks as measured in docs/dev/precision.md. 128 channels would be a fifth faster than 64 and less exact; sums over 64
# and more differ between one row and several, so that the runtime pads one row to two.
INT8, INT4 = Grid(8, 64, asymmetric=True), Grid(4, 128, asymmetric=True)
# Of int4: the LM head, whose errors nothing after it evens out, and the embedding.
TABLES = Grid(4, 32, asymmetric=True)
MIXED = Grid(4, 32, asymmetric=True)  # the layers of int4-int8 that are in four bits
HEAD = Grid(4, 128, asymmetric=True)  # two thirds of the time of 32, for 1 % of acceptance
AUTO = "auto"  # the precision whose layers are chosen by measuring (automatic.py)
STORED_BITS = "stored"  # the precision whose layers have the source's own four bits, if it has them (as_stored.py)
BY_VALUES = (AUTO, STORED_BITS)  # in these a weight's values say how wide it is; none is wider than in int8
AUTO_GRIDS = (INT4, TABLES, Grid(4, 16, asymmetric=True), INT8)  # what they are chosen from
OF_HEAD = "head."  # before the names of a head's own weights
SIGNED, UNSIGNED = np.int8(0), np.uint8(128)  # zero points of static int8: see Int8Static

Observations = Mapping[str, Observed]
Passes = tuple[Pass[Any], ...]


def in_int4(linear: Linear) -> bool:
    """Whether an int4-int8 target stores a layer in four bits: q, gate and up. The other layers lose more per byte
    saved: o and down write what all later layers read, k and v are few and serve several query heads, and small errors
    of the LM head change which token ranks first."""
    return fed_by_norm(linear) and not narrows(linear) and not is_lm_head(linear)


def grid_in_int4(linear: Linear) -> Grid | None:
    """The grid of a layer of an int4 target that does not have INT4. k and v, if they are narrower than q, are in eight
    bits: each of their columns serves several query heads, and they are 3 % of the weights of a Llama with 8 of 32
    heads."""
    if is_lm_head(linear):
        return TABLES
    return INT8 if fed_by_norm(linear) and narrows(linear) else None


@dataclass(frozen=True, slots=True)
class Recipe:
    """traced: type of the traced graphs. target, draft: the passes of each graph in order, given what the calibration
    observed there (None without one); draft None: as target. calibrated: whether a calibration is required.
    self_calibrated: whether without one inputs are recorded from the checkpoint (self_calibration.py).
    draft_precision: precision of the head if none is asked for; None: the target's."""

    traced: str
    target: Callable[[Observations | None], Passes] = lambda _: ()
    draft: Callable[[Observations | None], Passes] | None = None
    calibrated: bool = False
    self_calibrated: bool = False
    draft_precision: str | None = None


PLACES: dict[type[Pass[Any]], str] = {
    KeepLayers: "first: it hides layers from all passes after it",
    TrimVocabulary: "before the passes that quantise a head, so that they see only the columns that stay",
    EmbeddingFp16: "anywhere: no other pass looks at the lookup of input_ids",
    Fp8Static: "before Int8Weights, which takes the LM head",
    Int8Static: "before Int8PerToken and Int8Weights, which take all layers that are left",
    ExactAttention: "after Smooth, else anywhere: no other pass looks at attention",
    Smooth: "before ExactAttention: it follows o_proj's input back through the Attention node to v_proj; before the "
    "passes that round weights",
    Int8Cache: "in the place of ExactAttention, if the cache is to be int8",
    WeightBlocks: "before Int8PerToken, which takes all layers that are left",
    StoredBlocks: "in the place of WeightBlocks",
    EmbeddingBlocks: "after WeightBlocks: an embedding that is also the LM head is stored once, as rounded there",
    Fp16Sums: "after Int8Static and Fp8Static, whose sums are not in fp16; before the passes that round weights",
    Int4Dequantized: "in any order with Int8Weights: each names its own layers",
    Int8PerToken: "last: it takes all layers that are left",
    Int8Weights: "last: it takes all layers that are left, or those that int4 does not",
}


def smoothed(seen: Observations | None, simulate: Simulate) -> Passes:
    """Smoothing before a quantisation, where inputs were recorded."""
    return () if seen is None else (Smooth(seen, simulate),)


def in_blocks(
    seen: Observations | None,
    grid: Grid,
    table: EmbeddingBlocks,
    other: Callable[[Linear], Grid | None] = lambda _: None,
) -> Passes:
    """The passes of a target whose layers are all in blocks. other: as in WeightBlocks."""
    blocks = WeightBlocks(grid, seen, other=other)
    return (*smoothed(seen, partial(simulated_blocks, grid)), ExactAttention(), blocks, table)


def in_static_int8(seen: Observations | None, *attention: ExactAttention) -> Passes:
    """The passes of a graph for a CPU whose inputs have one scale for all rows."""
    static = Int8Static(seen, UNSIGNED)
    return (*smoothed(seen, simulated_static), EmbeddingFp16(), static, *attention, Int8PerToken())


def auto_passes(seen: Observations | None, grids: Mapping[str, Grid]) -> Passes:
    """The passes of a target in "auto". grids: by weight name; other weights have those of int4. Layers are smoothed
    for int4, which does no harm to wider ones."""

    def grid_of(linear: Linear) -> Grid | None:
        return grids.get(linear.name) or (TABLES if is_lm_head(linear) else None)

    return in_blocks(seen, INT4, EmbeddingBlocks(TABLES, grids), grid_of)


def head_in_int4(seen: Observations | None) -> Passes:
    """The passes of a head in int4, whose LM head is in int8: it says which tokens rank first. So is its embedding."""
    return WeightBlocks(HEAD, seen, other=lambda linear: INT8 if is_lm_head(linear) else None), EmbeddingBlocks(INT8)


CPU = {
    "fp32": Recipe("fp32"),
    "fp16": Recipe("fp16"),
    "int8": Recipe(
        "fp32",
        target=lambda seen: in_blocks(seen, INT8, EmbeddingBlocks(INT8)),
        draft=lambda _: (EmbeddingFp16(), Int8PerToken()),
        self_calibrated=True,
        draft_precision="int4",
    ),
    "int8-token": Recipe(
        "fp32",
        target=lambda seen: (
            *smoothed(seen, simulated_tokens),
            ExactAttention(),
            EmbeddingFp16(),
            Int8PerToken(),
        ),
        draft=lambda _: (EmbeddingFp16(), Int8PerToken()),
        self_calibrated=True,
        draft_precision="int4",
    ),
    "int8-static": Recipe(
        "fp32",
        target=lambda seen: in_static_int8(seen, ExactAttention()),
        draft=in_static_int8,
        calibrated=True,
    ),
    "int8-weight": Recipe(
        "fp32",
        target=lambda _: (ExactAttention(), EmbeddingFp16(), Int8Weights()),
        draft=lambda _: (EmbeddingFp16(), Int8Weights()),
    ),
    "int4": Recipe(
        "fp32",
        target=lambda seen: in_blocks(seen, INT4, EmbeddingBlocks(TABLES), grid_in_int4),
        draft=head_in_int4,
        self_calibrated=True,
    ),
    STORED_BITS: Recipe(
        "fp32",
        target=lambda _: (ExactAttention(), StoredBlocks(INT8), EmbeddingBlocks(INT8)),
        draft=head_in_int4,
        self_calibrated=True,
        draft_precision="int4",
    ),
    "int4-int8": Recipe(
        "fp32",
        target=lambda seen: (
            *smoothed(seen, partial(simulated_blocks, MIXED)),
            ExactAttention(),
            EmbeddingFp16(),
            WeightBlocks(MIXED, seen, wanted=in_int4),
            Int8PerToken(),
        ),
        draft=head_in_int4,
        self_calibrated=True,
        draft_precision="int4",
    ),
}
CPU[AUTO] = dataclasses.replace(CPU["int4"], target=lambda seen: auto_passes(seen, {}))
TENSORRT = {
    "fp16": Recipe("fp16"),
    "int8": Recipe(
        "fp16",
        target=lambda seen: (
            *smoothed(seen, simulated_static),
            Int8Static(seen, SIGNED),
            Fp16Sums(seen),
            Int8Weights(),
        ),
        calibrated=True,
    ),
    "int8-weight": Recipe("fp16", target=lambda seen: (Fp16Sums(seen), Int8Weights())),
    "fp8": Recipe("fp16", target=lambda seen: (Fp8Static(seen), Fp16Sums(seen), Int8Weights()), calibrated=True),
    "int4": Recipe(
        "fp16", target=lambda seen: (Fp16Sums(seen), Int4Dequantized(MIXED.size, seen)), self_calibrated=True
    ),
    "int4-int8": Recipe(
        "fp16",
        target=lambda seen: (
            Fp16Sums(seen),
            Int4Dequantized(MIXED.size, seen, wanted=in_int4),
            Int8Weights(wanted=lambda linear: not in_int4(linear)),
        ),
        self_calibrated=True,
    ),
}
CUDA = {
    "fp32": Recipe("fp32"),
    "fp16": Recipe("fp16"),
    "int4": Recipe(
        "fp16",
        target=lambda seen: (WeightBlocks(MIXED, seen, wanted=lambda linear: not is_lm_head(linear)),),
        self_calibrated=True,
    ),
}
RECIPES = {"cpu": CPU, "tensorrt-rtx": TENSORRT, "tensorrt": TENSORRT, "cuda": CUDA}


@dataclass(frozen=True, slots=True)
class Plan:
    """traced: type that both graphs are traced in. passes: of graph "target" and, where there is a head, "draft"."""

    traced: str
    passes: dict[str, Passes]


def routes_experts(backend: str) -> bool:
    """Whether experts are computed for the rows that are routed to them alone (routed_experts.py)."""
    return backend == "cpu"


def default_draft_precision(backend: str, precision: str) -> str:
    """The precision of a head next to a target of this precision, if none is asked for."""
    return RECIPES[backend][precision].draft_precision or precision


def check_runs(backend: str, precision: str) -> None:
    """Raises ExportError for a backend that there is not, and a precision that it cannot run."""
    if backend not in RECIPES:
        raise ExportError(f"there is no backend {backend}; choose one of {', '.join(RECIPES)}")
    if precision not in RECIPES[backend]:
        raise ExportError(f"backend {backend} does not run {precision}; choose one of {', '.join(RECIPES[backend])}")


def plan(
    backend: str,
    precision: str,
    draft_precision: str | None,
    calibration: Calibration | None,
    draft_vocab: int | None = None,
    kept: Sequence[str] = (),
    cache_precision: str | None = None,
    recorded: Observations | None = None,
    grids: Mapping[str, Grid] | None = None,
) -> Plan:
    """The passes for a target and its head.

    recorded: inputs of both graphs' layers where there is no calibration (self_calibration.py). grids: of the
    weights of a target in "auto", by name. draft_precision: None for a target without a head.
    draft_vocab: number of tokens that the head keeps, None for all. kept: patterns of names of the target's layers that
    stay as traced. cache_precision: "int8" for a target that keeps its keys and values in bytes, None for one that
    keeps them as it computes them. Raises ExportError for a precision that the backend cannot run, two precisions that
    do not fit together, or a missing calibration."""
    recipes = RECIPES[backend]
    for name in (precision, draft_precision or precision):
        check_runs(backend, name)
        if recipes[name].calibrated and calibration is None:
            raise ExportError(
                f"{name} for backend {backend} needs recorded inputs; export in fp32, run eagle-calib on the bundle "
                "and give the folder that it writes as calibration"
            )
    target = recipes[precision]
    seen = recorded if calibration is None else calibration.target
    target_passes = auto_passes(seen, grids or {}) if precision == AUTO else target.target(seen)
    if cache_precision is not None:
        target_passes = _with_int8_cache(target_passes, backend, precision, cache_precision)
    if kept and not target_passes:
        raise ExportError(f"{precision} keeps every layer as it is; name layers to keep with a narrower precision")
    if kept:
        target_passes = (KeepLayers(tuple(kept)), *target_passes)
    if draft_precision is None:
        return Plan(target.traced, {"target": target_passes})
    draft = recipes[draft_precision]
    if target.traced != draft.traced:
        raise ExportError(
            f"a target in {precision} hands {target.traced} features to its head, which a head in {draft_precision} "
            "cannot read; choose the same precision for both, or none of them fp16"
        )
    if recorded is not None and not any(name.startswith(OF_HEAD) for name in recorded):
        recorded = None  # of the target alone: torch does not run every head
    draft_passes = (draft.draft or draft.target)(recorded if calibration is None else calibration.draft)
    if draft_vocab is not None:
        if calibration is None:
            raise ExportError(
                "a draft vocabulary is chosen by how often tokens occur; export in fp32, run eagle-calib on the bundle "
                "and give the folder that it writes as calibration"
            )
        draft_passes = (TrimVocabulary(draft_vocab, calibration.token_counts), *draft_passes)
    return Plan(target.traced, {"target": target_passes, "draft": draft_passes})


def _with_int8_cache(passes: Passes, backend: str, precision: str, cache_precision: str) -> Passes:
    """Returns the passes of a target, with Int8Cache in the place of ExactAttention. Raises ExportError."""
    if cache_precision != "int8":
        raise ExportError(f"no cache is kept in {cache_precision}; choose int8, or leave it out")
    if not any(isinstance(step, ExactAttention) for step in passes):
        wider = [name for name, recipe in CPU.items() if not recipe.calibrated and recipe.target(None)]
        raise ExportError(
            f"a target in {precision} for backend {backend} keeps keys and values as it computes them; an int8 cache "
            f"is for backend cpu and one of {', '.join(wider)}"
        )
    return tuple(Int8Cache() if isinstance(step, ExactAttention) else step for step in passes)


def apply(passes: Passes, model: ir.Model) -> dict[str, str]:
    """Runs passes over a graph, in place. Returns weight or node name -> what was done to it. Raises ExportError."""
    done: dict[str, str] = {}
    reads_tokens = [value.name for value in model.graph.inputs] != ["features"]
    for step in passes:
        if isinstance(step, (EmbeddingFp16, EmbeddingBlocks)) and not reads_tokens:
            continue  # Medusa's heads
        changed = step.apply(model)
        if not changed and any(KEPT_WIDE in node.meta for node in model.graph):
            if isinstance(step, Smooth) and linears(model):
                continue  # what computes the input of the layers that are left cannot absorb a factor
            raise ExportError(f"no layer is left for pass {step.name!r}; keep fewer, or choose a wider precision")
        if not changed:
            raise ExportError(
                f"pass {step.name!r} found nothing to change in the graph; choose another precision, and report this "
                "as a bug"
            )
        done |= changed
    return done
