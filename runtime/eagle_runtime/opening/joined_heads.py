"""Whether a forward pass of a draft head can hold rows of several texts: a check on the graph itself.

The native operators compute attention of several texts in one pass, but not every head's attention is one of them, and
older operators did not do this for heads. So two texts read some rows, each alone and both together, and what comes out
is compared, which takes a few milliseconds.
"""

from __future__ import annotations

import numpy as np

from eagle_runtime.base.errors import BackendError
from eagle_runtime.base.tree import additive_mask
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.session import Array, Session
from eagle_runtime.core.target import causal, row_numbers

PAST = (5, 9)  # rows of each text before those that are compared,
ROWS = (3, 2)  # and these
INPUTS = {"input_ids", "features", "position_ids", "tree_mask", "logit_rows"}


def check_head(session: Session) -> None:
    """Tell a head's session, if it may join texts, whether it does."""
    if getattr(session, "may_join", False) and set(session.inputs) == INPUTS:
        session.joins = _joins(session)


def _joins(session: Session) -> bool:
    """Whether rows of two texts have the same bits in one pass as in two."""
    caches = [session.new_cache(sum(PAST) + sum(ROWS)) for _ in PAST]
    texts = [(number, cache) for number, cache in enumerate(caches) if isinstance(cache, KVCache)]
    if len(texts) < len(caches):
        return False
    try:
        for number, cache in texts:
            session.run(_feeds(session, number, 0, PAST[number]), cache)
            cache.advance(PAST[number])
        passes = [(_feeds(session, number, PAST[number], ROWS[number]), cache) for number, cache in texts]
        alone = [_outcome(session.run(*one), *one) for one in passes]
        for _, cache in passes:
            cache.rows[:, cache.length :] = 0
        outputs = session.run_together(passes)
    except BackendError:  # of operators that do not know such a pass
        return False
    together = [_outcome(out, *one) for out, one in zip(outputs, passes, strict=True)]
    pairs = zip([*alone[0], *alone[1]], [*together[0], *together[1]], strict=True)
    return all(np.array_equal(one, other) for one, other in pairs)


def _feeds(session: Session, number: int, first: int, count: int) -> dict[str, Array]:
    """`count` rows of a text from position `first` on, which see each other as in a text."""
    rows = first + row_numbers(count)
    features = session.inputs["features"]
    values = np.sin(np.arange(count * int(features.shape[2])) + number).reshape(count, -1)
    return {
        "input_ids": rows + number,
        "features": values.astype(features.dtype),
        "position_ids": rows,
        "tree_mask": additive_mask(causal(count), session.inputs["tree_mask"].dtype),
        "logit_rows": row_numbers(count)[-1:],
    }


def _outcome(out: dict[str, Array], feeds: dict[str, Array], cache: KVCache) -> list[Array]:
    """A copy of what a pass has computed, the new rows in the cache included."""
    end = cache.length + len(feeds["input_ids"])
    return [*(np.array(value) for value in out.values()), cache.rows[:, cache.length : end].copy()]
