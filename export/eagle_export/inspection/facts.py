"""What config.json and the headers of the weights say of a target, of a head, and of whether they belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS
from eagle_export.heads.layout import HeadLayout
from eagle_export.heads.layouts import official
from eagle_export.heads.prediction import prediction_layers, without_prediction_layers
from eagle_export.heads.reading import head_problems, read_head_config
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.reading.families.family import Family
from eagle_export.reading.families.registry import check_config, family_of
from eagle_runtime.core.target import SHORT_CHUNK


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target. family: None for one that is not known. problems: why it cannot be exported, a sentence each.
    parameters: numbers in its tensors, of which a token needs `active`. key_shapes: heads and width of a token's key
    in each layer that has one; state_size: numbers that a cache holds of layers with a state. context: tokens, None if
    unknown. experts: per layer, and how many of them a row needs; None without a mixture."""

    name: str
    model_type: str
    family: Family | None
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    parameters: int
    active: int
    stored: str
    bytes: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    key_shapes: tuple[tuple[int, int], ...]
    state_size: int
    intermediate_size: int
    vocab_size: int
    context: int | None
    tied: bool
    experts: tuple[int, int] | None

    @property
    def several_shapes(self) -> bool:
        """Whether keys differ in shape, as Gemma-4's."""
        return len(set(self.key_shapes)) > 1


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """A head. layout, config: None for one that is not known, or does not fit. problems: why it cannot be exported with
    this target, a sentence each. stated_target: the model that its config names, if it does. notes: what of it is left
    out, a sentence each."""

    name: str
    layout: HeadLayout | None
    config: HeadConfig | None
    problems: tuple[str, ...]
    parameters: int
    stored: str
    bytes: int
    hidden_size: int | None
    draft_vocab_size: int | None
    stated_target: str | None
    notes: tuple[str, ...]
    official: Checkpoint | None = field(repr=False)


def target_facts(whole: Checkpoint) -> TargetFacts:
    """Raises ExportError for a config without the sizes that every model has: why it cannot be exported, if that is
    known, as of a family that calls them otherwise."""
    target = without_prediction_layers(whole)
    problems: list[str] = []
    family: Family | None = None
    try:
        family = family_of(target)
        check_config(family, target)
    except ExportError as error:
        problems.append(str(error))
    try:
        facts = _sized(target, family, problems)
    except ExportError as error:
        raise ExportError(problems[0] if problems else str(error)) from None
    notes = [*whole.notes, *facts.notes]
    if family is not None:
        problems += _shape_problems(target, facts, family)
        notes += _prediction_notes(whole, facts)
    return replace(facts, problems=tuple(problems), notes=tuple(notes))


