"""Text that a source writes itself, in transformers: what it begins with, and how it goes on.

Shapes: T tokens, H width, V vocabulary; a batch has B texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from eagle_calib.texts import read_windows
from eagle_export.reading.families.family import cache_keyword
from eagle_export.recording.states_in_place import states_in_place
from eagle_runtime.base.tree import Float
from eagle_runtime.text.tokenizer import Text

SEED = 0
AT_ONCE = 8  # rows of logits that tokens are drawn from together: their sums take memory in fp64


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
class Greedy:
    """A text that goes on with the likeliest tokens. count: the most of them. ends: the first of these ends the text,
    included. with_logits: whether the logits are kept."""

    start: Sequence[int]
    count: int
    ends: Collection[int]
    with_logits: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A greedy text. tokens: after the start. logits [n, V]: of which the tokens are the argmax, if they are kept.
    hidden: by tap, the embedding first and -1 for what the LM head reads, of all tokens but the last [1, T, H]."""

    start: list[int]
    tokens: list[int]
    logits: Float = field(default_factory=lambda: np.empty((0, 0), np.float32))
    hidden: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Asked:
    """Greedy texts that are written beside sampled ones: a model reads many rows nearly as fast as a few. taps: of the
    hidden states that are kept. look: called with the model and these texts. leave: called with a folder by a copy of
    the process that has looked, for what it found; take: with that folder by the process itself."""

    texts: Sequence[Greedy]
    taps: Collection[int]
    look: Callable[[Any, Sequence[Written]], None]
    leave: Callable[[Path], None] = lambda folder: None
    take: Callable[[Path], None] = lambda folder: None


@dataclass(frozen=True, slots=True)
class Sampled:
    """Texts that were sampled. tokens [B, T]. hidden: by tap [B, T, H]. passes: tokens of a text in each of them."""

    tokens: Tensor
    hidden: Mapping[int, Tensor]
    passes: Sequence[int]


class Writer:
    """Texts that a model writes in one batch: sampled ones first, and then greedy ones. model: as transformers runs it.

    before: called before each forward pass with the number of texts that are being sampled, which are 0 when these are
    done, and of all texts. after: with the hidden states of the former after the last norm [B, T, H]."""

    def __init__(
        self,
        model: Any,
        report: Callable[[int, int], None] = lambda done, all_of_them: None,
        before: Callable[[int, int], None] = lambda sampled, texts: None,
        after: Callable[[Tensor], None] = lambda hidden: None,
    ) -> None:
        """report: called with the tokens of a text that are there, and those that there will be."""
        self._model, self._report, self._before, self._after = model, report, before, after

    @torch.inference_mode()
    def write(
        self,
        sampled: Sequence[Sequence[int]],
        length: int,
        sampled_taps: Collection[int],
        greedy: Sequence[Greedy],
        taps: Collection[int],
    ) -> tuple[Sampled, list[Written]]:
        """sampled: what these texts begin with, all of one length; they go on to `length` tokens at temperature 1, also
        after one that ends a text. sampled_taps, taps: of hidden states that are kept of them, and of greedy texts."""
        count, random = len(sampled), torch.Generator().manual_seed(SEED)
        texts = [*map(list, sampled), *(list(each.start) for each in greedy)]
        state = [_Greedy(each, list(each.start)) for each in greedy]
        last = max([length if sampled else 0, *(len(each.start) + each.count - 1 for each in greedy)])
        read, passes, kept = 0, list[int](), dict[int, Tensor]()
        new = torch.tensor([text[: min(map(len, texts))] for text in texts])
        name, cache = cache_keyword(self._model), _cache(self._model.config, last)
        with states_in_place(self._model):
            while True:
                left = count if read < length else 0
                self._before(left, len(texts))
                settings = {"logits_to_keep": 1, "output_hidden_states": True, name: cache}
                out = self._model(input_ids=new, use_cache=True, **settings)
                before, read = read, read + new.shape[1]
                if left:
                    self._after(out.hidden_states[-1][:left])
                    passes.append(new.shape[1])
                    for tap in sampled_taps:
                        rows = out.hidden_states[tap][:left]
                        if tap not in kept:  # whole at once: many small parts between large ones break up the memory
                            kept[tap] = torch.empty(left, length, rows.shape[2])
                        kept[tap][:, before:read] = rows
                for row, one in enumerate(state, count):
                    one.keep(out.hidden_states, row, taps)
                self._report(read, last)
                logits = out.logits[:, -1].float()
                if count and len(texts[0]) == read < length:
                    for text, token in zip(texts, sample(logits[:count], random).tolist(), strict=False):
                        text.append(token)
                for row, one in enumerate(state, count):
                    one.go_on(logits[row], read)
                    texts[row] = one.text
                if read >= length * bool(count) and all(one.done for one in state):
                    break  # before the last tokens are read, for which the caches have no room
                new = torch.tensor([[text[min(read, len(text) - 1)]] for text in texts])  # a done text repeats it
        return Sampled(torch.tensor(texts[:count]), kept, passes), [one.written() for one in state]


