"""Text that a source writes itself, in transformers: what it begins with, and how it goes on.

Shapes: V vocabulary; a batch of texts has B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_calib.texts import read_windows
from eagle_export.families.family import cache_keyword
from eagle_runtime.text.tokenizer import Text

SEED = 0


def text_starts(text: Text, vocab: int, count: int, size: int, window: int, most: int) -> list[list[int]]:
    """Returns `count` pieces of the package's text, of `size` tokens each, or pseudo-random ids without a tokenizer.
    window: tokens from one piece to the next; most: tokens of the text that pieces are taken from."""
    if text.available:
        windows = read_windows(None, text, vocab, window, most)
        pieces = [ids[:size] for ids in windows if len(ids) >= size]
        if len(pieces) >= count:
            return pieces[:: len(pieces) // count][:count]
    starts: list[list[int]] = np.random.default_rng(SEED).integers(0, vocab, (count, size)).tolist()
    return starts


def continued(
    model: Any, starts: Sequence[list[int]], count: int, choose: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Yields the next token [B, 1] of all starts, which have one length, `count` times. model: as transformers runs it.
    choose: logits [B, V] -> tokens [B, 1]."""
    name, cache, new = cache_keyword(model), None, torch.tensor(starts)
    for _ in range(count):
        out = model(input_ids=new, use_cache=True, logits_to_keep=1, **{name: cache})
        cache = out[name]
        new = choose(out.logits[:, -1])
        yield new
