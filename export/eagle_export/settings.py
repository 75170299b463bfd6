"""Settings of an export that do not go with its models or its backend: refused, or noted, before any work."""

from __future__ import annotations

from eagle_export.errors import ExportError
from eagle_export.pair import HeadPart, Pair, left_out_note
from eagle_export.recipes.int8_cache import MOST
from eagle_export.recipes.plan import routes_experts
from eagle_export.reconcile import untied_note


def check_settings(pair: Pair, backend: str, cache_precision: str | None, draft_vocab: int | None) -> None:
    """Raises ExportError for what a pair cannot have. cache_precision, draft_vocab: as for bundle.export."""
    target, head = pair.target.folder, pair.head
    if cache_precision is not None and pair.context > MOST:
        raise ExportError(
            f"{target} has a context of {pair.context} tokens, and an int8 cache holds "
            f"{MOST} at most; export it without one"
        )
    if cache_precision is not None and (any(pair.windows) or pair.bounded_scores):
        what = "layers with a sliding window" if any(pair.windows) else "attention with bounded scores"
        raise ExportError(f"{target} has {what}, which an int8 cache cannot have; export it without one")
    if pair.bounded_scores and backend in ("tensorrt", "tensorrt-rtx"):
        raise ExportError(
            f"{target} is a {pair.family.name} model: its attention has bounded scores, which TensorRT cannot run; "
            "export it for backend cpu"
        )
    if head is not None and head.config.block is not None and (backend == "cuda" or draft_vocab):
        what = "do not run on backend cuda" if backend == "cuda" else "keep all tokens of their LM head"
        raise ExportError(
            f"{head.checkpoint.folder} is a block head, and block heads {what}; change that setting, or the head"
        )
    if head is not None and head.config.ahead is not None:
        _check_ahead(head, backend, draft_vocab)


def notes_on(pair: Pair, backend: str) -> list[str]:
    """Returns warnings: contradictions within the target and how they were decided, what of a pair is left out, or
    computed in vain. Reads an LM head that the config does not expect."""
    notes = [*pair.target.notes, *pair.generation.notes]
    if (untied := untied_note(pair.target)) is not None:
        notes.append(untied)
    if pair.family.experts is not None and not routes_experts(backend):
        notes.append(
            f"all {pair.family.experts.count(pair.config)} experts of a layer are computed for every row, not only "
            f"the {pair.config.num_experts_per_tok} that it needs"
        )
    if (left_out := left_out_note(pair)) is not None:
        notes.append(left_out)
    return notes


def _check_ahead(head: HeadPart, backend: str, draft_vocab: int | None) -> None:
    """Raises ExportError for what Medusa's and Hydra's heads cannot have."""
    if backend in ("tensorrt", "tensorrt-rtx"):
        raise ExportError(
            f"{head.checkpoint.folder} holds {head.config.kind.capitalize()} heads, which run on ONNX Runtime alone; "
            "export them for backend cpu or cuda"
        )
    if draft_vocab is not None:
        raise ExportError(
            f"{head.checkpoint.folder} holds {head.config.kind.capitalize()} heads, whose LM heads keep all tokens; "
            "leave the draft vocabulary out"
        )
