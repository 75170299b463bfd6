"""Engines behind one protocol: a graph of the canonical contract, run over rows of a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import TensorSpec
from eagle_runtime.cache import Cache

Array = npt.NDArray[np.generic]


class Rows(Protocol):
    """Rows of numbers [n, width] that stay on an engine's device: features and hidden states, which decoding only
    picks from and feeds back. On the host a NumPy array takes its place."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | npt.NDArray[np.int64], /) -> Rows:
        """Some of the rows: a slice may share memory with these, picked ones are a copy, as in NumPy."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """A copy on the host."""


class Session(Protocol):
    """One loaded graph. Batch is always 1, so arrays come and go without the axes of it: input_ids [T], tree_mask
    [T, L], logits [R, V].

    inputs and outputs, in the graph's own shapes, leave out the key/value rows, which come and go through the
    cache."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def new_cache(self, capacity: int) -> Cache:
        """A cache of `capacity` rows in this graph's type and layout."""

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        """One pass: rows below cache.length are the past, the T new rows are written behind them; the caller
        commits them. cache: of this session's own new_cache. What is returned (features and hidden as Rows, all else
        as arrays) is overwritten by the next run."""

    def joined(self, parts: Sequence[Any]) -> Any:
        """Rows of earlier runs, one part below the other, as a copy that later runs leave alone."""

    def close(self) -> None:
        """Free the engine; the session is of no use afterwards."""

    def __enter__(self) -> Session: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
