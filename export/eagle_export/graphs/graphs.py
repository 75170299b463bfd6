"""The two graphs of a pair as torch modules, ready to be traced.

Their inputs and outputs are the contract with the runtime: batch 1; past rows in, only new rows out; an additive mask
over the last L key columns.
Shapes: T rows, P past rows, L masked columns, R rows of logits, V vocabulary, H/Hd width of target/head,
k children per row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from eagle_export.graphs.delta_nets import mark_delta_nets, mark_state_spaces
from eagle_export.graphs.short_convolutions import mark_convolutions
from eagle_export.heads.assistant import AssistantReader
from eagle_export.heads.block import BlockReader
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head, TapReader
from eagle_export.heads.layers import Rows
from eagle_export.reading.families.dense_experts import make_dense
from eagle_export.reading.families.family import Config, Family, Windows, cache_keyword
from eagle_runtime.base.tree import hiding

ATTENTION = "eagle_edge"  # name of our attention function in transformers's registry


class TargetGraph(nn.Module):
    """The target, with features for the head: the final hidden state after the last norm, or an EAGLE-3 or block
    head's reading of the taps, or what an assistant reads. windows: per layer the number of keys that a row sees, None
    for all."""

    def __init__(
        self,
        family: Family,
        config: Config,
        windows: Windows,
        taps: tuple[int, ...],
        reader: TapReader | BlockReader | AssistantReader | None,
    ) -> None:
        super().__init__()
        config = copy.deepcopy(config)  # transformers writes into it
        # An explicit dtype, because the config holds that of the checkpoint.
        model = family.model_class()._from_config(
            config, attn_implementation=ATTENTION, dtype=torch.get_default_dtype()
        )
        experts = family.experts
        self.mixtures = [] if experts is None else make_dense(model.model.layers, config, experts)
        if family.convolution:
            mark_convolutions(model.model.layers, family.convolution)
        if family.delta:
            mark_delta_nets(model.model.layers, family.delta)
        if family.space:
            mark_state_spaces(model.model.layers, family.space)
        self.family = family
        self.linked = family.linked(config) or isinstance(reader, AssistantReader)  # which reads keys of some layers
        self.halved = type(model).__module__ if family.neighbours else None  # see native_operators.py
        self.config = config
        self.windows = windows
        self.model = model.model
        self.lm_head = model.lm_head
        self.taps = taps
        self.numbers = family.keyed(config)  # of the layers with keys: a trace may go without some
        self.head_reader = reader  # a name that no target's own parameter has

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        logit_rows: Tensor,
        past: list[Rows],
        tapped: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, list[Rows], list[Tensor]]:
        """tapped: the hidden states [1,T,H] at the taps, which a trace connects (repeated_layers.py), unless layers are
        linked. Returns logits [1,R,V] fp32, features [1,T,Hd], per layer with keys new rows and, if a trace
        connects layers, per layer the hidden state after it [1,T,H]."""
        cache = _NewRows(past, self.numbers)
        after: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _module, _inputs, out: after.append(out)) for layer in self.model.layers
        ]
        mask = full_mask(tree_mask, past)
        masks = {width: windowed(mask, position_ids, width) for width in dict.fromkeys(self.windows)}
        attention_mask: Any = masks[self.windows[0]]
        if len(masks) > 1 or self.family.convolution or self.family.with_state:
            # by the names that transformers gives to kinds of layers
            kinds = zip(self.config.layer_types, self.windows, strict=True)
            attention_mask = {kind: masks[width] for kind, width in kinds}
        hidden = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=True,
            **{cache_keyword(self.model): cache},
        ).last_hidden_state
        for hook in hooks:
            hook.remove()
        if self.linked:
            tapped, after = [after[tap - 1] for tap in self.taps], []
        logits = self.lm_head(hidden.index_select(1, logit_rows)).float()
        logits, features, reader = self.family.logits(self.config, logits), hidden, self.head_reader
        if isinstance(reader, BlockReader):
            features = reader.features(tapped, hidden, position_ids)
        elif isinstance(reader, AssistantReader):
            features = reader.features(hidden, cache.new)
        elif reader is not None:
            features = reader.features(tapped)
        return logits, features, cache.new, after


class ProposingGraph(nn.Module):
    """A graph of a head that returns the top k tokens of its rows."""

    d2t: Tensor | None  # [Vd, 1], offset from draft to target id; None if both are the same

    def __init__(self, head: nn.Module, top_k: int, logits: Callable[[Tensor], Tensor] | None) -> None:
        """logits: what the target makes of the output of its LM head, if the head borrows that."""
        super().__init__()
        self.head = head
        self.top_k = top_k
        self.target_logits = logits
        self.register_buffer("d2t", None)

    def scores_of(self, logits: Tensor) -> Tensor:
        """Returns the scores of the LM head's output, in fp32 for weights of any type: fp16 would round probabilities
        near 1 to equal values."""
        scores = logits.float()
        return scores if self.target_logits is None else self.target_logits(scores)

    def best(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """log_probs [1,R,Vd] -> the highest [1,R,k], and their token_ids [1,R,k] (target ids)."""
        log_probs, ids = log_probs.topk(self.top_k)
        if self.d2t is not None:
            ids = ids + nn.functional.embedding(ids, self.d2t).squeeze(-1)
        return log_probs, ids


class DraftGraph(ProposingGraph):
    """A head that returns the top k tokens of the rows in logit_rows instead of logits over the vocabulary. For all
    other rows it computes keys and values only, so that reading a prompt costs a fraction of drafting."""

    head: Eagle1Head | Eagle3Head

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        logit_rows: Tensor,
        past: list[Rows],
    ) -> tuple[Tensor, Tensor, Tensor, list[Rows]]:
        """Returns log_probs [1,R,k] fp32, token_ids [1,R,k] (target ids), hidden [1,R,Hd], and new rows per layer."""
        hidden, new = self.head(input_ids, features, position_ids, full_mask(tree_mask, past), past, logit_rows)
        return *self.best(self.scores_of(self.head.logits(hidden)).log_softmax(-1)), hidden, new


def full_mask(tree_mask: Tensor, past: list[Rows]) -> Tensor:
    """Extends tree_mask [1,1,T,L] of the last L columns to [1,1,T,P+T]; all columns before are visible."""
    rows, columns = tree_mask.shape[2], tree_mask.shape[3]
    before = past[0][0].shape[1] + rows - columns
    return torch.cat([tree_mask.new_zeros(1, 1, rows, before), tree_mask], -1)


def windowed(mask: Tensor, position_ids: Tensor, width: int | None) -> Tensor:
    """Hides in mask [1,1,T,P+T] the keys `width` or more positions before a row; the past's stand at 0..P-1."""
    if width is None:
        return mask
    rows = position_ids[0]
    keys = torch.cat([torch.arange(mask.shape[3] - mask.shape[2]), rows])
    return mask.masked_fill(
        keys[None, :] <= rows[:, None] - width, hiding(np.float16 if mask.dtype == torch.float16 else np.float32)
    )


