"""Gemma-4's assistants, which attend to the target's own keys and values, and draft a token per pass.

    target's embedding(ids) --+
                              cat -> pre_projection -> layers -> norm -+-> LM head -> logits
    hidden [1,T,H] -----------+                                       +-> post_projection -> hidden of the next step

Its layers have queries alone. A sliding (full) one attends to the keys of the target's last sliding (full) layer that
has some, of verified positions: all drafted tokens of a tree have the position of the token before them all.

Shapes: T rows of the target, R rows that draft, C keys, H width of the target, A of the assistant, V vocabulary, S
numbers of keys and values in a feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Rows

UNSEEN = -3e4  # added to the scores of tokens that cannot come


class AssistantReader(nn.Module):
    """What an assistant reads of its target."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        assert config.assistant is not None
        self.places = config.assistant.places

    def features(self, hidden: Tensor, rows: Sequence[Rows]) -> Tensor:
        """hidden [1,T,H]: after the target's last norm; rows: new keys and values of its layers that have some. Returns
        features [1,T,H + S]: hidden, and keys and values of the layers that the assistant reads."""
        return torch.cat([hidden, *(part.flatten(2) for place in self.places for part in rows[place])], -1)


class AssistantHead(nn.Module):
    """The head; embed_tokens holds the target's weights."""

    def __init__(self, config: HeadConfig, attention: str) -> None:
        """attention: name of a function of transformers' registry."""
        from transformers import Gemma4TextConfig  # no release before 5.24 has them
        from transformers.models.gemma4 import modeling_gemma4

        super().__init__()
        own, width = config.assistant, config.hidden_size
        assert own is not None
        text = Gemma4TextConfig.from_dict(dict(own.text))
        self.kinds, self.chosen = own.kinds, own.chosen
        self.parts = [width] + [heads * size for heads, size in own.rows for _ in range(2)]
        self.heads = [heads for heads, _ in own.rows for _ in range(2)]
        self.embed_tokens = modeling_gemma4.Gemma4TextScaledWordEmbedding(
            config.vocab_size, width, None, embed_scale=width**0.5
        )
        self.model = modeling_gemma4.Gemma4TextModel._from_config(
            text, attn_implementation=attention, dtype=torch.get_default_dtype()
        )
        del self.model.embed_tokens  # the LM head, under another name
        self.pre_projection = nn.Linear(2 * width, text.hidden_size, bias=False)
        self.post_projection = nn.Linear(text.hidden_size, width, bias=False)
        self.lm_head = nn.Linear(text.hidden_size, config.vocab_size, bias=False)
        if own.centroids:
            self.masked_embedding = nn.ModuleDict({"centroids": nn.Linear(text.hidden_size, own.centroids, bias=False)})

    def split(self, features: Tensor) -> tuple[Tensor, list[Rows]]:
        """features [1,T,H + S]. Returns hidden [1,T,H], and keys and values of each type [1,T,heads,width]."""
        hidden, *rows = torch.split(features, self.parts, -1)
        shaped = [part.reshape(*part.shape[:2], heads, -1) for part, heads in zip(rows, self.heads, strict=True)]
        return hidden, list(zip(shaped[::2], shaped[1::2], strict=True))

    def forward(
        self, embedded: Tensor, hidden: Tensor, position_ids: Tensor, masks: Mapping[str, Tensor], rows: Sequence[Rows]
    ) -> Tensor:
        """embedded, hidden [1,R,H]; position_ids [1,R]; masks: additive [1,1,R,C], by type; rows: keys and values of
        each type [1,C,heads,width]. Returns [1,R,A], after the last norm."""
        shared = {
            kind: tuple(each.transpose(1, 2) for each in pair) for kind, pair in zip(self.kinds, rows, strict=True)
        }
        out: Tensor = self.model(
            inputs_embeds=self.pre_projection(torch.cat([embedded, hidden], -1)),
            attention_mask=dict(masks),
            position_ids=position_ids,
            shared_kv_states=shared,
            use_cache=False,
            logits_to_keep=None,  # all rows
        ).last_hidden_state
        return out

    def logits(self, states: Tensor, group_of: Tensor | None) -> Tensor:
        """states [1,R,A], as forward returns them; group_of [V]: the group of each token, None where all tokens may
        come. Returns logits [1,R,V], with UNSEEN added to those of tokens outside the row's best groups."""
        logits: Tensor = self.lm_head(states)
        if group_of is None:
            return logits
        groups = self.masked_embedding["centroids"](states)
        worst = groups.topk(self.chosen).values[..., -1:]
        added = torch.zeros_like(groups).masked_fill(groups < worst, UNSEEN)
        return logits + added.index_select(-1, group_of)

    def fed_back(self, states: Tensor) -> Tensor:
        """states [1,R,A]. Returns [1,R,H + S], which the next step reads in the place of features: hidden, and no
        keys."""
        return nn.functional.pad(self.post_projection(states), (0, sum(self.parts[1:])))


def groups_of(token_ordering: Tensor, centroids: int) -> Tensor:
    """token_ordering [V]: all tokens, those of the first group first. Returns the group of each token [V], int32."""
    size = len(token_ordering) // centroids
    return (token_ordering.long().argsort() // size).to(torch.int32)
