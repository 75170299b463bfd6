"""Loads a target as transformers runs it: the source that bundles are compared with and calibrated on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eagle_export.checkpoint import Checkpoint, open_checkpoint
from eagle_export.families.registry import family_of
from eagle_export.trace import quiet


def load_source(folder: Path) -> Any:
    """Returns the model of a checkpoint in fp32, for inference. Raises ExportError for an unknown family, and whatever
    transformers raises."""
    checkpoint = open_checkpoint(folder)
    cls = family_of(checkpoint).model_class()
    with quiet("transformers"):
        model = cls.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation=attention_of(checkpoint),
        )
    return model.eval()


def attention_of(checkpoint: Checkpoint) -> str | None:
    """Returns the attention with which transformers must run a checkpoint; None for its default. Older releases drop
    the bound of scores in all but the eager one."""
    return "eager" if checkpoint.config.get("attn_logit_softcapping") else None
