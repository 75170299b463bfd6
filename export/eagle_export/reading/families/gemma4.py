"""Gemma-4 (E2B, E4B, 31B): layers that see all keys have wider heads than those with a window, the last layers use keys
and values of layers before them, and each layer adds what a table of its own says of a token. Layers of 26B-A4B have
experts beside their MLP.

Of checkpoints with images and sound (model_type gemma4) the language model is read (nested.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Config, Experts, Family, Rows, by_layer_type, row_sums
from eagle_export.reading.families.gemma import bounded_logits
from eagle_export.reading.families.stacked_experts import unstacked
from eagle_runtime.bundle.manifest import SamplingDefaults

if TYPE_CHECKING:
    from torch import Tensor

LAYER_NORMS = 4  # of the hidden state, before and after attention and MLP
HEAD_NORMS = 3  # of queries, keys and values
EXPERT_NORMS = 4  # before and after experts, before their router, and of the MLP beside them
SLIDING, FULL = "sliding_attention", "full_attention"
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")  # of layers that use other layers' keys, which checkpoints may have


def kept_layers(config: Config) -> int:
    """The first layers, which have keys and values of their own."""
    return int(config.num_hidden_layers) - int(config.num_kv_shared_layers)


def rows(config: Config) -> Rows:
    """Key/value heads and their width, of each layer that has some."""
    layers = (config.per_layer_config[number] for number in range(kept_layers(config)))
    return tuple((int(layer.num_key_value_heads), int(layer.head_dim)) for layer in layers)


def norms(config: Config) -> int:
    """RMS norms of the whole model."""
    layers, of_tokens = int(config.num_hidden_layers), bool(config.hidden_size_per_layer_input)
    heads = layers + (HEAD_NORMS - 1) * kept_layers(config)
    return (LAYER_NORMS + of_tokens) * layers + heads + 1 + of_tokens


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for attention in both directions, and a first layer without a window."""
    where, config = checkpoint.folder / "config.json", checkpoint.config
    if config.get("use_bidirectional_attention") == "all":
        raise ExportError(
            f"{where}: use_bidirectional_attention is 'all', but a token may attend to earlier ones alone"
        )
    if config.get("layer_types", [SLIDING])[:1] != [SLIDING]:
        raise ExportError(f"{where}: layer 0 is not of type {SLIDING!r}, as all published models have it")
    tables = config.get("rope_parameters") or {}
    kinds = {kind: (tables.get(kind) or {}).get("rope_type", known) for kind, known in ROPE.items()}
    if kinds != ROPE:
        raise ExportError(f"{where}: rope_parameters are of types {kinds}, and only {ROPE} are supported")


ROPE = {SLIDING: "default", FULL: "proportional"}


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """Without the keys and values of layers that use others', which transformers leaves out too."""
    shared, layers = checkpoint.config.get("num_kv_shared_layers"), checkpoint.config.get("num_hidden_layers")
    if not isinstance(shared, int) or not isinstance(layers, int):
        return checkpoint
    unused = tuple(
        f"model.layers.{number}.self_attn.{part}." for number in range(layers - shared, layers) for part in UNUSED
    )
    kept = {name: tensor for name, tensor in checkpoint.tensors.items() if not name.startswith(unused)}
    return replace(checkpoint, tensors=kept)


GEMMA4 = Family(
    name="Gemma-4 (text)",
    model_type="gemma4_text",
    causal_lm="Gemma4ForCausalLM",
    norms=norms,
    windows=by_layer_type,
    rows=rows,
    linked=lambda config: bool(config.hidden_size_per_layer_input or config.num_kv_shared_layers),
    logits=bounded_logits,
    refuse=refuse,
    opened=opened,
    since="5.24.0",
    sampling=SamplingDefaults(temperature=1.0, top_k=64, top_p=0.95),
)


def chosen(config: Config, scores: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """As Experts.chosen says. factors [E]: what each expert's weight is multiplied by."""
    best, which = scores.softmax(-1).topk(int(config.num_experts_per_tok))
    return best / row_sums(best) * factors[which], which


def opened_experts(checkpoint: Checkpoint) -> Checkpoint:
    """As `opened`, with a tensor for each matrix of each expert, and with the name that other families have for the
    number of a row's experts. Raises ExportError for experts of an unknown number, or of another shape."""
    count, *_ = map(checkpoint.integer, ("top_k_experts", "num_experts", "moe_intermediate_size"))
    tensors = unstacked(opened(checkpoint))
    return replace(checkpoint, config={**checkpoint.config, "num_experts_per_tok": count}, tensors=tensors)


GEMMA4_MOE = replace(
    GEMMA4,
    name="Gemma-4, with experts",
    norms=lambda config: norms(config) + EXPERT_NORMS * int(config.num_hidden_layers),
    experts=Experts(
        block="",
        module="",
        count=lambda config: int(config.num_experts),
        width=lambda config: int(config.moe_intermediate_size),
        renormalised=lambda config: True,
        router="router.proj",
        stacked=True,
        chosen=chosen,
        correction="router.per_expert_scale",
    ),
    opened=opened_experts,
)
FAMILIES = (replace(GEMMA4, variant=lambda config: GEMMA4_MOE if config.get("enable_moe_block") else None),)
