"""Loads a target as transformers runs it: the source that bundles are compared with and calibrated on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from eagle_export.base.errors import ExportError
from eagle_export.base.quiet import quiet
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Config, Experts
from eagle_export.reading.families.fused_experts import read_fused
from eagle_export.reading.families.registry import family_of, read_config
from eagle_export.reading.families.target import open_target
from eagle_export.reading.stored_tensors import StoredTensor


class _Lazy:
    """A stored tensor as transformers' loader takes tensors of a state dict: read when it is indexed."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._tensor.read()


def load_source(source: Path | Checkpoint, dtype: torch.dtype = torch.float32) -> Any:
    """source: a folder or a GGUF file, or the checkpoint that was opened of it. Returns its model in a type, for
    inference. Raises ExportError for an unknown family or a missing tensor, and whatever transformers raises."""
    checkpoint = open_target(source) if isinstance(source, Path) else source
    family = family_of(checkpoint)
    cls = family.model_class()
    # Of a GGUF file, or under other names than transformers knows, tensors are given to it.
    made = checkpoint.texts is not None or any(name != each.name for name, each in checkpoint.tensors.items())
    state: dict[str, Any] = {}
    config = read_config(family, checkpoint)
    if family.experts is not None and family.experts.stacked:  # which transformers does not make of single matrices
        made, state["state_dict"] = True, _with_fused(checkpoint, family.experts, config)
    elif made:
        state["state_dict"] = {name: _Lazy(tensor) for name, tensor in checkpoint.tensors.items()}
    with quiet("transformers"), _without_bars():
        model, loaded = cls.from_pretrained(
            None if made else checkpoint.folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=attention_of(checkpoint),
            config=config,
            output_loading_info=True,
            **state,
        )
    if missing := sorted(loaded["missing_keys"]):  # which transformers fills with random numbers
        raise ExportError(
            f"{checkpoint.folder}: tensor {missing[0]!r} is missing; the checkpoint is incomplete or of another kind"
        )
    return model.eval()


def _with_fused(checkpoint: Checkpoint, experts: Experts, config: Config) -> dict[str, Any]:
    """Tensors by transformers' names, those of experts read."""
    within = experts.within
    inner = (name for name in checkpoint.tensors if within in name and name.startswith("model."))
    layers = dict.fromkeys(name.partition(within)[0] for name in inner)
    state: dict[str, Any] = {name: _Lazy(each) for name, each in checkpoint.tensors.items() if within not in name}
    for layer in layers:
        state |= read_fused(checkpoint.tensors, layer + within[:-1], experts.count(config), experts.biased)
    return state


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hides the bar that transformers draws while it loads, on a terminal or not: commands draw their own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def attention_of(checkpoint: Checkpoint) -> str | None:
    """Returns the attention with which transformers must run a checkpoint; None for its default. Older releases drop
    the bound of scores in all but the eager one."""
    return "eager" if checkpoint.config.get("attn_logit_softcapping") else None
