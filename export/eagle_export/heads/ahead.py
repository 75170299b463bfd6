"""Heads that draft one position ahead each: Medusa-1's (arXiv 2401.10774) and Hydra's (arXiv 2402.05109).

    Medusa  feature [H] -------------------------------------> x + SiLU(W x + b) -> ... -> LM head d -> logits
    Hydra   feature, embeddings of d + 1 tokens [(d + 2) H] -> R x + SiLU(W x + b) -> x + ... -> LM head d -> logits

The feature of position i is the target's hidden state after its last norm. The target's own LM head makes token i + 1
of it, the root; head d (from 0) proposes token i + 2 + d. Medusa's heads look at the feature alone, so candidates of a
depth do not depend on those above it. A Hydra head reads the root and the d tokens after it too.

Shapes: H width of the target, V vocabulary, D heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from eagle_export.heads.config import HeadConfig


class ResBlock(nn.Module):
    """A linear layer over one or more vectors of the width, with a residual: the identity, or a second linear layer
    where several vectors become one."""

    def __init__(self, width: int, inputs: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs * width, width, bias=bias)
        self.res_connection = nn.Linear(inputs * width, width, bias=bias) if inputs > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs * H]. Returns [..., H]."""
        out: Tensor = self.res_connection(x) + silu(self.linear(x))
        return out


class OneAhead(nn.Module):
    """One head. depth: how many tokens after the root it proposes for, from 0."""

    def __init__(self, config: HeadConfig, depth: int) -> None:
        super().__init__()
        assert config.ahead is not None
        width, sizes = config.hidden_size, config.ahead
        inputs = [depth + 2 if sizes.grounded else 1] + [1] * (sizes.blocks - 1)
        self.blocks = nn.ModuleList(ResBlock(width, count, sizes.bias) for count in inputs)
        if sizes.own_lm_heads:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=sizes.lm_bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs * H]. Returns what the LM head reads [..., H]."""
        for block in self.blocks:
            x = block(x)
        return x


class HeadsAhead(nn.Module):
    """All heads; embed_tokens, and lm_head if the heads have none, hold the target's weights."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.ahead is not None
        self.grounded = config.ahead.grounded
        self.own_lm_heads = config.ahead.own_lm_heads
        self.heads = nn.ModuleList(OneAhead(config, depth) for depth in range(config.ahead.count))
        if self.grounded:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        if not self.own_lm_heads:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def logits(self, depth: int, features: Tensor, paths: Tensor) -> Tensor:
        """features [..., H]; paths [..., depth + 1]: the root of each feature and the tokens after it, which Medusa
        does not look at. Returns head `depth`'s logits [..., V] of the token that follows."""
        x = features
        if self.grounded:
            x = torch.cat([features, self.embed_tokens(paths).flatten(-2)], -1)
        head = self.heads[depth]
        lm_head: nn.Module = head.lm_head if self.own_lm_heads else self.lm_head  # type: ignore[assignment]
        out: Tensor = lm_head(head(x))
        return out

    def forced(self, depth: int, features: Tensor, ids: Tensor) -> Tensor:
        """Drafts from the true tokens of texts. features [B, T, H], ids [B, T]. Returns logits [B, T - 1 - depth, V]:
        row i reads feature i and tokens i + 1 ... i + 1 + depth, and proposes token i + 2 + depth."""
        rows = ids.shape[1] - 1 - depth
        paths = torch.stack([ids[:, 1 + step : 1 + step + rows] for step in range(depth + 1)], -1)
        return self.logits(depth, features[:, :rows], paths)
