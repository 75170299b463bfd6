"""The habits of a model: its own likeliest next tokens after the last few tokens, from rows that it has verified (token
recycling, arXiv 2408.08696, which keeps them after the last token alone).

Every verification computes logits after each node of the tree, also of those that are rejected: what the target says
there of the next token is likely to be what it says the next time after the same tokens. A text is looked for by its
last ORDER tokens, then by fewer.

Shapes: N nodes, V vocabulary, k successors, S contexts that are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from eagle_runtime.accept import Step
from eagle_runtime.candidates import LogitRow, LogitRows
from eagle_runtime.drafting.head import NEVER
from eagle_runtime.tree import Float, Int, Tree

SUCCESSORS = 8  # kept per context (k)
ORDER = 3  # tokens of the longest context
MOST = 1 << 17  # contexts that are kept: 10 MB of them at most; then the oldest makes room
NEAR = 10.0  # logits further below the highest one are not looked at: they add little to a row's sum

Context = tuple[int, ...]


class Habits:
    """Successors of contexts, shared by all generations of a loaded bundle, in any thread."""

    def __init__(self, vocab_size: int, order: int = ORDER, most: int = MOST) -> None:
        """order: tokens of the longest context; most: contexts that are kept."""
        self.vocab_size = vocab_size
        self.order = order
        self._most = most
        self._rows: dict[Context, tuple[Int, Float]] = {}  # ids [k], log-probabilities [k]; oldest contexts first
        self._lock = threading.Lock()  # of writers; a reader gets a row as it is, old or new

    def __len__(self) -> int:
        return len(self._rows)

    def after(self, context: Context) -> tuple[Int, Float] | None:
        """Returns the successors of the longest known end of a context, best first: ids [k] and log-probabilities [k],
        not to be changed. None where not even the last token is known."""
        for start in range(max(0, len(context) - self.order), len(context)):
            if (row := self._rows.get(context[start:])) is not None:
                return row
        return None

    def learn(self, before: Sequence[int], tree: Tree, step: Step) -> None:
        """Take the rows of a verified tree. before: the tokens before its root, the last `order` - 1 at least."""
        if step.logits is None:
            return
        paths = _contexts(tuple(before[-(self.order - 1) :]) if self.order > 1 else (), tree, self.order)
        ids, log_probs = successors(step.logits, min(SUCCESSORS, self.vocab_size))
        accepted = set(step.path.tolist())
        nodes = [node for node in range(tree.num_nodes) if node not in accepted] + step.path.tolist()
        # Of equal contexts the one of an accepted node stays.
        self.put((paths[node], ids[node], log_probs[node]) for node in nodes)

    def put(self, rows: Iterable[tuple[Context, Int, Float]]) -> None:
        """Keep rows: of a context and all its ends, ids [k] and log-probabilities [k], best first."""
        with self._lock:
            for context, ids, log_probs in rows:
                if not np.isfinite(log_probs[0]):
                    continue  # of a row that holds NaN or infinities
                for start in range(len(context)):
                    self._rows[context[start:]] = (ids, log_probs)
            while len(self._rows) > self._most:
                del self._rows[next(iter(self._rows))]


def _contexts(before: Context, tree: Tree, order: int) -> list[Context]:
    """Returns the last `order` tokens down to each node."""
    contexts: list[Context] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        above = before if parent < 0 else contexts[parent]
        contexts.append((*above, token)[-order:])
    return contexts


def successors(logits: Float | LogitRows, count: int) -> tuple[Int, Float]:
    """logits [N, V] -> the `count` likeliest next tokens of each row, best first, and their log-probabilities, [N, k];
    NEVER where fewer are near the likeliest. Rows of no use, with NaN or infinities, have NaN.

    The sum of a row leaves out what is NEAR below its highest logit, so that few numbers of a long row are sorted."""
    ids = np.zeros((len(logits), count), np.int64)
    log_probs = np.full((len(logits), count), np.float32(NEVER))
    for row in range(len(logits)):
        if isinstance(logits, np.ndarray):
            near = np.flatnonzero(logits[row] > logits[row].max() - np.float32(NEAR))
            values, log_sum = logits[row][near], None
        else:
            near, values, log_sum = _candidates(logits[row])
        if len(near) == 0 or not np.isfinite(values).all():
            log_probs[row] = np.nan
            continue
        if log_sum is None:
            highest = values.max()
            log_sum = float(highest + np.log(np.exp(values - highest).sum()))
        best = np.argsort(-values, kind="stable")[:count] if len(values) <= 64 else _highest(values, count)
        ids[row, : len(best)] = near[best]
        log_probs[row, : len(best)] = np.minimum(values[best] - log_sum, 0)
    return ids, log_probs


def _highest(values: Float, count: int) -> Int:
    best = np.argpartition(values, -count)[-count:]
    order: Int = best[np.argsort(-values[best], kind="stable")]
    return order


def _candidates(row: LogitRow) -> tuple[Int, Float, float]:
    known = row.candidates
    return known.ids, known.logits, known.log_sum_exp
