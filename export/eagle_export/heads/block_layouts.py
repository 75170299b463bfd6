"""How the producers of block heads write their folders, and the way from each to the module's names and HeadConfig.

All share one layout of layers (Qwen3's, or Llama's), fc, hidden_norm and norm. They differ in what is silent: what a
layer id names, whether the root's row drafts, whether a row sees later rows, and where the mask's embedding is.

Letters: i layer of the target. A tap is an index into transformers' hidden_states: 0 is the embedding, i + 1 the output
of layer i.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle_export.checkpoint import Checkpoint
from eagle_export.errors import ExportError
from eagle_export.heads.layout import HeadLayout

NESTED = "dflash_config"
SMALL = ("markov_w1", "markov_w2")  # ModelOpt writes them without the module's name
ORDERING = re.compile(r"(^|\.)confidence_(head|proj)\.")  # orders drafts in other programs; nothing here reads it
REFUSED = (
    (r"(^|\.)prefix_gru\.", "a Domino head, whose logits a recurrent network corrects token by token"),
    (r"^(markov_head\.)?(gate_proj|joint_proj)\.", "a DSpark head whose transitions are gated or recurrent"),
    (r"(^|\.)(attention_conv|mlp_conv|candidate_selector)\.", "a DFlash 2 head, with convolutions and a selector"),
    (r"(^|\.)ar_approximation\.", "a TreeFlash head"),
    (r"(^|\.)(context_proj|layer_fusion_weights|hidden_correction)\b", "a DFlare or DFly head"),
    (r"(^|\.)hidden_dim_adapter\.", "a JetSpec head of another width than its target"),
)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """One producer's layout. architectures, model_types: of config.json (model_types: speculators_model_type). ids:
    whether its layer ids name outputs of layers or taps. anchor: whether the root's row drafts where the config does
    not say."""

    producer: str
    source: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    id_key: str = "target_layer_ids"
    ids: Literal["output", "tap"] = "output"
    anchor: bool = False

    def fits(self, config: Mapping[str, Any]) -> bool:
        """Whether a folder has this layout."""
        named = config.get("architectures")
        names = {name for name in named if isinstance(name, str)} if isinstance(named, list) else set()
        kind = config.get("speculators_model_type")
        return kind in self.model_types if kind is not None else bool(names & set(self.architectures))


BLOCK_LAYOUTS = (
    BlockLayout(
        "speculators DSpark",
        "vllm-project/speculators: src/speculators/models/dspark/{config,core}.py",
        model_types=("dspark",),
        id_key="aux_hidden_state_layer_ids",
        ids="tap",
        anchor=True,
    ),
    BlockLayout(
        "speculators DFlash",
        "vllm-project/speculators: src/speculators/models/dflash/{config,core}.py",
        model_types=("dflash",),
        id_key="aux_hidden_state_layer_ids",
        ids="tap",
    ),
    BlockLayout(
        "DSpark",
        "deepseek-ai/DeepSpec: deepspec/modeling/dspark; sgl-project/SpecForge: specforge/modeling/draft/dspark.py",
        ("DSparkDraftModel", "Qwen3DSparkModel"),
        anchor=True,
    ),
    BlockLayout(
        "DFlash",
        "z-lab/dflash: dflash/model.py; sgl-project/SpecForge: specforge/modeling/draft/dflash.py",
        ("DFlashDraftModel",),
    ),
)


def block_layout(head: Checkpoint) -> BlockLayout | None:
    """Returns a block head's layout; None for another kind of head."""
    return next((each for each in BLOCK_LAYOUTS if each.fits(head.config)), None)


def official_block(head: Checkpoint, layout: BlockLayout) -> tuple[HeadLayout, Checkpoint]:
    """Returns the layout as EAGLE heads have one, and the head with the module's names and one flat config. Raises
    ExportError for a variant that cannot be exported, by its name."""
    where = head.folder / "config.json"
    for pattern, what in REFUSED:
        if names := sorted(name for name in head.tensors if re.search(pattern, name)):
            raise ExportError(f"{head.folder} holds {names[0]!r}: it is {what}, which is not supported")
    nested = head.config.get(NESTED) or {}
    if not isinstance(nested, Mapping):
        raise ExportError(f"{where}: {NESTED} is {nested!r}, but must be an object")
    inner = head.config.get("transformer_layer_config") or {}
    config = {**head.config, **inner, **nested}
    config["target_layer_ids"] = nested.get(layout.id_key, head.config.get(layout.id_key))
    if config.get("projector_type") not in (None, "dflash", "dspark"):
        raise ExportError(f"{where}: projector_type is {config['projector_type']!r}, which is not supported")
    if config.get("markov_head_type") not in (None, "vanilla"):
        raise ExportError(f"{where}: markov_head_type is {config['markov_head_type']!r}, but only 'vanilla' is known")
    dspark = layout.anchor or config.get("projector_type") == "dspark"
    config["sample_from_anchor"] = bool(config.get("sample_from_anchor", dspark))
    config["causal"] = bool(config.get("causal") or config.get("causal_head") or False)
    config.pop("layer_types", None)
    tensors = {
        f"markov_head.{name}" if name.startswith(SMALL) else name: tensor
        for name, tensor in head.tensors.items()
        if not ORDERING.search(name)
    }
    ids: Literal["output", "input"] = "output" if layout.ids == "output" else "input"
    known = HeadLayout(layout.producer, "block", layout.source, id_key="target_layer_ids", ids=ids)
    return known, replace(head, config=config, tensors=tensors)
