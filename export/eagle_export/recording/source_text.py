"""Text that a source writes itself, in transformers: what it begins with, and how it goes on.

Shapes: T tokens, H width, V vocabulary; a batch has B texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_calib.texts import read_windows
from eagle_export.reading.families.family import cache_keyword
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


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass over T rows of each text. tokens [B, T]: what it reads. hidden: per layer what the model computes
    for them [B, T, H], the embedding first; empty unless it is asked for."""

    tokens: Tensor
    hidden: tuple[Tensor, ...]


def continued(
    model: Any,
    starts: Sequence[Sequence[int]],
    count: int,
    choose: Callable[[Tensor], Tensor],
    *,
    with_hidden: bool = False,
    logits_to_keep: int = 1,
) -> Iterator[Pass]:
    """Reads all starts, which have one length, and then `count` more tokens of each, one by one. model: as transformers
    runs it. choose: logits [B, V] -> the next tokens [B, 1]. logits_to_keep: of each text's last rows in a pass; 0 for
    all rows, where what the LM head reads is recorded."""
    name, cache, new = cache_keyword(model), None, torch.tensor(starts)
    with few_rows(model):
        for left in reversed(range(count + 1)):
            settings = {"logits_to_keep": logits_to_keep, "output_hidden_states": with_hidden, name: cache}
            out = model(input_ids=new, use_cache=True, **settings)
            cache = out[name]
            yield Pass(new, tuple(out.hidden_states) if with_hidden else ())
            if left:
                new = choose(out.logits[:, -1])


@contextmanager
def few_rows(model: torch.nn.Module) -> Iterator[None]:
    """In this context linear layers multiply their weight by the rows, not the rows by the weight: for 24 rows of 576
    channels that takes two thirds of the time (torch 2.13 with MKL on an AMD EPYC, 58 and 40 GFLOP/s)."""
    layers = [each for each in model.modules() if type(each) is torch.nn.Linear]
    for layer in layers:
        layer.forward = partial(_product, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _product(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    """Returns what the layer makes of x [..., K]."""
    rows = torch.mm(layer.weight, x.reshape(-1, x.shape[-1]).T).T.contiguous()
    return (rows if layer.bias is None else rows + layer.bias).reshape(*x.shape[:-1], -1)
