"""Answers prompts with a target of any family: transformers runs it on a batch of rows, padded on the left, with the
cache that it makes for the family.

Shapes: N rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from eagle_export.base.quiet import quiet
from eagle_export.reading.families.family import cache_keyword
from eagle_train.answering import Request, Requests, Row, checked, take_in
from eagle_train.attention import FUSED
from eagle_train.sampling import choose
from eagle_train.target import FrozenTarget


class PaddedSampler:
    """An AnswerSampler that runs the target's weights. rows: answers that are written at once; others are begun when
    all of these have ended."""

    def __init__(self, target: FrozenTarget, rows: int) -> None:
        self.vocab_size, self.context = target.vocab_size, target.context
        # transformers hides padding before the first product of a convolution, whose bias shows it again.
        bias = f".{target.family.convolution}.in_proj.bias"
        self._target, self._rows = target, 1 if any(bias in name for name in target.checkpoint.tensors) else rows
        self._keyword = cache_keyword(target.model.model)

    def answers(self, requests: Requests) -> Iterator[tuple[Request, list[int]]]:
        """Yields each request's new tokens as they end. Raises TrainError for a prompt that the context does not
        hold."""
        while True:
            new: list[Row] = []
            while len(new) < self._rows and (request := requests.take()) is not None:
                new.append(Row(checked(request, self.context), len(request.ids)))
            if not new:
                return
            for row in self._written(new):
                yield row.request, row.tokens

    @torch.no_grad()
    def _written(self, rows: list[Row]) -> Iterator[Row]:
        """Yields the rows as their answers end."""
        longest = max(row.length for row in rows)
        ids = self._tensor([[0] * (longest - row.length) + [*row.request.ids] for row in rows])
        mask = self._tensor([[0] * (longest - row.length) + [1] * row.length for row in rows])
        positions, cache = (mask.cumsum(1) - 1).clamp(min=0), None
        while True:
            logits, cache = self._read(ids, mask, positions, cache)
            tokens = choose(logits, [(row.request.sampling, row.request.number, len(row.tokens)) for row in rows])
            staying = []
            for place, (row, token) in enumerate(zip(rows, tokens, strict=True)):
                if take_in(row, token, self._target.eos, self.context):
                    yield row
                else:
                    staying.append(place)
            if not staying:
                return
            kept = self._tensor(staying)
            if len(staying) < len(rows):
                cache.reorder_cache(kept)
            rows = [rows[place] for place in staying]
            ids = self._tensor([[row.tokens[-1]] for row in rows])
            mask = torch.nn.functional.pad(mask[kept], (0, 1), value=1)
            positions = positions[kept, -1:] + 1

    def _read(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Reads the rows' new tokens [N, T]. mask: of all tokens, 0 for padding. Returns the logits [N, V] of the last
        ones, and the cache."""
        with sdpa_kernel(FUSED), quiet("transformers"):
            out = self._target.model.model(
                input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **{self._keyword: cache}
            )
        return self._target.logits(out.last_hidden_state[:, -1]), out[self._keyword]

    def _tensor(self, values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=self._target.device)
