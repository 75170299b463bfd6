"""A source's greedy continuations of a few prompts, with their logits: what a bundle is compared with.

The source is the checkpoint, run by transformers on the CPU in fp32. Shapes: n tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from eagle_export.checkpoint import Checkpoint
from eagle_export.errors import ExportError
from eagle_export.families.family import cache_keyword
from eagle_export.families.source import load_source
from eagle_runtime.tree import Float


@dataclass(frozen=True, slots=True)
class Continuation:
    """The source's greedy tokens after a prompt. logits [n, V]: the rows that they are the argmax of."""

    prompt: list[int]
    tokens: list[int]
    logits: Float


def continuations(
    source: Path | Checkpoint,
    prompts: Sequence[Sequence[int]],
    eos: Collection[int],
    count: int,
    look: Callable[[Any], None] = lambda model: None,
) -> list[Continuation]:
    """The greedy continuations of a checkpoint: at most `count` tokens after each prompt, up to the first eos,
    included. source: as for load_source. look: called with the model, which is freed afterwards. Raises
    ExportError if transformers cannot run it or its logits are not finite."""
    folder = source if isinstance(source, Path) else source.folder
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = load_source(source)
        results = [_continue(model, prompt, eos, count) for prompt in prompts]
        look(model)
    except Exception as error:  # transformers, safetensors and a full memory raise many kinds
        raise ExportError(f"transformers does not run {folder} ({first_line(error)})") from None
    finally:
        if bars:
            transformers_logging.enable_progress_bar()
    if not all(np.isfinite(each.logits).all() for each in results):
        raise ExportError(f"the logits of {folder} are not finite")
    return results


@torch.inference_mode()
def _continue(model: Any, prompt: Sequence[int], eos: Collection[int], count: int) -> Continuation:
    rows: list[Float] = []
    tokens: list[int] = []
    name, cache, new = cache_keyword(model), None, list(prompt)
    while len(tokens) < count and not (tokens and tokens[-1] in eos):
        out = model(input_ids=torch.tensor([new]), use_cache=True, logits_to_keep=1, **{name: cache})
        cache = out[name]
        rows.append(out.logits[0, -1].float().numpy())
        tokens.append(int(rows[-1].argmax()))
        new = tokens[-1:]
    return Continuation(list(prompt), tokens, np.stack(rows))


def first_line(error: Exception) -> str:
    """An error of a library in a few words: its kind, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no message'}"
