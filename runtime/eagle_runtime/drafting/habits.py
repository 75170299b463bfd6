"""The habits of a model: its own next tokens after the last few tokens, from rows that it has verified (token
recycling, arXiv 2408.08696, which keeps the latest row after the last token alone).

What the target once said of the next token it is likely to say again after the same tokens. The mean of what it said
is kept after the last token, the last two, and so on up to ORDER; a longer context counts more, the more often it was
seen (as in the interpolated n-gram models of Witten and Bell, 1991). Rows of accepted nodes and of the prompt are
taken, not those of rejected nodes: they cost the host's time, and gave no more tokens (docs/dev/trees.md).

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float
from eagle_runtime.sampling.candidates import Candidates, LogitRow

SUCCESSORS = 16  # kept per context [-0.7 %, +0.3 %]
ORDER = 3  # tokens of the longest context; five are no better (docs/dev/trees.md)
MOST_CONTEXTS = 1 << 16  # contexts that are kept: about 25 MB of them; then the oldest makes room
# Logits further below the highest one: NEAR, add little to a row's sum; KEPT, are no token worth keeping
# [+1.0 %, +0.8 %; -0.3 %, +0.7 %].
NEAR, KEPT = np.float32(10), np.float32(4)
FADE = 0.9  # weight of the rows before the newest, in a context's mean [+1.1 %, +1.0 %]
SHORTER = 0.5  # rows that a shorter context counts for where a longer one is known [+1.3 %, +0.4 %]

Context = tuple[int, ...]
Row = dict[int, float]  # token -> probability, or a sum of probabilities
Entry = tuple[Context, Row, float]  # faded sums of a context's rows, and of their number


class Habits:
    """Successors of contexts, shared by all generations of a loaded bundle, in any thread."""

    def __init__(self, vocab_size: int, order: int = ORDER, most: int = MOST_CONTEXTS) -> None:
        """order: tokens of the longest context; most: contexts that are kept."""
        self.vocab_size = vocab_size
        self.order = order
        self._most = most
        # Faded sums of rows, and of their number; the contexts seen last are last. An entry is replaced, never changed.
        self._seen: dict[Context, tuple[Row, float]] = {}
        self.learned = 0  # rows, since it was made
        self._lock = threading.Lock()  # of writers; a reader gets an entry as it is, old or new

    def __len__(self) -> int:
        return len(self._seen)

    def after(self, context: Context) -> Row:
        """Returns the successors of a context with their probabilities, which add up to 1 at most; none where not even
        the last token is known."""
        mean: Row = {}
        for length in range(1, min(self.order, len(context)) + 1):
            entry = self._seen.get(context[-length:])
            if entry is None:
                break
            sums, count = entry
            whole = count + SHORTER if mean else count
            shorter = mean
            mean = {token: value / whole for token, value in sums.items()}
            for token, value in shorter.items():
                mean[token] = mean.get(token, 0.0) + value * SHORTER / whole
        return mean

    def learn(self, tokens: Sequence[int], logits: Float | Sequence[LogitRow]) -> None:
        """Take what the target said in a text. tokens: a text, or its end; logits [R, V]: after the last R of them."""
        ends = range(len(tokens) - len(logits) + 1, len(tokens) + 1)
        contexts = (tuple(tokens[max(0, end - self.order) : end]) for end in ends)
        self.put(zip(contexts, successors(logits), strict=True))

    def put(self, rows: Iterable[tuple[Context, Row]]) -> None:
        """Keep rows: of a context and all its ends, the likeliest tokens after it. Empty rows are left out."""
        seen = self._seen
        with self._lock:
            for context, row in rows:
                self.learned += bool(row)
                for start in range(len(context) if row else 0):
                    end = context[start:]
                    entry = seen.pop(end, None)  # a context that was seen again becomes the newest
                    seen[end] = (row, 1.0) if entry is None else _added(entry, row)
            while len(seen) > self._most:
                del seen[next(iter(seen))]

    def entries(self) -> list[Entry]:
        """Returns all that is kept, the contexts seen last at the end."""
        with self._lock:
            return [(context, *entry) for context, entry in self._seen.items()]

    def restore(self, entries: Iterable[Entry]) -> None:
        """Keep `entries` of earlier habits alone, the latest of them if there are too many."""
        with self._lock:
            self._seen = {context: (row, count) for context, row, count in list(entries)[-self._most :]}


def _added(entry: tuple[Row, float], row: Row) -> tuple[Row, float]:
    sums, count = entry
    new = {token: FADE * value for token, value in sums.items()}
    for token, probability in row.items():
        new[token] = new.get(token, 0.0) + probability
    if len(new) > SUCCESSORS:
        new = dict(sorted(new.items(), key=lambda entry: -entry[1])[:SUCCESSORS])
    return new, FADE * count + 1


def successors(logits: Float | Sequence[LogitRow]) -> list[Row]:
    """logits [R, V] -> the likeliest next tokens of each row, SUCCESSORS at most, with their probabilities. Rows of no
    use, with NaN or infinities, are empty.

    The sum of a row leaves out what is NEAR below its highest logit, so that few of its numbers are looked at."""
    if not isinstance(logits, np.ndarray):
        return [_of_candidates(row.candidates) for row in logits]
    highest = logits.max(1)
    # NaN and infinities fail the comparison. Of one axis nonzero takes an eighth of its time with two.
    rows, ids = np.divmod(np.flatnonzero(logits > (highest - NEAR)[:, None]), logits.shape[1])
    below = logits[rows, ids] - highest[rows]
    weights = np.exp(below)
    sums = np.bincount(rows, weights, len(logits))
    kept = below > -KEPT
    rows, ids = rows[kept], ids[kept]
    probabilities = weights[kept] / sums[rows]
    ends = np.searchsorted(rows, np.arange(len(logits) + 1)).tolist()
    return [_row(ids[start:end], probabilities[start:end]) for start, end in itertools.pairwise(ends)]


def _row(tokens: npt.NDArray[np.int64], probabilities: npt.NDArray[np.floating[Any]]) -> Row:
    """The likeliest of some tokens. A flat distribution has thousands, which are not sorted for the sake of a few."""
    if len(tokens) > SUCCESSORS:
        least = np.partition(probabilities, -SUCCESSORS)[-SUCCESSORS]
        near = np.flatnonzero(probabilities >= least)
        near = near[np.argsort(-probabilities[near], kind="stable")[:SUCCESSORS]]
        tokens, probabilities = tokens[near], probabilities[near]
    return dict(zip(tokens.tolist(), probabilities.tolist(), strict=True))


def _of_candidates(known: Candidates) -> Row:
    if len(known.ids) == 0 or not np.isfinite(known.logits).all() or not np.isfinite(known.log_sum_exp):
        return {}
    kept = known.logits > known.logits.max() - KEPT
    probabilities = np.exp(np.minimum(known.logits[kept] - known.log_sum_exp, 0))
    return _row(known.ids[kept], probabilities)
