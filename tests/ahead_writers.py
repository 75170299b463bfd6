"""Medusa's and Hydra's heads as their authors' programs define, name and store them, on small random weights.

The modules follow FasterDecoding/Medusa (medusa/model/medusa_model.py) and zankner/Hydra
(hydra/model/hydra_heads/mlp_head.py): names of parameters are theirs, since they are what files hold.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle_export.reading.families.source import load_source


class Block(nn.Module):
    """A ResBlock: x + SiLU(W x); where several vectors become one, R x + SiLU(W x)."""

    def __init__(self, width: int, conditions: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width * (conditions + 1), width)
        self.res_connection = nn.Linear(width * (conditions + 1), width) if conditions else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + nn.functional.silu(self.linear(x))
        return out


def medusa(width: int, vocab: int, heads: int, blocks: int = 1) -> nn.ModuleList:
    """The ModuleList `medusa_head`, whose state dict is what a file holds."""
    return nn.ModuleList(
        nn.Sequential(*(Block(width) for _ in range(blocks)), nn.Linear(width, vocab, bias=False)) for _ in range(heads)
    )


class Hydra(nn.Module):
    """HydraMLP with grounded heads."""

    def __init__(self, embedding: nn.Embedding, vocab: int, heads: int, blocks: int = 1) -> None:
        super().__init__()
        width, self.blocks = embedding.embedding_dim, blocks
        self.input_embed_fn = embedding
        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(Block(width, head + 1), *(Block(width) for _ in range(blocks - 1))) for head in range(heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(width, vocab) for _ in range(heads))

    def forward(self, features: Tensor, ids: Tensor) -> list[Tensor]:
        """features [B,T,H], ids [B,T]. Returns each head's logits [B,T,V]; tokens beyond the end are those of the
        beginning, as torch.roll gives them."""
        embedded = self.input_embed_fn(ids)
        inputs, logits = [features], []
        for head, (mlp, lm_head) in enumerate(zip(self.hydra_mlp, self.hydra_lm_head, strict=True)):
            inputs.append(torch.roll(embedded, -(head + 1), 1))
            logits.append(lm_head(mlp(torch.cat(inputs, -1))))
        return logits


def seeded(build: Any, *args: Any, **kwargs: Any) -> Any:
    """A module whose weights do not depend on what ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return build(*args, **kwargs).eval()


def embedding_of(target: Path) -> nn.Embedding:
    """The embedding of a target's folder."""
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"].float()
    return nn.Embedding(table.shape[0], table.shape[1], _weight=table)


def write_medusa(folder: Path, heads: nn.ModuleList, *, pickled: bool = False, **config: Any) -> Path:
    """The folder as the authors' program saves it: `pickled` as the first releases, else safetensors."""
    blocks = sum(name.startswith("0.") and name.endswith(".linear.weight") for name in heads.state_dict())
    stated = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "base_model_name_or_path": "some/target"}
    _write_config(folder, {**stated, **config})
    state = {name: tensor.clone() for name, tensor in heads.state_dict().items()}
    if pickled:
        torch.save(state, folder / "medusa_lm_head.pt")
    else:
        save_file(state, folder / "medusa_lm_head.safetensors")
    return folder


def write_hydra(folder: Path, heads: Hydra, **config: Any) -> Path:
    """As write_medusa; Hydra's program pickles, and stores the target's embedding too."""
    stated = {
        "hydra_num_heads": len(heads.hydra_mlp),
        "hydra_num_layers": heads.blocks,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "base_model_name_or_path": "some/target",
    }
    _write_config(folder, {**stated, **config})
    torch.save(heads.state_dict(), folder / "hydra_lm_head.pt")
    return folder


def vllm_names(state: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Medusa's tensors under vLLM's names (vllm/model_executor/models/medusa.py)."""
    renamed = {}
    for name, tensor in state.items():
        head, part, *rest = name.split(".")
        if int(part) < blocks:
            renamed[f"blocks.{head}.layers.{part}.{rest[-1]}"] = tensor
        else:
            renamed[f"lm_heads.{head}.weight"] = tensor
    return renamed


def features_of(target: Path, texts: list[list[int]]) -> list[Tensor]:
    """The hidden states [1,T,H] after the last norm that a target has for texts."""
    model = load_source(target)
    with torch.inference_mode():
        return [model.model(input_ids=torch.tensor([ids])).last_hidden_state.clone() for ids in texts]


@torch.no_grad()
def fit(lm_head: nn.Linear, hidden: Tensor, tokens: Tensor) -> None:
    """Let an LM head make tokens [n] of what it reads [n, H], by ridge regression on one-hot rows: as well as a linear
    map can, so that drafts are accepted now and then."""
    hot = nn.functional.one_hot(tokens, lm_head.out_features).float()
    inner = hidden.T @ hidden + 1e-2 * torch.eye(hidden.shape[1])
    lm_head.weight.copy_(8 * torch.linalg.solve(inner, hidden.T @ hot).T)
    if lm_head.bias is not None:
        lm_head.bias.zero_()


@torch.no_grad()
def fitted_medusa(target: Path, texts: list[list[int]], heads: int) -> nn.ModuleList:
    """Medusa's heads for a target, fitted to texts."""
    features = features_of(target, texts)
    made: nn.ModuleList = seeded(medusa, features[0].shape[-1], 256, heads)
    for depth, head in enumerate(made):
        rows = [(x[0, : -2 - depth], torch.tensor(ids[2 + depth :])) for x, ids in zip(features, texts, strict=True)]
        block, lm_head = head.children()
        assert isinstance(lm_head, nn.Linear)
        fit(lm_head, block(torch.cat([x for x, _ in rows])), torch.cat([ids for _, ids in rows]))
    return made


@torch.no_grad()
def fitted_hydra(target: Path, texts: list[list[int]], heads: int) -> Hydra:
    """Hydra's heads for a target, fitted to texts."""
    features = features_of(target, texts)
    made: Hydra = seeded(Hydra, embedding_of(target), 256, heads)
    for depth, (mlp, lm_head) in enumerate(zip(made.hydra_mlp, made.hydra_lm_head, strict=True)):
        inputs, tokens = [], []
        for x, ids in zip(features, texts, strict=True):
            rows = len(ids) - 2 - depth
            embedded = made.input_embed_fn(torch.tensor(ids))
            parts = [x[0, :rows], *(embedded[1 + step : 1 + step + rows] for step in range(depth + 1))]
            inputs.append(torch.cat(parts, -1))
            tokens.append(torch.tensor(ids[2 + depth :]))
        assert isinstance(lm_head, nn.Linear)
        fit(lm_head, mlp(torch.cat(inputs)), torch.cat(tokens))
    return made


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
