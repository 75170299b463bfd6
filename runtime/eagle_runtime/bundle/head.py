"""The draft head of a bundle, and what the graph of each kind of head takes and returns (FORMS)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from eagle_runtime.bundle.graph import GraphSpec, Shape, ahead_shapes, row_size

HeadKind = Literal["eagle1", "eagle3", "mtp", "block", "medusa", "hydra", "assistant"]
Shapes = tuple[dict[str, Shape], dict[str, Shape]]  # of inputs, of outputs


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block head's rows. size: of a block (B), the root's included. anchor: whether the root's row drafts, so that B
    tokens are drafted and not B - 1. causal: whether a row sees no later row of the block. mask_id: what is fed for all
    rows but the root's. transitions: file of what a drafted token adds to the chances of the next, None without.
    state_size: width of the target's last state, which follows the keys and values among the features; 0 without."""

    size: int
    anchor: bool
    causal: bool
    mask_id: int
    transitions: str | None
    state_size: int


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The draft head. hidden_size: its width; of its hidden states too and, unless it is a block head, of its
    features. An assistant's is its target's; features and hidden states have keys and values after it.
    top_k: tokens that the graph returns per row. taps: indices of the target's hidden_states that feed an EAGLE-3 or
    block head, else empty. block: of a block head, else None."""

    kind: HeadKind
    hidden_size: int
    draft_vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    top_k: int
    taps: tuple[int, ...]
    block: BlockSpec | None
    graph: GraphSpec

    @property
    def form(self) -> HeadForm:
        """What its graph takes and returns."""
        return FORMS[self.kind]

    @property
    def feature_size(self) -> int:
        """Width of its features: a block head's are the keys and values of all its layers, and the target's state; an
        assistant's the target's state, and the keys and values of layers of the target."""
        return self.form.feature_size(self)

    @property
    def transitions(self) -> str | None:
        """The file of a block head's transitions, if it has some."""
        return None if self.block is None else self.block.transitions


@dataclass(frozen=True, slots=True)
class HeadForm:
    """Of one kind of head. title: its name in messages. shapes: of its graph's inputs and outputs, but for the cache.
    keyless: whether it keeps no keys and values. mixed: whether its layers may have those of several shapes, or none
    (AlikeLayers). block: whether its manifest has a BlockSpec. not_on: backends that cannot run it, whatever the
    bundle."""

    title: str
    shapes: Callable[[HeadSpec], Shapes]
    feature_size: Callable[[HeadSpec], int] = lambda head: head.hidden_size
    keyless: bool = False
    mixed: bool = False
    block: bool = False
    not_on: tuple[str, ...] = ()


def token_inputs(row: str) -> dict[str, Shape]:
    """Returns the inputs of a graph that reads tokens, but the past. row: dimension of the rows of tokens."""
    return {"input_ids": (1, row), "position_ids": (1, row), "tree_mask": (1, 1, row, "L"), "logit_rows": ("R",)}


def _recurrent(head: HeadSpec) -> Shapes:
    proposals: Shape = (1, "R", head.top_k)
    width = head.feature_size
    outputs: dict[str, Shape] = {"log_probs": proposals, "token_ids": proposals, "hidden": (1, "R", width)}
    return {**token_inputs("T"), "features": (1, "T", width)}, outputs


def _block(head: HeadSpec) -> Shapes:
    proposals: Shape = (1, "R", head.top_k)
    outputs: dict[str, Shape] = {"log_probs": proposals, "token_ids": proposals}
    if head.transitions is not None:
        outputs["scores"] = (1, "R", head.draft_vocab_size)
    return {**token_inputs("B"), "features": (1, "T", head.feature_size)}, outputs


def _block_features(head: HeadSpec) -> int:
    state = 0 if head.block is None else head.block.state_size
    return 2 * head.num_layers * head.num_kv_heads * head.head_dim + state


def _assistant_features(head: HeadSpec) -> int:
    return head.hidden_size + sum(row_size(head.graph.outputs[name]) for name in head.graph.present)


def _ahead(head: HeadSpec, grounded: bool) -> Shapes:
    return ahead_shapes(head.num_layers, grounded, head.hidden_size, head.top_k)


FORMS: Mapping[HeadKind, HeadForm] = {
    "eagle1": HeadForm("EAGLE-1 head", _recurrent),
    "eagle3": HeadForm("EAGLE-3 head", _recurrent),
    "mtp": HeadForm("multi-token prediction layer", _recurrent),
    "block": HeadForm("block head", _block, _block_features, block=True, not_on=("cuda",)),
    "medusa": HeadForm("Medusa heads", partial(_ahead, grounded=False), keyless=True),
    "hydra": HeadForm("Hydra heads", partial(_ahead, grounded=True), keyless=True),
    "assistant": HeadForm(
        "Gemma-4 assistant",
        _recurrent,
        _assistant_features,
        mixed=True,
        not_on=("cuda", "tensorrt", "tensorrt-rtx"),
    ),
}
