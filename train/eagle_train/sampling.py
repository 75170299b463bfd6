"""Chooses tokens of many answers at once, each with random numbers of its own, and finds where a text runs in circles.

Shapes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_train.config import Sampling

NUCLEUS = 256  # likeliest tokens among which a nucleus is looked for before all are sorted
LOOP_TIMES, LOOP_TOKENS, LOOP_LONGEST = 3, 32, 128  # a loop: a passage of at most 128 tokens, three times, 32 in all
Chosen = tuple[Sampling, int, int]  # the settings of an answer, its number, the position in it

U64 = np.uint64


def choose(logits: Tensor, rows: Sequence[Chosen]) -> list[int]:
    """Returns a token for each row of logits [N, V] in fp32.

    A row's token depends on its logits, its settings with their seed, the number of its answer and its position
    alone: not on the other rows."""
    tokens = logits.argmax(-1).tolist()
    groups: dict[tuple[float, float, int], list[int]] = {}
    for place, (sampling, _, _) in enumerate(rows):
        if sampling.temperature > 0:
            groups.setdefault((sampling.temperature, sampling.top_p, sampling.top_k), []).append(place)
    for (temperature, top_p, top_k), places in groups.items():
        keys = [[each % (1 << 64) for each in (rows[place][0].seed, *rows[place][1:])] for place in places]
        points = torch.from_numpy(uniform(np.array(keys, U64))).to(logits.device, torch.float32)
        part = logits if len(places) == len(rows) else logits[torch.tensor(places, device=logits.device)]
        for place, token in zip(places, drawn(part / temperature, top_p, top_k, points).tolist(), strict=True):
            tokens[place] = token
    return [int(token) for token in tokens]


def drawn(scaled: Tensor, top_p: float, top_k: int, points: Tensor) -> Tensor:
    """Returns the tokens [N] at which the sums of the allowed probabilities reach the points [N] in [0, 1).

    scaled [N, V]: logits over the temperature. top_k goes before top_p, which keeps the fewest of the likeliest tokens
    that together reach it."""
    at, vocab = points[:, None], scaled.shape[-1]
    if top_p >= 1 and not 0 < top_k < vocab:
        return _reached(torch.softmax(scaled, -1), at)
    size = min(top_k or vocab, vocab, NUCLEUS) if top_p < 1 else min(top_k, vocab)
    total = torch.logsumexp(scaled, -1, keepdim=True)
    values, ids = scaled.topk(size, -1)
    probs = (values - total).exp()
    whole = min(top_k or vocab, vocab)
    if size < whole and bool((probs.sum(-1) < top_p).any()):
        values, ids = scaled.topk(whole, -1)
        probs = (values - total).exp()
    if 0 < top_k < vocab:  # what top_k leaves has a sum of 1
        probs = torch.softmax(values, -1)
    before = probs.cumsum(-1) - probs
    probs = probs.masked_fill(before >= top_p, 0.0)
    return ids.gather(1, _reached(probs, at)[:, None])[:, 0]


def _reached(probs: Tensor, at: Tensor) -> Tensor:
    """Returns the first places at which the sums of probs [N, V] exceed the shares `at` [N, 1] of their totals."""
    sums = probs.cumsum(-1)
    places = torch.searchsorted(sums, at * sums[:, -1:], right=True)[:, 0]
    last = (sums < sums[:, -1:]).sum(-1)  # a share may be rounded up to the total
    return torch.minimum(places, last)


def uniform(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns numbers [n] in [0, 1), one for each triple of keys [n, 3], on which alone it depends (SplitMix64)."""
    state = np.zeros(len(keys), U64)
    with np.errstate(over="ignore"):
        for part in keys.T:
            state = state + part + U64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> U64(30))) * U64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> U64(27))) * U64(0x94D049BB133111EB)
            state = state ^ (state >> U64(31))
    return (state >> U64(11)).astype(np.float64) / float(1 << 53)


def loop_start(tokens: Sequence[int]) -> int | None:
    """Returns where the second round of a loop begins at which tokens end, or None.

    A loop is a passage of up to LOOP_LONGEST tokens that was written LOOP_TIMES times in a row, in LOOP_TOKENS tokens
    at least."""
    last = len(tokens) - 1
    for period in range(1, min(LOOP_LONGEST, len(tokens) // LOOP_TIMES) + 1):
        if tokens[last] != tokens[last - period]:
            continue
        span = max(LOOP_TIMES * period, LOOP_TOKENS)
        if span > len(tokens):
            continue
        if all(tokens[last - i] == tokens[last - i - period] for i in range(span - period)):
            return len(tokens) - span + period
    return None


def cut_loop(tokens: list[int]) -> list[int]:
    """Returns the tokens before the second round of the first loop, or all."""
    for end in range(LOOP_TOKENS, len(tokens) + 1):
        if (start := loop_start(tokens[:end])) is not None:
            return tokens[:start]
    return tokens
