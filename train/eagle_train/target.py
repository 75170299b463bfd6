"""The frozen target: features and logits of a batch of texts, without gradients.

Shapes: B texts, T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS
from eagle_export.heads.reading import default_taps
from eagle_export.reading.checkpoint import EMBEDDING, Checkpoint, open_checkpoint
from eagle_export.reading.families.family import rope_settings
from eagle_export.reading.families.generation import generation_of
from eagle_export.reading.families.registry import family_of
from eagle_export.reading.texts import read_texts, text_of
from eagle_runtime.base.errors import first_line
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.errors import TrainError


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
    """A Llama target on a device, in fp32 on the CPU and in the checkpoint's type elsewhere."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.checkpoint = open_llama(folder)
        disable_progress_bar()
        try:
            model = cast(Any, LlamaForCausalLM).from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32 if device.type == "cpu" else "auto",
            )
        except Exception as error:  # transformers and safetensors raise many kinds
            raise TrainError(
                f"{folder} does not load as a Llama model ({first_line(error)}); give a complete Hugging Face folder"
            ) from None
        self.model = model.to(device).eval().requires_grad_(False)
        self.config = model.config
        self.device = device
        self.eos = ends_of(self.checkpoint)  # as a bundle's texts end, and not by one file of several

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Returns the type of the checkpoint's embedding."""
        stored = self.checkpoint.require("model.embed_tokens.weight", (None, None)).dtype
        return {"F16": torch.float16, "BF16": torch.bfloat16}.get(stored, torch.float32)

    @torch.no_grad()
    def states(self, ids: Tensor, taps: tuple[int, ...]) -> States:
        """Returns the states of ids [B, T]. Padding on the right does not affect the rows before it.

        taps: hidden_states indices (0: embeddings), each the output of layer tap - 1."""
        tapped: list[Tensor] = []
        layers = self.model.model.layers
        hooks = [layers[tap - 1].register_forward_hook(lambda _m, _i, out: tapped.append(out)) for tap in taps]
        try:
            last = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return States(last, torch.cat(tapped, -1) if taps else None)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """Returns the logits [..., V] in fp32 of the last hidden states [..., H]."""
        out: Tensor = self.model.lm_head(last.to(self.model.lm_head.weight.dtype)).float()
        return out

    def fingerprint(self) -> str:
        """Returns a hash of all that the features depend on."""
        return fingerprint(self.checkpoint)

    def head_config(self, kind: HeadKind, draft_vocab_size: int) -> HeadConfig:
        """Returns the shape of a head for this target: the same widths, one layer, rotation by the same rope_theta,
        unscaled.

        Raises ExportError for an EAGLE-3 head of a target with fewer than 7 layers."""
        config = self.config
        rope = rope_settings(self.checkpoint.config, str(self.checkpoint.folder / "config.json"))["rope_parameters"]
        return HeadConfig(
            kind=kind,
            hidden_size=self.hidden_size,
            target_hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            draft_vocab_size=draft_vocab_size,
            num_layers=1,
            num_heads=int(config.num_attention_heads),
            num_kv_heads=int(config.num_key_value_heads),
            head_dim=int(config.head_dim),
            intermediate_size=int(config.intermediate_size),
            rms_norm_eps=float(config.rms_norm_eps),
            rope={
                "rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
                "max_position_embeddings": int(config.max_position_embeddings),
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
    """Returns the SHA-256 over the config and the weight files."""
    digest = hashlib.sha256()
    files = {tensor.file for tensor in checkpoint.tensors.values()}
    for path in [checkpoint.folder / "config.json", *sorted(files)]:
        digest.update(file_sha256(path).encode())
    return digest.hexdigest()


def open_llama(folder: Path) -> Checkpoint:
    """Returns a target's checkpoint. Raises ExportError, and TrainError for a target that is not a Llama."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.config.get("model_type") != "llama":
        raise TrainError(
            f"{folder / 'config.json'}: model_type is {checkpoint.config.get('model_type')!r}, but only 'llama' "
            "targets are supported"
        )
    return checkpoint
