"""The frozen target: features and logits of a batch of texts, without gradients. What is the family's, its declaration
for the exporter says.

Shapes: B texts, T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from eagle_export.base.errors import ExportError
from eagle_export.base.quiet import quiet
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS
from eagle_export.heads.reading import default_taps
from eagle_export.reading.checkpoint import EMBEDDING, Checkpoint
from eagle_export.reading.families.generation import generation_of
from eagle_export.reading.families.registry import family_of
from eagle_export.reading.families.source import load_source
from eagle_export.reading.families.target import open_target
from eagle_export.reading.texts import read_texts, text_of
from eagle_runtime.base.errors import first_line
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.errors import TrainError
from eagle_train.precision import unhalved
from eagle_train.taught import LmHead

STORED = {"F16": torch.float16, "BF16": torch.bfloat16}  # types that a target has on a GPU; else fp32


@dataclass(frozen=True, slots=True)
class States:
    """last [B, T, H]: hidden state after the last norm. taps [B, T, 3H], or None for an EAGLE-1 head."""

    last: Tensor
    taps: Tensor | None

    @property
    def features(self) -> Tensor:
        """Returns the features that the head reads."""
        return self.last if self.taps is None else self.taps


class FrozenTarget:
    """A target on a device, in fp32 on the CPU and in the checkpoint's type elsewhere. lm_head: with what the family
    makes of its output."""

    def __init__(self, path: Path, device: torch.device) -> None:
        """path: of a folder or a GGUF file. Raises ExportError for an unknown family, and TrainError for files that
        do not load."""
        self.checkpoint = open_target(path)
        self.family = family_of(self.checkpoint)
        try:
            model = load_source(self.checkpoint, torch.float32 if device.type == "cpu" else self.stored_dtype)
        except ExportError:
            raise
        except Exception as error:  # transformers and safetensors raise many kinds
            raise TrainError(
                f"{path} does not load ({first_line(error)}); give a complete Hugging Face folder or GGUF file"
            ) from None
        self.model = model.to(device).requires_grad_(False)
        self.config = model.config
        self.device = device
        self.eos = ends_of(self.checkpoint)  # as a bundle's texts end, and not by one file of several
        self.lm_head = LmHead(model.lm_head.weight, partial(self.family.logits, self.config))

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def context(self) -> int:
        """Returns the most tokens of a text."""
        return self.family.context(self.config)

    @property
    def last_gain(self) -> Tensor:
        """Returns the gain [H] of the last norm, whole: a family may store a part of it."""
        name = f"{self.family.last_norm}.weight"
        stored: Tensor = self.model.model.get_parameter(name)
        return stored + self.family.gain_offset(name)

    @property
    def embedding(self) -> torch.nn.Embedding:
        """Returns the embedding of heads, which read its rows as they are stored where a family scales its own; in
        fp32 where it is stored in fp16."""
        table = unhalved(self.model.model.embed_tokens.weight)
        count, width = table.shape
        return torch.nn.Embedding(count, width, _weight=table).requires_grad_(False)

    @property
    def own_lm_head(self) -> Tensor:
        """Returns weights [V, H] with which an LM head of a head's own starts: a multiplier of the logits moves into
        them, and a bound changes no number as small."""
        return self.lm_head.finished(self.lm_head.weight)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Returns the type of the checkpoint's embedding."""
        return STORED.get(self.checkpoint.require(EMBEDDING, (None, None)).dtype, torch.float32)

    @torch.no_grad()
    def states(self, ids: Tensor, taps: tuple[int, ...]) -> States:
        """Returns the states of ids [B, T]. Padding on the right does not affect the rows before it.

        taps: hidden_states indices (0: embeddings), each the output of layer tap - 1."""
        tapped: list[Tensor] = []
        layers = self.model.model.layers
        hooks = [layers[tap - 1].register_forward_hook(lambda _m, _i, out: tapped.append(out)) for tap in taps]
        try:
            with quiet("transformers"):
                last = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return States(last, torch.cat(tapped, -1) if taps else None)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """Returns the logits [..., V] in fp32 of the last hidden states [..., H]."""
        return self.lm_head.exact(last)

    def fingerprint(self) -> str:
        """Returns a hash of all that the features depend on."""
        return fingerprint(self.checkpoint)

    def head_config(self, kind: HeadKind, draft_vocab_size: int) -> HeadConfig:
        """Returns the shape of a head for this target: the same widths (its MLP's that of all experts of a row), one
        layer, rotation by the rope_theta of the layers that see all tokens, unscaled.

        Raises ExportError for an EAGLE-3 head of a target with fewer than 7 layers."""
        config, experts, rows = self.config, self.family.experts, self.family.rows(self.config)
        kv_heads, head_dim = min(row for row in rows if row[1] == rows[0][1])
        rope = config.rope_parameters
        active = 0 if experts is None else experts.width(config) * config.num_experts_per_tok
        return HeadConfig(
            kind=kind,
            hidden_size=self.hidden_size,
            target_hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_layers=1,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=int(active or config.intermediate_size),
            rms_norm_eps=float(getattr(config, self.family.epsilon)),
            rope={
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": float(rope.get("full_attention", rope)["rope_theta"]),
                },
                "max_position_embeddings": self.context,
            },
            qkv_bias=False,
            # Engines disagree on a bias here (some drop it, some invent one), and LLaMA-3 heads do without.
            fc_bias=False,
            taps=default_taps(int(config.num_hidden_layers)) if KINDS[kind].reads_taps else (),
        )


def ends_of(target: Checkpoint) -> tuple[int, ...]:
    """Returns the ids that end a target's texts, as an export decides them. Raises ExportError for ids that are none,
    and for files of a tokenizer that cannot be read."""
    vocab = target.require(EMBEDDING, (None, None)).shape[0]
    return generation_of(target, family_of(target), text_of(target, read_texts(target)), vocab).eos


def fingerprint(checkpoint: Checkpoint) -> str:
    """Returns the SHA-256 over the config, which is a part of a GGUF file, and the weight files."""
    digest = hashlib.sha256()
    config = [checkpoint.folder / "config.json"] if checkpoint.texts is None else []
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    for path in [*config, *sorted(files)]:
        digest.update(file_sha256(path).encode())
    return digest.hexdigest()
