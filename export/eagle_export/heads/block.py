"""Block heads (DFlash, DSpark, JetSpec): one forward pass drafts a position in each of B rows.

    taps [1,T,n H] -> fc -> hidden_norm -> k_proj, k_norm, rotation | v_proj   per layer: keys, values of verified rows
    [root, mask, mask, ...] -> embedding -> layers -> norm -> LM head          rows at the root's position and after it

With input_fc (heads of eagle-train) each row reads its embedding and, as EAGLE's rows do, the target's last state
before the root, which then is a feature too.

Row r of the block stands at the root's position + r and sees all verified rows before the root, and the block's other
rows (or, in causal blocks, those before it). With an anchor (DSpark) row r drafts the token at the position after its
own; without (DFlash, JetSpec) rows from 1 on draft the token at their own position, which the mask stands for.

The upper line reads the target alone, so it is part of the target's graph: its output is what the head calls features,
the keys and values of all layers next to each other, and that state. Drafted tokens never enter the cache.

Transitions (DSpark's vanilla Markov head) add W2 W1[a] to the logits of a row whose predecessor is token a.

Sources: z-lab/dflash dflash/model.py; deepseek-ai/DeepSpec deepspec/modeling/dspark; JetSpec models/draft_head.py.
Shapes: B rows of a block, T verified rows, P past rows, H width, L layers, Hkv key/value heads, D head_dim, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Attention, DecoderLayer, Rows, new_rows, norm_of, rms_norm, rotary
from eagle_runtime.base.tree import hiding


class BlockReader(nn.Module):
    """What turns the target's taps into the head's features."""

    def __init__(self, config: HeadConfig, layers: Sequence[nn.Module] | None = None) -> None:
        """layers: the head's own; None for layers that do no more than read."""
        super().__init__()
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=config.fc_bias)
        self.hidden_norm = norm_of(config.hidden_size, config.rms_norm_eps)
        if layers is None:
            layers = [nn.ModuleDict({"self_attn": _keys_and_values(config)}) for _ in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.rotary_emb = rotary(config)
        self.reads_state = config.state_size > 0

    def key_values(self, taps: Sequence[Tensor], position_ids: Tensor) -> list[Rows]:
        """taps: the target's hidden states [1,T,H], in order. Returns keys and values per layer, each [1,T,Hkv,D]."""
        read = self.hidden_norm(self.fc(torch.cat(list(taps), -1)))
        rope = self.rotary_emb(read, position_ids)
        return [new_rows(cast(Attention, layer.self_attn), read, rope) for layer in self.layers]

    def features(self, taps: Sequence[Tensor], last: Tensor, position_ids: Tensor) -> Tensor:
        """As key_values. last [1,T,H]: the target's states after its last norm. Returns features [1,T,2 L Hkv D (+ H)]:
        keys and values of the first layer, of the second, ..., and `last` if the head reads it."""
        rows = [each.flatten(2) for pair in self.key_values(taps, position_ids) for each in pair]
        return torch.cat([*rows, last] if self.reads_state else rows, -1)


def _keys_and_values(config: HeadConfig) -> Attention:
    """The part of an Attention that makes keys and values."""
    attention = Attention(config, config.hidden_size)
    for name in ("q_proj", "o_proj", *(["q_norm"] if config.qk_norm else [])):
        delattr(attention, name)
    return attention


class MarkovHead(nn.Module):
    """Transitions: what a token adds to the logits of the one after it."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids [...]: the target's ids. Returns [..., Vd] to be added to the logits of the next token."""
        out: Tensor = self.markov_w2(self.markov_w1(token_ids))
        return out


class BlockHead(BlockReader):
    """The head; embed_tokens holds the target's weight, and lm_head too unless the head has its own."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config, [DecoderLayer(config) for _ in range(config.num_layers)])
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.own_mask:
            self.mask_embedding = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        self.own_mask = config.own_mask
        if config.state_size:
            self.input_fc = nn.Linear(config.hidden_size + config.state_size, config.hidden_size, bias=False)
        self.norm = rms_norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, mask: Tensor, past: Sequence[Rows], state: Tensor | None = None
    ) -> Tensor:
        """input_ids [1,B]: the root, then mask tokens; position_ids [1,B]; mask [1,1,B,P + B], additive; past: keys and
        values of verified rows per layer; state [1,1,S]: the target's last state before the root, if the head reads
        it. Returns hidden [1,B,H], after the last norm."""
        x = self.embed_tokens(input_ids)
        if self.own_mask:  # all rows but the root's have it
            x = torch.cat([x[:, :1], self.mask_embedding.expand(-1, input_ids.shape[1] - 1, -1)], 1)
        if state is not None:
            x = self.input_fc(torch.cat([x, state.expand(-1, x.shape[1], -1)], -1))
        rope = self.rotary_emb(x, position_ids)
        for layer, rows in zip(self.layers, past, strict=True):
            x, _ = layer(x, rope, mask, rows)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., Vd] of hidden [..., H], without transitions."""
        out: Tensor = self.lm_head(hidden)
        return out


def split_features(features: Tensor, config: HeadConfig) -> tuple[list[Rows], Tensor | None]:
    """features [1,T,2 L Hkv D + S], as BlockReader.features returns them. Returns keys and values per layer, and the
    target's states [1,T,S] if the head reads them."""
    width, count = config.num_kv_heads * config.head_dim, 2 * config.num_layers
    shape = (*features.shape[:2], config.num_kv_heads, config.head_dim)
    parts = torch.split(features, [width] * count + [config.state_size] * (config.state_size > 0), -1)
    rows = [part.reshape(shape) for part in parts[:count]]
    return list(zip(rows[::2], rows[1::2], strict=True)), parts[count] if config.state_size else None


def read_blocks(
    head: BlockHead, config: HeadConfig, ids: Tensor, taps: Sequence[Tensor], last: Tensor, roots: Tensor
) -> Tensor:
    """Drafts after many tokens of a text in one pass, as decoding drafts after one: a block sees what is known of the
    target before its root.

    ids [b,T]; taps: the target's hidden states [b,R,H], in order, of the first R rows, which are all before the last
    root; last [b,R,H]: those after its last norm; roots [b,A]: positions, from 1 on. Returns hidden [b,A,B,H]."""
    assert config.block is not None
    batch, count, size, device = *roots.shape, config.block.size, ids.device
    rows_read = torch.arange(last.shape[1], device=device)
    past = head.key_values(taps, rows_read[None])
    offsets = torch.arange(size, device=device)
    tokens = ids.new_full((batch, count, size), config.block.mask_id or 0)
    tokens[:, :, 0] = ids.gather(1, roots)
    embedded = head.embed_tokens(tokens)
    if config.own_mask:
        embedded = torch.cat([embedded[:, :, :1], head.mask_embedding[None].expand(batch, count, size - 1, -1)], 2)
    if config.state_size:
        states = last.gather(1, (roots - 1)[..., None].expand(-1, -1, config.state_size))
        embedded = head.input_fc(torch.cat([embedded, states[:, :, None].expand(-1, -1, size, -1)], -1))
    before = rows_read < roots[..., None]  # [b,A,R]
    own = torch.ones(size, size, dtype=torch.bool, device=device)
    own = torch.kron(torch.eye(count, dtype=torch.bool, device=device), own.tril() if config.block.causal else own)
    seen = torch.cat([before.repeat_interleave(size, 1), own.expand(batch, -1, -1)], -1)
    mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, hiding(np.float32))[:, None]
    rope = head.rotary_emb(past[0][0], (roots[..., None] + offsets).flatten(1))
    x = embedded.flatten(1, 2)
    for layer, rows in zip(head.layers, past, strict=True):
        x, _ = layer(x, rope, mask, rows)
    out: Tensor = head.norm(x).reshape(batch, count, size, config.hidden_size)
    return out
