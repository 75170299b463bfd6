"""Heads of few parameters whose training is compared with plain forms, and one path of decoding through them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import GOLDEN
from eagle_export.graphs.head_modules import build_any_head
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layouts import official
from eagle_export.heads.reading import read_head_config
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.ttt import Head


def build_head(config: HeadConfig) -> Head:
    """An uninitialised head of the config's kind, one that drafts recurrently."""
    head = build_any_head(config)
    assert isinstance(head, Head)
    return head


def golden_head(folder: Path) -> tuple[Head, HeadConfig]:
    layout, checkpoint = official(open_checkpoint(folder))
    config = read_head_config(checkpoint, layout, 64, 8, 256)
    weights = load_file(GOLDEN / "target" / "model.safetensors")
    own = {name: value for name, value in load_file(folder / "model.safetensors").items() if name not in ("d2t", "t2d")}
    own["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    if config.kind == "eagle1":
        own["lm_head.weight"] = weights["lm_head.weight"]
    head = build_head(config)
    head.load_state_dict(own)
    return head, config


def tiny(kind: HeadKind) -> tuple[Head, HeadConfig]:
    """Grouped-query attention, and a head_dim that is not hidden_size / heads."""
    config = HeadConfig(
        kind=kind,
        hidden_size=24,
        target_hidden_size=24,
        vocab_size=11,
        draft_vocab_size=7 if kind == "eagle3" else 11,
        num_layers=2 if kind == "eagle1" else 1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        intermediate_size=20,
        rms_norm_eps=1e-5,
        rope={"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        qkv_bias=False,
        fc_bias=False,
        taps=(2, 4, 5) if kind == "eagle3" else (),
    )
    torch.manual_seed(5)
    return build_head(config), config


def one_path(head: Head, features: Tensor, ids: Tensor, row: int, depth: int, offset: int) -> Tensor:
    """Output [Hd] of `row` at step `depth`, as decoding would compute it without a cache: rows 0..row of verified text,
    then one drafted row after another, all in one causal sequence. features [T, Hd], ids [T]."""
    inputs = features[: row + 1]
    for step in range(depth + 1):
        count = row + 1 + step
        tokens = ids[offset : offset + count]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        empty = torch.zeros(1, 0, 2, 10)
        layers = 2 if hasattr(head, "layers") else 1
        hidden, _ = head(tokens[None], inputs[None], torch.arange(count)[None], mask, [(empty, empty)] * layers)
        inputs = torch.cat([inputs, hidden[0, -1:]])
    return inputs[-1]