class _Greedy:
    """A greedy text while it is written. text: start and tokens so far."""

    def __init__(self, asked: Greedy, text: list[int]) -> None:
        self.asked, self.text, self.rows = asked, text, list[Float]()
        self.hidden: dict[int, list[Tensor]] = {}
        self.done = asked.count < 1

    def keep(self, hidden: Sequence[Tensor], row: int, taps: Collection[int]) -> None:
        if not self.done:
            for tap in taps:
                self.hidden.setdefault(tap, []).append(hidden[tap][row : row + 1].clone())

    def go_on(self, logits: Tensor, read: int) -> None:
        """logits [V]: after `read` tokens."""
        if self.done or len(self.text) > read:
            return
        if self.asked.with_logits:
            self.rows.append(logits.clone().numpy())
        self.text.append(int(logits.argmax()))
        self.done = len(self.text) == len(self.asked.start) + self.asked.count or self.text[-1] in self.asked.ends

    def written(self) -> Written:
        start = len(self.asked.start)
        hidden = {tap: torch.cat(parts, 1) for tap, parts in self.hidden.items()}
        written = Written(self.text[:start], self.text[start:], hidden=hidden)
        return replace(written, logits=np.stack(self.rows)) if self.rows else written


def _cache(config: Any, room: int) -> Cache:
    """For texts of `room` tokens; layers without attention have transformers' own."""
    own = dict(enumerate(DynamicCache(config=config).layers))
    layers = range(int(config.num_hidden_layers))
    return Cache([_Rows(room) if isinstance(own.get(n), DynamicLayer | None) else own[n] for n in layers])


class _Rows(DynamicLayer):  # type: ignore[misc]
    """The keys and values of a layer, in memory that is there from the beginning: tensors that are replaced by longer
    ones in every pass take several times as much, since what is freed is always too small for the next."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room
        self._all: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [B, Hkv, T, D]. Returns those of all rows."""
        start = self.get_seq_length()
        stop = start + key_states.shape[2]
        if self._all is None:
            self.lazy_initialization(key_states, value_states)
            first, second = (
                torch.empty(*each.shape[:2], self._room, each.shape[3], dtype=each.dtype)
                for each in (key_states, value_states)
            )
            self._all = first, second
        for rows, new in zip(self._all, (key_states, value_states), strict=True):
            rows[:, :, start:stop] = new
        self.keys, self.values = (rows[:, :, :stop] for rows in self._all)
        return self.keys, self.values


def sample(logits: Tensor, random: torch.Generator) -> Tensor:
    """Returns a token of each row [B] of logits [B, V] at temperature 1. One number is drawn per row, where
    torch.multinomial draws one per token, which takes a fifth of a pass's time."""
    drawn = []
    for rows in torch.split(logits, AT_ONCE):
        up_to = rows.softmax(-1).double().cumsum(-1)
        numbers = torch.rand(len(rows), 1, generator=random, dtype=torch.float64) * up_to[:, -1:]
        drawn.append(torch.searchsorted(up_to, numbers, right=True)[:, 0].clamp(max=logits.shape[-1] - 1))
    return torch.cat(drawn)
