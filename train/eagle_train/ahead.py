"""Medusa-1's and Hydra's heads (eagle_export.heads.ahead): made for a target, taught by it, and written as their
authors write them.

Row i of head d reads the target's feature at i (Hydra: and tokens i + 1 ... i + 1 + d, the true ones) and learns the
target's distribution of token i + 2 + d. The loss is Medusa-1's (arXiv 2401.10774, section 2.2.1): the sum over heads
of DECAY**d times the cross-entropy, the target frozen, with the target's probabilities in place of tokens as Hydra's
authors do (arXiv 2402.05109, section 3.3).

Shapes: B texts, T tokens, V vocabulary, H width of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eagle_export.heads.ahead import HeadsAhead, OneAhead, ResBlock
from eagle_export.heads.ahead_reader import Ahead
from eagle_export.heads.config import HeadConfig
from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.config import DECAY
from eagle_train.losses import masked_mean, shared, soft_cross_entropy
from eagle_train.metrics import Tally
from eagle_train.objective import Matches
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, Taught

BLOCKS = 1  # residual blocks of a head, as in the papers
FILES: dict[HeadKind, str] = {"medusa": "medusa_lm_head.safetensors", "hydra": "hydra_lm_head.safetensors"}


def ahead_shape(kind: HeadKind, heads: int, target: FrozenTarget) -> HeadConfig:
    """Returns the shape of `heads` heads for a target. Only Hydra's LM heads have a bias."""
    hydra, width, vocab = kind == "hydra", target.hidden_size, target.vocab_size
    sizes = Ahead(heads, BLOCKS, bias=True, own_lm_heads=True, lm_bias=hydra, grounded=hydra)
    return HeadConfig(kind, width, width, vocab, vocab, heads, ahead=sizes)


@torch.no_grad()
def new_heads(shape: HeadConfig, target: FrozenTarget) -> HeadsAhead:
    """Returns untrained heads on the target's device. Each proposes what the target's LM head makes of the feature: the
    LM heads are copies of it, and the residual blocks add nothing."""
    heads = HeadsAhead(shape)
    for head in heads.heads:
        assert isinstance(head, OneAhead)
        for block in head.blocks:
            assert isinstance(block, ResBlock)
            for parameter in block.parameters():
                parameter.zero_()
            if isinstance(block.res_connection, torch.nn.Linear):
                block.res_connection.weight[:, : shape.hidden_size] = torch.eye(shape.hidden_size)
        head.lm_head.weight.copy_(target.own_lm_head)
        if head.lm_head.bias is not None:
            head.lm_head.bias.zero_()
    heads.to(target.device)
    if heads.grounded:
        heads.embed_tokens = target.embedding
    return heads


def ahead_objective(heads: HeadsAhead, batch: Batch, taught: Taught, tally: Tally) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss, and the cross-entropy of each head."""
    run, losses = Matches(batch.loss_mask, tally), []
    for depth, (logits, teacher, right, counted) in enumerate(_drafted(heads, batch, taught)):
        losses.append(masked_mean(soft_cross_entropy(logits, teacher), counted))
        run.add(depth, right, counted)
    total = torch.stack([DECAY**depth * loss for depth, loss in enumerate(losses)]).sum()
    return total, {f"head{depth}": loss.detach() for depth, loss in enumerate(losses)}


@torch.no_grad()
def measure_ahead(heads: HeadsAhead, batch: Batch, taught: Taught, tally: Tally) -> None:
    """Count the drafted tokens of a batch that are the target's."""
    run = Matches(batch.loss_mask, tally)
    for depth, (logits, teacher, right, counted) in enumerate(_drafted(heads, batch, taught)):
        run.add(depth, right, counted, shared(logits, teacher))


def _drafted(heads: HeadsAhead, batch: Batch, taught: Taught) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields of each head its logits and the target's probabilities [B, rows, V], whether its likeliest token is the
    target's, and which rows count. Probabilities of rows that nothing is asked of mean nothing."""
    rows = torch.arange(batch.ids.numel(), device=batch.ids.device)
    teacher = taught.said.logits(rows, None).softmax(-1).reshape(*batch.ids.shape, -1)
    for depth in range(min(len(heads.heads), batch.ids.shape[1] - 2)):
        logits = heads.forced(depth, taught.features, batch.ids).float()
        right = logits.argmax(-1) == taught.said.best[:, 1 + depth :]
        yield logits, teacher[:, 1 + depth :], right, batch.counted(depth)


def stored_ahead(heads: HeadsAhead) -> dict[str, Tensor]:
    """Returns name -> parameter of all that the folder holds, as the authors name them."""
    named: dict[str, Tensor] = {}
    for depth, head in enumerate(heads.heads):
        assert isinstance(head, OneAhead)
        for part, parameter in head.named_parameters():
            module, _, name = part.rpartition(".")
            block = module.removeprefix("blocks.")  # "0.linear"
            if heads.grounded:
                start = f"hydra_lm_head.{depth}" if module == "lm_head" else f"hydra_mlp.{depth}.{block}"
            else:
                start = f"{depth}.{len(head.blocks)}" if module == "lm_head" else f"{depth}.{block}"
            named[f"{start}.{name}"] = parameter
    return named


def ahead_json(shape: HeadConfig, target: FrozenTarget) -> dict[str, Any]:
    """Returns config.json's content, with the authors' keys."""
    assert shape.ahead is not None
    kind, sizes = shape.kind, shape.ahead
    config: dict[str, Any] = {f"{kind}_num_heads": sizes.count, f"{kind}_num_layers": sizes.blocks}
    if sizes.grounded:
        config |= {"hydra_head_arch": "mlp", "grounded_heads": True, "hidden_state_offset": 0}
    named = target.checkpoint.config.get("_name_or_path") or str(target.checkpoint.folder)
    return {
        **config,
        "base_model_name_or_path": named,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }
