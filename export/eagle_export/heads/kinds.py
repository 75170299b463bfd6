"""The kinds of heads: what each one's checkpoint has, and what of it stands in the two graphs. head_modules.py has the
modules of each; nothing here needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from eagle_export.heads.ahead_reader import Ahead, read_ahead
from eagle_export.heads.assistant_config import TOKEN_ORDERING, Assistant, read_assistant, with_targets_config
from eagle_export.heads.block_config import Block, read_block
from eagle_export.heads.block_layouts import left_out, with_targets_rotation
from eagle_export.heads.config import HeadConfig
from eagle_export.reading.checkpoint import LM_HEAD, Checkpoint, is_table
from eagle_runtime.bundle.manifest import HeadKind

Readings = Iterator[tuple[str, HeadConfig]]
READER = ("fc.", "fc_norm.", "input_norm.", "hidden_norm.")  # reads_taps: in the target's graph
KEYS = re.compile(r"layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.")  # keys_in_target: in both graphs


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of head.

    title: its name in reports. layer: prefix of the tensors of its first decoder layer; unnumbered: whether that has no
    number, and no other layer after it. in_target: whether it stands in the target's folder, with the target's config.
    bias_keys: of its config, which say whether fc has a bias. reads_taps: whether it reads several hidden states of the
    target, in the target's graph; names_taps: whether its config must say which.
    keys_in_target: whether its keys and values are made there too. recurrent: whether its last norm is part of what its
    own next step reads. norms: in the draft graph, but for two in each layer and those of queries and keys. joined:
    linear layers whose inputs are parts joined to one. not_on: backends that cannot run it. all_tokens: whether its
    draft vocabulary cannot be chosen at export.

    has_lm_head: whether it has an LM head, given the target's vocabulary. read_ahead, read_block, read_assistant: what
    such heads alone have. beside: the head with what it reads of its target's config. other_readings: of the same
    folder, in words that follow a share. note: on what is left out of it."""

    title: str
    layer: str = "layers.0"
    unnumbered: bool = False
    in_target: bool = False
    bias_keys: tuple[str, ...] = ()
    reads_taps: bool = False
    names_taps: bool = False
    keys_in_target: bool = False
    recurrent: bool = False
    norms: int = 0
    joined: str = r"fc\."
    not_on: tuple[str, ...] = ()
    all_tokens: bool = False
    has_lm_head: Callable[[Checkpoint, int], bool] = lambda head, vocab: False
    read_ahead: Callable[[Checkpoint, int, int], Ahead] | None = None
    read_block: Callable[[Checkpoint, int, int, int], Block] | None = None
    read_assistant: Callable[[Checkpoint, int, int], Assistant] | None = None
    beside: Callable[[Checkpoint, Mapping[str, Any]], Checkpoint] = lambda head, target: head
    other_readings: Callable[[HeadConfig], Readings] = lambda config: iter(())
    note: Callable[[Checkpoint], str | None] = lambda head: None


def _eagle3_lm_head(head: Checkpoint, vocab: int) -> bool:
    """An EAGLE-3 head may leave it out where it drafts all tokens of the target, in the target's order: then it has the
    target's, as vLLM and SGLang load it."""
    all_tokens = "d2t" not in head.tensors and head.config.get("draft_vocab_size") in (None, vocab)
    return LM_HEAD in head.tensors or not all_tokens


def _eagle3_readings(config: HeadConfig) -> Readings:
    other = not config.normed_residual
    yield f"norm_before_residual {str(other).lower()}", replace(config, normed_residual=other)


def _mtp_readings(config: HeadConfig) -> Readings:
    yield "its two inputs in the other order", replace(config, hidden_first=not config.hidden_first)


def _block_readings(config: HeadConfig) -> Readings:
    assert config.block is not None
    for key, field in (("sample_from_anchor", "anchor"), ("causal", "causal")):
        turned = not getattr(config.block, field)
        yield f"{key} {str(turned).lower()}", replace(config, block=replace(config.block, **{field: turned}))


AHEAD = partial(Kind, joined="", not_on=("tensorrt", "tensorrt-rtx"), all_tokens=True)
JOINED = r"fc\.|(midlayer|layers\.0)\.self_attn\.[qkv]_proj\."
KINDS: Mapping[HeadKind, Kind] = {
    "eagle1": Kind("EAGLE-1/2", bias_keys=("bias",), norms=-1, joined=JOINED),
    "eagle3": Kind(
        "EAGLE-3",
        layer="midlayer",
        unnumbered=True,
        reads_taps=True,
        norms=2,
        joined=JOINED,
        has_lm_head=_eagle3_lm_head,
        other_readings=_eagle3_readings,
    ),
    "mtp": Kind("Multi-token prediction", in_target=True, recurrent=True, norms=3, other_readings=_mtp_readings),
    "block": Kind(
        "Block head",
        reads_taps=True,
        names_taps=True,
        keys_in_target=True,
        norms=1,
        not_on=("cuda",),
        all_tokens=True,
        has_lm_head=lambda head, vocab: LM_HEAD in head.tensors,
        read_block=read_block,
        beside=with_targets_rotation,
        other_readings=_block_readings,
        note=left_out,
    ),
    "medusa": AHEAD("Medusa", read_ahead=partial(read_ahead, grounded=False)),
    "hydra": AHEAD("Hydra", read_ahead=partial(read_ahead, grounded=True)),
    "assistant": Kind(
        "Gemma-4 assistant",
        joined=r"pre_projection\.",
        not_on=("cuda", "tensorrt", "tensorrt-rtx"),
        all_tokens=True,
        has_lm_head=lambda head, vocab: True,
        read_assistant=read_assistant,
        beside=with_targets_config,
    ),
}


def placed(config: HeadConfig, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns which of a head's tensors stand in the draft graph, and which in the target's; some do in both. Tables of
    rotations are computed, and maps of the vocabulary and what the head has of the target are no weights of its own."""
    elsewhere = {LM_HEAD} if config.borrows_lm_head else set()
    elsewhere |= set() if config.borrows else {"d2t", "t2d", TOKEN_ORDERING}
    elsewhere |= {"norm.weight"} if config.output_norm == "none" else set()
    own = [name for name in names if name not in elsewhere and not is_table(name)]
    read = [] if config.borrows else [name for name in own if name.startswith(READER)]
    both = [name for name in own if KINDS[config.kind].keys_in_target and KEYS.match(name)]
    return [name for name in own if name not in read], [*read, *both]
