"""How the producers of block heads write their folders, and the way to the module's names and one flat config.

All share one layout of layers (Qwen3's, or Llama's), fc, hidden_norm and norm. They differ in what is silent: what a
layer id names, whether the root's row drafts, whether a row sees later rows, and where the mask's embedding is.

Letters: i layer of the target, N its layers, D the head's. A tap is an index into transformers' hidden_states: 0 is the
embedding, i + 1 the output of layer i.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle_export.base.errors import ExportError
from eagle_export.heads.layout import LLAMA_TYPES, TRANSFORMERS_DEFAULTS, HeadLayout
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, MASK_FILE, Checkpoint
from eagle_export.reading.stored_tensors import StoredTensor, lone_tensor, same_values
from eagle_runtime.core.head import WINDOW

NESTED, LAYER, MASK = "dflash_config", "transformer_layer_config", "mask_embedding"
MARKOV = ("markov_w1.", "markov_w2.")  # ModelOpt writes them without the module's name
# What other programs need and nothing here reads: confidence may order drafts, and never accepts one; copies of the
# target's own parts.
CONFIDENCE = re.compile(r"confidence_(head|proj)\.")
COPIES = ("verifier_lm_head.weight", "verifier_norm.weight")
REFUSED_TENSORS = (
    (r"(^|\.)(prefix_gru|embed_proj)\.", "a Domino head, whose logits a recurrent network corrects token by token"),
    (r"^(markov_head\.)?gate_proj\.", "a DSpark head with gated transitions"),
    (r"^(markov_head\.)?joint_proj\.", "a DSpark head with recurrent transitions"),
    (r"\.(attention_conv|mlp_conv)\.|^candidate_selector\.", "a DFlash 2 head, with convolutions and a selector"),
    (r"(^|\.)ar_approximation\.", "a TreeFlash head"),
    (r"^(context_proj|context_norm|layer_fusion_weights|hidden_correction)\b", "a DFlare or DFly head"),
    (r"^hidden_dim_adapter\.", "a JetSpec head with an adapter to another width"),
    (r"\.self_attn\.(sinks|attention_sink_bias)", "a head with attention sinks"),
    (r"_scale(_2|_inv)?$|\.(input|weight)_scale", "a quantised head"),
)
REFUSED_CLASSES = (  # of config.json's architectures
    (r"DFlash2", "a DFlash 2 head, with convolutions and a selector"),
    (r"Domino", "a Domino head, whose logits a recurrent network corrects token by token"),
    (r"DFly|DFlare", "a DFlare or DFly head"),
    (r"TreeFlash", "a TreeFlash head"),
    (r"Gemma\d*D(Spark|Flash)", "a block head of Gemma's layers"),
)
REFUSED_KEYS: tuple[tuple[str, tuple[object, ...]], ...] = (  # and the values that can be exported
    ("quantization_config", (None,)),
    ("attention_sink_bias", (None, False)),
    ("input_embedding_scale", (None, 1)),
    ("output_multiplier", (None, 1)),
    ("final_logit_softcapping", (None,)),
    ("projector_type", (None, "dflash", "dspark")),
    ("markov_head_type", (None, "vanilla")),
)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One producer's layout. source: repository and path of the code that writes or reads it.

    architectures: of config.json; kind: speculators_model_type in their place. settings: keys that the config or its
    dflash_config must have, and their values (None: any). id_key: key of the list of layer ids. ids: whether they name
    outputs of layers or taps. anchor: whether the root's row drafts where the config does not say."""

    producer: str
    source: str
    architectures: tuple[str, ...] = ()
    kind: str | None = None
    settings: tuple[tuple[str, object], ...] = ()
    id_key: str = "target_layer_ids"
    ids: Literal["output", "input"] = "output"
    anchor: bool = False

    def fits(self, head: Checkpoint) -> bool:
        """Whether a folder has this layout."""
        config = head.config
        nested = config.get(NESTED)
        inner = nested if isinstance(nested, Mapping) else {}
        return (
            config.get("speculators_model_type") == self.kind
            and (not self.architectures or bool(set(head.architectures) & set(self.architectures)))
            and all(
                (key in config or key in inner) and value in (None, inner.get(key, config.get(key)))
                for key, value in self.settings
            )
        )


