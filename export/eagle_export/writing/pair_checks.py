"""Settings that do not go with a pair or a backend, refused before any work, and what is noted of a pair."""

from __future__ import annotations

from eagle_export.base.errors import ExportError
from eagle_export.graphs.pair import HeadPart, Pair, left_out_note
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import linear_layers
from eagle_export.reading.reconcile import rowless_note
from eagle_export.recipes.as_stored import FOUR_BITS
from eagle_export.recipes.int8_cache import MOST
from eagle_export.recipes.plan import routes_experts
from eagle_runtime.base.errors import TemplateError
from eagle_runtime.text.tokenizer import Text

# What backends other than cpu do not have, nor an int8 cache.
SEVERAL_SHAPES = "layers with keys of several shapes"
CONVOLUTIONS = "layers with a convolution in the place of attention"
STATES = "layers with a state in the place of attention"


def check_settings(pair: Pair, backend: str, cache_precision: str | None, draft_vocab: int | None) -> None:
    """Raises ExportError for what a pair cannot have. cache_precision, draft_vocab: as in Settings."""
    target, head = pair.target.folder, pair.head
    if cache_precision is not None and pair.context > MOST:
        raise ExportError(
            f"{target} has a context of {pair.context} tokens, and an int8 cache holds "
            f"{MOST} at most; export it without one"
        )
    reasons = {
        "layers with a sliding window": any(pair.windows),
        "attention with bounded scores": pair.bounded_scores,
        "attention with sinks": pair.has_sinks,
        CONVOLUTIONS: pair.family.convolution != "",
        SEVERAL_SHAPES: pair.several_shapes,
    }
    what = next((reason for reason, holds in reasons.items() if holds), None)
    if cache_precision is not None and what is not None:
        raise ExportError(f"{target} has {what}, which an int8 cache cannot have; export it without one")
    reasons[STATES] = linear_layers(pair.config) > 0  # which an int8 cache leaves as they are
    on_cpus = next((reason for reason in (CONVOLUTIONS, STATES, SEVERAL_SHAPES) if reasons[reason]), None)
    if on_cpus is not None and backend != "cpu":
        raise ExportError(f"{target} has {on_cpus}, which backend {backend} cannot run; export it for backend cpu")
    if pair.bounded_scores and backend in ("tensorrt", "tensorrt-rtx"):
        raise ExportError(
            f"{target} is a {pair.family.name} model: its attention has bounded scores, which TensorRT cannot run; "
            "export it for backend cpu"
        )
    if head is not None and (problem := _problem_of_head(head, backend, draft_vocab)) is not None:
        raise ExportError(
            f"{head.checkpoint.folder} holds a head of kind {head.config.kind}, and such heads {problem}; change that "
            "setting, or the head"
        )


def notes_on(pair: Pair, backend: str) -> list[str]:
    """Returns warnings: contradictions within the target and how they were decided, what of a pair is left out, or
    computed in vain."""
    notes = [*pair.target.notes, *pair.generation.notes]
    if (rowless := rowless_note(pair.target, pair.text, int(pair.config.vocab_size))) is not None:
        notes.append(rowless)
    notes += unreadable_templates(pair.text)
    if pair.family.experts is not None and not routes_experts(backend):
        notes.append(
            f"all {pair.family.experts.count(pair.config)} experts of a layer are computed for every row, not only "
            f"the {pair.config.num_experts_per_tok} that it needs"
        )
    if (left_out := left_out_note(pair)) is not None:
        notes.append(left_out)
    return notes


def unreadable_templates(text: Text) -> list[str]:
    """Returns what is wrong with chat templates that the runtime cannot read."""
    found: dict[str, None] = {}
    for tools in (False, True) if text.chat else ():
        try:
            text.template(tools=tools)
        except TemplateError as error:
            found[f"{error}; until then the bundle takes no chats"] = None
    return list(found)


def rounded_again(target: Checkpoint, backend: str, precision: str) -> list[str]:
    """Returns a warning where int4 rounds weights that a file has in four bits."""
    sizes = target.numbers_of_types
    in_four = [kind for kind in FOUR_BITS if kind in sizes]
    if (backend, precision) != ("cpu", "int4") or 2 * sum(sizes[kind] for kind in in_four) < sizes.total():
        return []
    kinds = ", ".join(in_four)
    return [
        f"most weights of {target.folder} are in four bits already ({kinds}), and int4 rounds them again; precision "
        "stored keeps them as they are"
    ]


def _problem_of_head(head: HeadPart, backend: str, draft_vocab: int | None) -> str | None:
    if backend in head.kind.not_on:
        return f"do not run on backend {backend}"
    return "keep all tokens of their LM heads" if draft_vocab is not None and head.kind.all_tokens else None
