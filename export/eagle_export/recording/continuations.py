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

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import cache_keyword
from eagle_export.reading.families.source import load_source
from eagle_export.recording.source_text import few_rows
from eagle_runtime.base.tree import Float


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
        with few_rows(model):
            results = _continued(model, prompts, eos, count)
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
def _continued(model: Any, prompts: Sequence[Sequence[int]], eos: Collection[int], count: int) -> list[Continuation]:
    """All prompts in one batch: from the end of the shortest one on, each text is read token by token, first the rest
    of its prompt and then its continuation."""
    texts, rows = [list(prompt) for prompt in prompts], [list[Float]() for _ in prompts]
    shortest, longest = min(map(len, prompts)), max(map(len, prompts))
    name, cache, new = cache_keyword(model), None, torch.tensor([prompt[:shortest] for prompt in prompts])
    for length in range(shortest, longest + count):
        out = model(input_ids=new, use_cache=True, logits_to_keep=1, **{name: cache})
        cache = out[name]
        for text, row, logits in zip(texts, rows, out.logits[:, -1], strict=True):
            if len(text) == length and len(row) < count and not (row and text[-1] in eos):
                row.append(logits.float().numpy())
                text.append(int(row[-1].argmax()))
        if all(len(text) <= length for text in texts):
            break
        new = torch.tensor([[text[min(length, len(text) - 1)]] for text in texts])  # a finished text repeats its end
    return [
        Continuation(list(prompt), text[len(prompt) :], np.stack(row))
        for prompt, text, row in zip(prompts, texts, rows, strict=True)
    ]


def first_line(error: Exception) -> str:
    """An error of a library in a few words: its kind, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else 'no message'}"
