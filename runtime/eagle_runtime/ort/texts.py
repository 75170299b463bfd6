"""What the native operators are told before a forward pass, as a graph has no input for it: where the caches of several
texts lie, and that new rows go into the cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from eagle_runtime.core.cache import Cache, KVCache
from eagle_runtime.core.mixed_cache import Part
from eagle_runtime.core.state_cache import StateCache

MOST_TEXTS, MOST_SHAPES = 64, 4  # of one pass, and of its layers' caches (kernels/src/attention.cpp)


class Announcement:
    """The library's functions that are told of this thread's next pass."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raises AttributeError for a library without them."""
        # of 2: passes append rows to caches that keep heads apart, and have no outputs of them; of 0: they do not
        self.write_rows: Any = library.eagle_write_rows
        self.write_rows.argtypes, self.write_rows.restype = [ctypes.c_int], None
        self._call: Any = library.eagle_next_texts
        self._call.argtypes, self._call.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], ctypes.c_int

    def __call__(self, caches: Sequence[Cache]) -> None:
        """caches: of the texts, in the order of their rows; none: the next pass is of one text again."""
        shapes = list(zip(*(cache.each() for cache in caches), strict=True)) or [()]
        numbers = [number for shape in shapes for part in shape for number in _numbers(part)]
        if self._call((ctypes.c_int64 * len(numbers))(*numbers), len(caches), len(shapes)) != 0:
            raise AssertionError(f"{len(caches)} texts in one pass; the caller keeps to MOST_TEXTS")


def _numbers(cache: Part) -> tuple[int, ...]:
    if isinstance(cache, StateCache):
        (rows, state, coming), of_states = cache.places[0], cache.state_bytes
        return rows, cache.rows.strides[0], state, of_states, cache.count, 0, coming
    if isinstance(cache, KVCache):
        layer_bytes = 2 * cache.rows.strides[0]
        return cache.addresses[0], layer_bytes, cache.addresses[1], layer_bytes, cache.length, cache.length, 0
    keys, values, columns, of_keys, of_values = cache.past
    return keys, of_keys, values, of_values, columns, cache.length, 0
