"""Compares a hardened pair with its source: the target's logits and the heads' log-probabilities, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle_export.graphs.head_modules import build_head
from eagle_export.graphs.pair import open_pair
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD
from eagle_tools.harden.weights import head_part

TEXTS, TOKENS = 4, 64
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest absolute differences over all positions and texts: of the target's logits, and by kind of the heads'
    log-probabilities."""

    logits: float
    heads: dict[str, float]


def sample_texts(target: LlamaForCausalLM, first: int | None, seed: int) -> list[list[int]]:
    """Returns texts that the target samples, each TOKENS ids after its first one: half of them begin with the token
    `first` if there is one, and the others with a random one."""
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, int(target.config.vocab_size), (TEXTS, 1), generator=rng)
    if first is not None:
        ids[::2] = first
    last, past = ids, None
    with torch.no_grad():
        for _ in range(TOKENS):
            out = target(last, past_key_values=past, use_cache=True)
            probabilities, past = out.logits[:, -1].softmax(-1), out.past_key_values
            if first is not None:
                probabilities[:, first] = 0  # it stands at the beginning alone
            last = torch.multinomial(probabilities, 1, generator=rng)
            ids = torch.cat([ids, last], 1)
    texts: list[list[int]] = ids.tolist()
    return texts


def load_target(folder: Path) -> LlamaForCausalLM:
    """The target in fp32."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
    ).eval()
    return model


def head_log_probabilities(
    target: LlamaForCausalLM, target_folder: Path, folder: Path, texts: list[list[int]]
) -> Iterator[Tensor]:
    """Yields for each text the head's log-probabilities [T - 1, Vd], each row's from the target's features."""
    pair = open_pair(target_folder, folder)
    part = head_part(pair)
    head = build_head(part.config)
    tensors = {
        name: stored.read().float() for name, stored in part.checkpoint.tensors.items() if name not in ("d2t", "t2d")
    }
    embedding = pair.target.tensors[EMBEDDING].read().float()
    tensors["embed_tokens.weight"] = embedding
    if part.config.borrows_lm_head:
        tensors["lm_head.weight"] = embedding if pair.tied else pair.target.tensors[LM_HEAD].read().float()
    head.load_state_dict(tensors)
    for ids in texts:
        with torch.no_grad():
            states = target(torch.tensor([ids]), output_hidden_states=True).hidden_states
            if part.config.taps:
                features = head.fc(torch.cat([states[tap] for tap in part.config.taps], -1))
            else:
                features = states[-1]
            rows = len(ids) - 1
            mask = torch.full((rows, rows), MASKED).triu(1)[None, None]
            config = part.config
            none = torch.zeros(1, 0, config.num_kv_heads, config.head_dim)
            past = [(none, none) for _ in range(config.num_layers)]
            hidden, _ = head(torch.tensor([ids[1:]]), features[:, :-1], torch.arange(rows)[None], mask, past)
            scores = head.logits(hidden)[0].log_softmax(-1)
        yield scores  # outside of no_grad, which would stay in force for the caller


def compare(source: Path, heads: dict[str, Path], hardened: Path, first: int | None, seed: int) -> Difference:
    """Compares the hardened pair's folders, "target" and the kinds of heads, with the source's. Texts are samples of
    the source, some of which begin with the token `first`."""
    before, after = load_target(source), load_target(hardened / "target")
    texts = sample_texts(before, first, seed)
    logits = 0.0
    for ids in texts:
        with torch.no_grad():
            old, new = (model(torch.tensor([ids])).logits for model in (before, after))
        logits = max(logits, float((old - new).abs().max()))
    drafts = {}
    for kind, folder in heads.items():
        olds = head_log_probabilities(before, source, folder, texts)
        news = head_log_probabilities(after, hardened / "target", hardened / kind, texts)
        drafts[kind] = max(float((old - new).abs().max()) for old, new in zip(olds, news, strict=True))
    return Difference(logits, drafts)
