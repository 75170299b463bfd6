"""Engines behind one protocol: a graph of the canonical contract, run over rows of a KVCache."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import KVCache
from eagle_runtime.manifest import TensorSpec

Array = npt.NDArray[np.generic]


class Session(Protocol):
    """One loaded graph. inputs and outputs leave out the key/value rows, which come and go through the cache."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def new_cache(self, capacity: int) -> KVCache:
        """A cache of `capacity` rows in this graph's type and layout."""

    def run(self, feeds: Mapping[str, Array], cache: KVCache) -> dict[str, Array]:
        """One pass: rows below cache.length are the past, the T new rows are written behind them; the caller
        settles them. The arrays returned are overwritten by the next run."""

    def close(self) -> None:
        """Free the engine; the session is of no use afterwards."""

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
