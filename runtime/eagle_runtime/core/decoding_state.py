"""What outlives one answer of a conversation: the text so far, and what both models have read of it.

    state = DecodingState(target, head)
    for cycle in generate(state, drafter, sampler, ids): ...        # the first answer
    for cycle in generate(state, drafter, sampler, longer_ids): ... # reads only what is new

Of a text of n tokens the target has read the first n - 1 at most: the last one roots the next tree, and a text that is
known as a whole is read again from its last token, whose logits are wanted. So what is read again depends on the two
texts alone, and not on how the earlier one was drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float
from eagle_runtime.core.cache import Cache
from eagle_runtime.core.head import ForgettingHead, HeadOfText, HeadSnapshot
from eagle_runtime.core.target import SHORT_CHUNK, Features, Target


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a text that was read. count: tokens read so far, those that were known included; logits [R, V]: after
    the last ones of them."""

    count: int
    logits: Float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a state. target: rows of its cache (Cache.read); head: None without one."""

    tokens: tuple[int, ...]
    target: tuple[npt.NDArray[np.generic], ...]
    head: HeadSnapshot | None


class DecodingState:
    """One text. tokens: its ids; the caches of target and head hold rows of no other. head: None for a target alone.
    draft_models: small models that draft; what they lack of a text they read before they draft."""

    def __init__(self, target: Target, head: HeadOfText | None, draft_models: Sequence[ForgettingHead] = ()) -> None:
        self.target = target
        self.head = head
        self.draft_models = tuple(draft_models)
        self._drafting = [*([] if head is None else [head]), *draft_models]
        self.tokens: list[int] = []
        self.reused = 0  # rows that were there when the latest text was read

    def align(self, ids: Sequence[int]) -> int:
        """Drop what does not belong to a text that begins with `ids`, or goes on from them. Returns the number of rows
        of the target that stay; the tokens after them are to be read."""
        same = common_prefix(self.tokens, ids)
        kept = self.target.cache.reach(min(max(0, min(same, len(ids)) - 1), self.target.cache.length))
        self.target.cache.truncate(kept)
        for one in self._drafting:
            one.truncate(kept)
        del self.tokens[same:]
        return kept

    def read(self, ids: Sequence[int], last: int = 1, others: Callable[[], int] = lambda: 0) -> Iterator[Chunk]:
        """Make `ids`, one or more, the text, of which the target reads what it has not, a chunk of rows at a time.
        last: rows of each chunk whose logits are wanted (Target.read). others: returns how many other texts wait while
        a chunk is read; it is a short one then."""
        start = self.reused = self.align(ids)
        for cache in self.caches:
            cache.fit(len(ids))
        while start < len(ids):
            size = min(self.target.chunk, SHORT_CHUNK) if others() else self.target.chunk
            chunk = ids[start : start + size]
            logits, features = self.target.read(chunk, last)
            self.tokens[start:] = chunk
            for one in self._drafting:
                one.note(features)
            start = len(self.tokens)
            if start == len(ids):
                self.target.cache.mark()
            yield Chunk(start, logits)

    def emit(self, tokens: Sequence[int], features: Features) -> None:
        """Add the tokens of a verification, whose rows the target has kept. features [n, Hd]: of these rows."""
        self.tokens.extend(tokens)
        for one in self._drafting:
            one.note(features)

    def forget(self) -> None:
        """Drop the text."""
        self.align([])

    def release(self) -> None:
        """Drop the text, and free the memory of its rows."""
        self.forget()
        for cache in self.caches:
            cache.shrink()

    @property
    def caches(self) -> tuple[Cache, ...]:
        """The caches of all models."""
        return (self.target.cache, *(one.cache for one in self._drafting))

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that all models hold."""
        return sum(cache.length * cache.token_bytes for cache in self.caches)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all models."""
        return sum(cache.token_bytes for cache in self.caches)

    def snapshot(self, most: int | None = None) -> Snapshot:
        """Returns a copy of all that is held, but for rows of draft models; most: of the text's first tokens alone, or
        of fewer where the cache cannot go back to so many."""
        most = None if most is None else self.target.cache.reach(most)
        head = None if self.head is None else self.head.snapshot()
        return Snapshot(tuple(self.tokens[:most]), tuple(self.target.cache.read(most)), head)

    def restore(self, snapshot: Snapshot) -> None:
        """Hold what another state of the same models held. Raises ValueError for rows of other shapes."""
        self.forget()
        try:
            self.target.cache.write(snapshot.target)
            if self.head is not None and snapshot.head is not None:
                self.head.restore(snapshot.head)
            for one in self.draft_models:
                one.truncate(self.target.cache.length)
        except BaseException:
            self.release()
            raise
        self.tokens[:] = snapshot.tokens


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common from their beginning on; fast where one text goes on from the
    other."""
    length = min(len(first), len(second))
    one, other = list(first[:length]), list(second[:length])
    if one == other:
        return length
    return int(np.flatnonzero(np.asarray(one, np.int64) != np.asarray(other, np.int64))[0])
