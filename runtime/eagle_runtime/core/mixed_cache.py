"""The key/value rows of a model whose layers have heads of several shapes, as Gemma-4 has: a cache for each shape. Of a
model with states another one holds these (Qwen3.5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int
from eagle_runtime.core.cache import Cache, HeadMajorCache, Kind, KVCache
from eagle_runtime.core.state_cache import StateCache

Part = KVCache | HeadMajorCache | StateCache


class MixedCache(Cache):
    """Caches whose rows are committed and dropped together. parts: of each shape, in the order of GraphSpec.alike, and
    the states last. Its own length counts: an interrupt may leave another one in a part, until that is used next."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        super().__init__(parts[0].capacity)
        self.in_place = parts[0].in_place

    def each(self) -> Iterator[Part]:
        for part in self.parts:
            part.length = self.length
            yield part

    def watch_growth(self, called: Callable[[int], None] | None) -> None:
        for part in self.parts:
            part.watch_growth(called)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def token_bytes(self) -> int:
        return sum(part.token_bytes for part in self.parts)

    def shrink(self) -> None:
        for part in self.each():
            part.shrink()

    def fit(self, rows: int) -> None:
        for part in self.each():
            part.fit(rows)

    def make_room(self, rows: int) -> None:
        """See that `rows` more rows can be written after the committed ones."""
        for part in self.each():
            part.make_room(rows)

    @property
    def kinds(self) -> list[Kind]:
        return [kind for part in self.parts for kind in part.kinds]

    def read(self, most: int | None = None) -> list[npt.NDArray[np.generic]]:
        return [array for part in self.each() for array in part.read(most)]

    def write(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        count = self.rows_in(arrays)
        self.length = 0
        for part, own in zip(self.each(), self._divided(arrays), strict=True):
            part.write(own)
        self.length = count

    def rows_in(self, arrays: Sequence[npt.NDArray[np.generic]]) -> int:
        counts = {part.rows_in(own) for part, own in zip(self.parts, self._divided(arrays), strict=True)}
        if len(counts) != 1:
            raise ValueError(f"{len(arrays)} arrays of rows do not fit a cache of {len(self.kinds)}")
        return counts.pop()

    def _divided(self, arrays: Sequence[npt.NDArray[np.generic]]) -> list[Sequence[npt.NDArray[np.generic]]]:
        """Of each part its own; the last one has all that are left."""
        firsts = list(accumulate((len(part.kinds) for part in self.parts[:-1]), initial=0))
        return [arrays[first:end] for first, end in zip(firsts, [*firsts[1:], None], strict=True)]

    def gather(self, path: Int) -> None:
        for part in self.each():
            part.gather(path)

    def computed(self) -> None:
        for part in self.each():
            part.computed()

    def mark(self) -> None:
        for part in self.each():
            part.mark()

    def reach(self, length: int) -> int:
        return min(part.reach(length) for part in self.parts)  # asked from other threads too, and changes nothing

    def truncate(self, length: int) -> None:
        for part in self.each():
            part.truncate(length)
        super().truncate(length)

    def pretend(self, length: int) -> None:
        for part in self.each():
            part.pretend(length)
        super().pretend(length)