class _NewRows(Cache):  # type: ignore[misc]
    """A cache that concatenates past and new rows for attention, and keeps the new ones. numbers: of its layers."""

    def __init__(self, past: list[Rows], numbers: tuple[int, ...]) -> None:
        super().__init__(layers=[])
        self.past, self.numbers = past, numbers
        self.new: list[Rows] = []

    def past_of(self, layer_idx: int) -> Rows:
        """The past rows of a layer, whose new ones are appended to `new` next."""
        place = len(self.new)
        assert self.numbers[place] == layer_idx
        return self.past[place]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states.transpose(1, 2), value_states.transpose(1, 2))
        past = self.past_of(layer_idx)
        self.new.append(new)
        keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(past, new, strict=True))
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # unused: positions and mask are given


def _attention(
    _module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """q [1,Hq,T,D], k and v [1,Hkv,P+T,D]; softcap bounds the scores before the mask. s_aux [Hq]: of each head a score
    without a key (gpt-oss): a key and a value of zeros, which a row sees with that score in the mask. Returns
    [1,T,Hq,D]. q is scaled here, because TensorRT would apply the operator's own scale to all cached keys."""
    if s_aux is not None:
        heads, rows = q.shape[1:3]
        k, v = (torch.cat([each, each.new_zeros(1, each.shape[1], 1, each.shape[3])], 2) for each in (k, v))
        sinks = s_aux.reshape(1, -1, 1, 1).to(mask.dtype).expand(1, heads, rows, 1)
        mask = torch.cat([mask.expand(1, heads, rows, -1), sinks], -1)
    if softcap is not None or s_aux is not None:
        out, *_rest = torch.onnx.ops.attention(q * scaling, k, v, mask, scale=1.0, softcap=float(softcap or 0.0))
        return out.transpose(1, 2), None
    out = nn.functional.scaled_dot_product_attention(
        q * scaling, k, v, attn_mask=mask, scale=1.0, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2), None


AttentionInterface.register(ATTENTION, _attention)