DFLASH = ("DFlashDraftModel",)
OWN_CLASS = "EagleTrainBlockModel"
BLOCK_LAYOUTS = (
    BlockLayout(
        "speculators DSpark",
        "vllm-project/speculators: src/speculators/models/dspark/{config,core}.py",
        kind="dspark",
        id_key="aux_hidden_state_layer_ids",
        ids="input",
        anchor=True,
    ),
    BlockLayout(
        "speculators DFlash",
        "vllm-project/speculators: src/speculators/models/dflash/{config,core}.py",
        kind="dflash",
        id_key="aux_hidden_state_layer_ids",
        ids="input",
    ),
    BlockLayout(
        "eagle-train",
        "train/eagle_train/layouts.py",
        (OWN_CLASS,),
        anchor=True,
    ),
    BlockLayout(
        "DeepSpec DSpark",
        "deepseek-ai/DeepSpec: deepspec/modeling/dspark/qwen3/{config,modeling}.py",
        ("Qwen3DSparkModel",),
        anchor=True,
    ),
    BlockLayout(
        "SpecForge DSpark",
        "sgl-project/SpecForge: specforge/modeling/draft/dspark.py, specforge/algorithms/common/dflash_family_model.py",
        ("DSparkDraftModel",),
        anchor=True,
    ),
    BlockLayout(
        "ModelOpt DSpark",
        "NVIDIA/Model-Optimizer: modelopt/torch/export/plugins/hf_spec_export.py",
        DFLASH,
        settings=(("projector_type", "dspark"),),
        anchor=True,
    ),
    BlockLayout(
        "JetSpec",
        "hao-ai-lab/JetSpec: jetspec/models/draft_head.py, jetspec/draft_head_adapter.py",
        DFLASH,
        settings=(("causal_head", None),),
    ),
    BlockLayout(  # SpecForge's and ModelOpt's too
        "DFlash",
        "z-lab/dflash: dflash/model.py",
        DFLASH,
    ),
)


def block_layout(head: Checkpoint) -> BlockLayout | None:
    """Returns a block head's layout; None for another kind. Raises ExportError for one that cannot be exported."""
    where = head.folder / "config.json"
    for pattern, what in REFUSED_CLASSES:
        if named := [name for name in head.architectures if re.search(pattern, name)]:
            raise ExportError(f"{where}: {named[0]} is {what}, which is not supported; docs/heads.md lists what is")
    if "treeflash_config" in head.config:
        raise ExportError(f"{where}: treeflash_config is set: a TreeFlash head, which is not supported")
    return next((each for each in BLOCK_LAYOUTS if each.fits(head)), None)


def official_block(head: Checkpoint, layout: BlockLayout) -> tuple[HeadLayout, Checkpoint]:
    """Returns the layout as EAGLE heads have one, and the head with the module's names and one flat config, in which
    `target_layer_ids`, `sample_from_anchor` and `causal` are set. Raises ExportError for a variant that cannot be
    exported, by its name, and for a config that contradicts itself."""
    config = _flat_config(head, layout)
    for key, supported in REFUSED_KEYS:
        if config.get(key) not in supported:
            raise ExportError(
                f"{head.folder / 'config.json'}: {key} is {config[key]!r}, a variant of block heads that is not "
                "supported"
            )
    config["sample_from_anchor"] = _said(head, config, "sample_from_anchor", "shift_label", default=layout.anchor)
    config["causal"] = _causal(head, config, layout)
    config.pop("layer_types", None)
    known = HeadLayout(layout.producer, "block", layout.source, id_key="target_layer_ids", ids=layout.ids)
    return known, replace(head, config=config, tensors=_module_tensors(head))


def left_out(head: Checkpoint) -> str | None:
    """Returns what of a block head's folder is not exported; None if there is nothing."""
    if not any(CONFIDENCE.search(name) for name in head.tensors):
        return None
    return "its confidence head is left out: it orders drafts in other programs, and drafts nothing"


def with_targets_rotation(head: Checkpoint, target: Mapping[str, Any]) -> Checkpoint:
    """Returns a block head with the rotation of its target's config where its own says nothing: such heads are trained
    on copies of their target's config, of which speculators leaves out what is a default."""
    keys = ("rope_theta", "rope_parameters", "rope_scaling")
    if any(head.config.get(key) is not None for key in keys):
        return head
    theirs = {key: target[key] for key in keys if target.get(key) is not None}
    return replace(head, config={**head.config, **theirs})


def fitted(read: tuple[HeadLayout, Checkpoint], target: Checkpoint) -> tuple[HeadLayout, Checkpoint]:
    """Returns what `official` returned with a block head without a copy of the target's LM head, which DeepSpec writes.
    Values of both LM heads are compared."""
    layout, head = read
    own, theirs = head.tensors.get(LM_HEAD), target.tensors.get(LM_HEAD, target.tensors.get(EMBEDDING))
    if layout.kind == "block" and own is not None and theirs is not None and same_values(own, theirs):
        head = replace(head, tensors={name: tensor for name, tensor in head.tensors.items() if name != LM_HEAD})
    return layout, head


def _flat_config(head: Checkpoint, layout: BlockLayout) -> dict[str, Any]:
    where, parts = head.folder / "config.json", {}
    for key in (NESTED, LAYER):
        parts[key] = head.config.get(key) or {}
        if not isinstance(parts[key], Mapping):
            raise ExportError(f"{where}: {key} is {parts[key]!r}, but must be an object")
    defaults = dict(TRANSFORMERS_DEFAULTS) if layout.kind is not None else {}
    config = {**defaults, **head.config, **parts[LAYER], **parts[NESTED]}
    kind = (head.config if layout.kind is None else parts[LAYER]).get("model_type", "qwen3")
    if kind not in LLAMA_TYPES:
        raise ExportError(
            f"{where}: the head's layers are of type {kind!r}, but only {', '.join(LLAMA_TYPES)} layers are known"
        )
    config["target_layer_ids"] = config.get(layout.id_key)
    if config["target_layer_ids"] is None and layout.ids == "output" and "num_target_layers" in config:
        flat = replace(head, config=config)
        config["target_layer_ids"] = _default_ids(flat.integer("num_target_layers"), flat.integer("num_hidden_layers"))
    return config


def _default_ids(layers: int, own: int) -> list[int]:
    """The layers that z-lab's build_target_layer_ids takes: D from 1 to N - 3, evenly spread."""
    if own == 1:
        return [layers // 2]
    return [round(1 + index * (layers - 4) / (own - 1)) for index in range(own)]


def _said(head: Checkpoint, config: Mapping[str, Any], *keys: str, default: bool) -> bool:
    """What all of the keys that are there say; the default if none is. Raises ExportError if two differ."""
    said = {key: config[key] for key in keys if config.get(key) is not None}
    where = head.folder / "config.json"
    for key, value in said.items():
        if type(value) is not bool:
            raise ExportError(f"{where}: {key} is {value!r}, but must be true or false")
    if len(set(said.values())) > 1:
        words = " and ".join(f"{key} {str(value).lower()}" for key, value in said.items())
        raise ExportError(f"{where}: {words} contradict each other; correct the one that is wrong")
    return next(iter(said.values()), default)


def _causal(head: Checkpoint, config: Mapping[str, Any], layout: BlockLayout) -> bool:
    """Whether rows see no later row of their block. Raises ExportError for a narrow window, and layers that differ."""
    where = head.folder / "config.json"
    types = config.get("layer_types") or []
    if not isinstance(types, list) or any(each not in ("full_attention", "sliding_attention") for each in types):
        raise ExportError(f"{where}: layer_types is {types!r}, but only full and sliding attention are known")
    sliding = [each == "sliding_attention" for each in types]
    width = config.get("swa_window_size") or config.get("sliding_window")
    if (any(sliding) or config.get("use_swa")) and (type(width) is not int or width < WINDOW):
        raise ExportError(
            f"{where}: sliding_window is {width!r}, but a head reads the last {WINDOW} positions of a text, so "
            "narrower windows are not supported"
        )
    if layout.kind is not None and any(sliding) and not config.get("sliding_window_non_causal"):
        if not all(sliding):  # speculators: layers with a window are causal, the others are not
            raise ExportError(
                f"{where}: some layers see later rows of a block and some do not (layer_types, "
                "sliding_window_non_causal), which is not supported"
            )
        return True
    return _said(head, config, "causal", "causal_head", default=False)


def _module_tensors(head: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors by the module's names. Raises ExportError for those of known variants."""
    tensors: dict[str, StoredTensor] = {}
    for stored, tensor in head.tensors.items():
        name = stored.removeprefix("logit_head.")  # early SpecForge checkpoints
        for pattern, what in REFUSED_TENSORS:
            if re.search(pattern, name):
                raise ExportError(f"{head.folder} holds {tensor.name!r}: it is {what}, which is not supported")
        if not CONFIDENCE.search(name) and name not in COPIES:
            tensors[f"markov_head.{name}" if name.startswith(MARKOV) else name] = tensor
    file = head.folder / MASK_FILE
    if MASK not in tensors and file.is_file():
        tensors[MASK] = lone_tensor(file, MASK, ("embedding", MASK))
    return tensors
