"""Tiny random Gemma-4 assistants, as transformers writes them, and what transformers drafts with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tiny_families import HIDDEN, VOCAB

WIDTH, LAYERS, CENTROIDS, CHOSEN = 24, 3, 16, 6
KINDS = ("sliding_attention", "full_attention")


def assistant_of(target: Any, *, ordered: bool) -> Any:
    """A random assistant in fp32 for a target's config. ordered: whether its vocabulary is cut into groups."""
    from transformers import Gemma4AssistantConfig, Gemma4AssistantForCausalLM, Gemma4TextConfig

    torch.manual_seed(13)
    sliding, full = (target.per_layer_config[target.layer_types.index(kind)] for kind in KINDS)
    text = Gemma4TextConfig(
        vocab_size=target.vocab_size,
        sliding_window=target.sliding_window,
        max_position_embeddings=target.max_position_embeddings,
        num_key_value_heads=sliding.num_key_value_heads,
        head_dim=sliding.head_dim,
        hidden_size=WIDTH,
        intermediate_size=40,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        global_head_dim=full.head_dim,
        num_global_key_value_heads=full.num_key_value_heads,
        attention_k_eq_v=True,
        layer_types=[KINDS[0]] * (LAYERS - 1) + [KINDS[1]],
        num_kv_shared_layers=LAYERS,
        vocab_size_per_layer_input=0,
        hidden_size_per_layer_input=0,
        initializer_range=0.15,
        pad_token_id=None,
    )
    config = Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=HIDDEN,
        use_ordered_embeddings=ordered,
        num_centroids=CENTROIDS,
        centroid_intermediate_top_k=CHOSEN,
    )
    model = Gemma4AssistantForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)
        if name.endswith("q_norm.weight"):
            parameter.data *= 0.25  # Gemma-4 multiplies scores by nothing
    if ordered:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model


def save_assistant(target: Any, folder: Path, *, ordered: bool) -> Any:
    """Writes the assistant of `assistant_of`; returns it."""
    model = assistant_of(target, ordered=ordered)
    model.save_pretrained(folder)
    return model


class Drafting:
    """Drafts as transformers' SinglePositionMultiTokenCandidateGenerator does after its target has read a prompt."""

    @torch.no_grad()
    def __init__(self, target: Any, assistant: Any, tokens: Sequence[int], keys: int | None = None) -> None:
        """tokens: the text, of which the target has not read the last one. keys: as many of the last keys are seen;
        None for all."""
        self._embedding, self._assistant = target.get_input_embeddings(), assistant
        out = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        self.hidden = out.hidden_states[-1][:, -1:]
        last = slice(0 if keys is None else -keys, None)
        self._rows = {kind: tuple(each[:, :, last] for each in pair) for kind, pair in out.shared_kv_states.items()}
        self._position = torch.tensor([[len(tokens) - 1]])

    @torch.no_grad()
    def after(self, token: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [V] of the token after this one, -inf for those of other groups, and the hidden
        state [1, 1, H] of the next step."""
        out = self._assistant(
            inputs_embeds=torch.cat([self._embedding(torch.tensor([[token]])), hidden], -1),
            position_ids=self._position,
            shared_kv_states=self._rows,
        )
        logits = out.logits[0, 0]
        if self._assistant.config.use_ordered_embeddings:
            logits = logits.masked_fill(logits == logits.min(), -torch.inf)
        return logits.log_softmax(-1), out.last_hidden_state