def _sized(target: Checkpoint, family: Family | None, problems: Sequence[str]) -> TargetFacts:
    """The facts but for problems and notes of what lies beside the target."""
    nested = target.config.get("text_config")
    config = nested if family is None and isinstance(nested, Mapping) else target.config
    sizes = Checkpoint(target.folder, config, target.tensors)
    hidden, heads = sizes.integer("hidden_size"), sizes.integer("num_attention_heads")
    kv_heads = sizes.integer("num_key_value_heads", heads)
    # Some configs leave out a head_dim that is not hidden / heads: it is as the first layer's projection has it.
    q = target.tensors.get("model.layers.0.self_attn.q_proj.weight")
    rows = hidden if q is None or len(q.shape) != 2 else q.shape[0]
    head_dim = sizes.integer("head_dim", max(rows // heads, 1))
    readable = None if problems else family
    experts = None if readable is None or readable.experts is None else readable.experts.counts(config)
    return TargetFacts(
        name=str(target.folder),
        model_type=str(target.config.get("model_type")),
        family=family,
        problems=(),
        notes=tuple(_notes(target, readable, config, experts)),
        parameters=target.numbers,
        active=target.active(experts),
        stored=_types(target),
        bytes=_bytes(target),
        hidden_size=hidden,
        num_layers=sizes.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        state_size=_state_size(target, family),
        key_shapes=_key_shapes(target, family, heads, head_dim)
        or ((kv_heads, head_dim),) * sizes.integer("num_hidden_layers"),
        intermediate_size=sizes.integer("intermediate_size"),
        vocab_size=sizes.integer("vocab_size"),
        context=None if readable is None else _context(readable, config),
        tied=LM_HEAD not in target.tensors,
        experts=experts,
    )


def head_facts(head: Checkpoint, target: TargetFacts, checkpoint: Checkpoint) -> HeadFacts:
    """checkpoint: the target's."""
    problems: list[str] = []
    layout: HeadLayout | None = None
    config: HeadConfig | None = None
    read = head
    try:
        layout, read = official(head)
    except ExportError as error:
        problems.append(str(error))
    sizes = (target.hidden_size, target.num_layers, target.vocab_size)
    if layout is not None:
        kind = KINDS[layout.kind]
        read = kind.beside(read, checkpoint.config)
        problems += head_problems(read, layout, *sizes)
        if not kind.reads_taps and not kind.has_lm_head(read, target.vocab_size):
            problems += _borrowed_problems(read, checkpoint)
        if layout.names is not None:
            head = replace(head, tensors=read.tensors)
        if not problems:
            config = read_head_config(read, layout, *sizes)
    fc, lm_head = read.tensors.get("fc.weight", read.tensors.get("pre_projection.weight")), read.tensors.get(LM_HEAD)
    return HeadFacts(
        name=str(head.folder),
        layout=layout,
        config=config,
        problems=tuple(problems),
        parameters=head.numbers,
        stored=_types(head),
        bytes=_bytes(head),
        hidden_size=None if fc is None or not fc.shape else fc.shape[0],
        draft_vocab_size=None if lm_head is None or not lm_head.shape else lm_head.shape[0],
        stated_target=_stated_target(head.config),
        notes=() if layout is None or (note := KINDS[layout.kind].note(head)) is None else (note,),
        official=None if layout is None else read,
    )


def _context(family: Family, config: Mapping[str, Any]) -> int | None:
    """The longest text; None if config.json leaves it to the defaults of transformers."""
    if not isinstance(config.get("max_position_embeddings"), int):
        return None
    rope = dict(config.get("rope_parameters") or {}) | dict(config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    rope["rope_type"] = "longrope" if kind == "su" else kind
    rope.setdefault("original_max_position_embeddings", config.get("original_max_position_embeddings"))
    if rope["original_max_position_embeddings"] is None:
        rope["original_max_position_embeddings"] = config["max_position_embeddings"]
    return family.context(SimpleNamespace(**{**config, "rope_parameters": rope}))


def _notes(
    target: Checkpoint, family: Family | None, config: Mapping[str, Any], experts: tuple[int, int] | None
) -> list[str]:
    notes = []
    if LM_HEAD in target.tensors and config.get("tie_word_embeddings") is True:
        notes.append(
            "its config ties the LM head to the embedding, and both are stored: the sizes count both, but an export "
            "compares their values and stores one if they are equal"
        )
    if family is not None and config.get("attn_logit_softcapping"):
        notes.append("its attention has bounded scores, which TensorRT cannot run: for backend cpu or cuda alone")
    if experts is not None:
        notes.append(
            f"backend cpu reads the {experts[1]} experts of a layer that a row needs; the others all {experts[0]}"
        )
    return notes


def _prediction_notes(target: Checkpoint, facts: TargetFacts) -> list[str]:
    """What can be done with multi-token-prediction layers in a target's checkpoint."""
    count = len(set(prediction_layers(target).values()))
    if not count:
        return []
    what = "a multi-token-prediction layer" if count == 1 else f"{count} multi-token-prediction layers"
    sizes = (facts.hidden_size, facts.num_layers, facts.vocab_size)
    try:
        layout, read = official(target)
        reasons = head_problems(read, layout, *sizes) + _borrowed_problems(read, without_prediction_layers(target))
    except ExportError as error:
        reasons = [str(error)]
    if reasons:
        return [f"it has {what}, which cannot draft: {reasons[0]}"]
    which = "it" if count == 1 else "the first of them"
    return [f"it has {what} ({layout.producer}); eagle-export {target.folder} {target.folder} drafts with {which}"]


def _shape_problems(target: Checkpoint, facts: TargetFacts, family: Family) -> list[str]:
    """Where the headers contradict the config."""
    problems: list[str] = []

    def want(name: str, shape: tuple[int | None, ...], *, if_there: bool = False) -> None:
        if if_there and name not in target.tensors:
            return
        try:
            target.require(name, shape)
        except ExportError as error:
            problems.append(str(error))

    hidden, width = facts.hidden_size, facts.head_dim
    want(EMBEDDING, (facts.vocab_size, hidden))
    want(LM_HEAD, (facts.vocab_size, hidden), if_there=True)
    for layer in (0,) if facts.several_shapes else (0, facts.num_layers - 1):
        name = f"model.layers.{layer}"
        want(f"{name}.{family.mlp_norm}.weight", (hidden,))
        queries = facts.num_heads * width * family.query_parts
        want(f"{name}.self_attn.q_proj.weight", (queries, hidden), if_there=True)
        want(f"{name}.self_attn.k_proj.weight", (facts.num_kv_heads * width, hidden), if_there=True)
        fused = (facts.num_heads + 2 * facts.num_kv_heads) * width
        want(f"{name}.self_attn.qkv_proj.weight", (fused, hidden), if_there=True)
        want(f"{name}.mlp.gate_proj.weight", (facts.intermediate_size, hidden), if_there=True)
    more = f"model.layers.{facts.num_layers}."
    if any(name.startswith(more) for name in target.tensors):
        problems.append(
            f"{target.folder}: the tensors are of more than the {facts.num_layers} layers that config.json states; "
            "config and weights do not belong together"
        )
    return problems


def _key_shapes(target: Checkpoint, family: Family | None, heads: int, head_dim: int) -> tuple[tuple[int, int], ...]:
    """Heads and width of a token's key in each layer that has one; none where keys are computed with other parts.
    heads: of queries, which are as wide. head_dim: of a layer without attention."""
    convolution = "" if family is None or not family.convolution else f".{family.convolution}.conv.weight"
    widths = heads * (1 if family is None else family.query_parts)  # in the rows of queries
    shapes = []
    for name, each in target.tensors.items():
        if name.endswith(".self_attn.k_proj.weight"):
            queries = target.tensors.get(name.replace("k_proj", "q_proj"))
            width = head_dim if queries is None else max(queries.shape[0] // widths, 1)
            shapes.append((each.shape[0] // width, width))
        elif convolution and name.endswith(convolution):  # half of what is cached stands in the place of a value
            shapes.append((each.shape[0] // 2 // head_dim, head_dim))
    return tuple(shapes)


def _state_size(target: Checkpoint, family: Family | None) -> int:
    """Numbers that a cache holds of layers that have states and no keys: of each two states, and two chunks of rows."""
    if family is None or not family.with_state:
        return 0
    count = sum(name.endswith(f".{family.with_state}.A_log") for name in target.tensors)
    keys, width, heads, value_width = family.state_sizes(target)
    row = 2 * keys * width + heads * (value_width + (2 if family.delta else 1))
    return 2 * count * (heads * width * value_width + SHORT_CHUNK * row)


def _borrowed_problems(head: Checkpoint, target: Checkpoint) -> list[str]:
    """Whether an EAGLE-1 head's copy of the LM head has the target's shape."""
    theirs = target.tensors.get(LM_HEAD, target.tensors.get(EMBEDDING))
    if LM_HEAD not in head.tensors or theirs is None:
        return []
    try:
        head.require(LM_HEAD, theirs.shape)
    except ExportError as error:
        return [str(error)]
    return []


def _stated_target(config: Mapping[str, Any]) -> str | None:
    """The target that a head's config names: speculators, AngelSlim, Medusa and Hydra write one."""
    settings = config.get("speculators_config")
    verifier = settings.get("verifier") if isinstance(settings, Mapping) else None
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else config.get("base_model_name_or_path")
    return named if isinstance(named, str) else None


def _types(checkpoint: Checkpoint) -> str:
    """The types of the tensors, the one of most numbers first."""
    return ", ".join(kind for kind, _ in checkpoint.numbers_of_types.most_common())


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(each.num_bytes for each in checkpoint.tensors.values())
