"""The key/value rows of a model whose layers have heads of several shapes, as Gemma-4 has: a cache for each shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int
from eagle_runtime.core.cache import Cache, HeadMajorCache, Kind, KVCache, checked_rows

Part = KVCache | HeadMajorCache


class MixedCache(Cache):
    """Caches of one class whose rows are committed and dropped together. parts: of each shape, in the order of
    GraphSpec.alike. Its own length counts: an interrupt may leave another one in a part, until that is used next."""

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
        count, first = checked_rows(arrays, self.kinds), 0
        self.length = 0
        for part in self.each():
            last = first + len(part.kinds)
            part.write(arrays[first:last])
            first = last
        self.length = count

    def gather(self, path: Int) -> None:
        for part in self.each():
            part.gather(path)

    def truncate(self, length: int) -> None:
        for part in self.each():
            part.truncate(length)
        super().truncate(length)

    def pretend(self, length: int) -> None:
        for part in self.each():
            part.pretend(length)
        super().pretend(length)
