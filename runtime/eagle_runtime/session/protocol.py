"""What an engine must do. Decoding uses nothing else of a backend.

A new backend derives a class from Session for one graph, which a GraphSpec describes, and gets a branch in
`backends.open_sessions`. The smallest example is tests/numpy_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import TensorSpec
from eagle_runtime.cache import Cache

Array = npt.NDArray[np.generic]
S = TypeVar("S", bound="Session")


class Session(Protocol):
    """One loaded graph: the target or the draft head. The batch is always 1 and arrays have no axis for it:
    input_ids [T], tree_mask [T, L], logits [R, V].

    T rows are fed. The mask covers the last L rows, the T new ones included; every row sees all rows before those. Of R
    rows (logit_rows) the logits or proposals are wanted. inputs, outputs: the graph's tensors in its own shapes,
    without the key/value rows, which only the cache and the session handle."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    def new_cache(self, capacity: int) -> Cache:
        """Returns an empty cache of `capacity` rows, in the graph's type and layout."""

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        """Run one forward pass. Returns every output: features and hidden as Rows, the others as NumPy arrays, all
        valid until the next run.

        feeds: a value for every input. cache: made by this session. Its rows below cache.length are the past; the pass
        writes the T new rows after them, and the caller commits those it keeps. Raises BackendError."""

    def joined(self, parts: Sequence[Any]) -> Any:
        """Returns Rows of earlier runs, concatenated. They are a copy, which later runs leave alone."""

    def close(self) -> None:
        """Free the engine. The session cannot be used afterwards."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@runtime_checkable
class WarmedSession(Protocol):
    """A session whose first forward passes would take long: what they prepare is prepared when a bundle is opened."""

    def warm(self, cache: Any, report: Callable[[int, int], None]) -> None:
        """Compile kernels and capture graphs for the forward passes to come. cache: an empty one of this session.
        report: called with the steps done and all of them, after each. Raises BackendError."""


@runtime_checkable
class SessionOfAMachine(Protocol):
    """A session whose forward passes take times that depend on more than the bundle and the library.

    facts: what they depend on: the GPU's name and compute capability, the engine's SHA-256, the kind of passes."""

    facts: tuple[str, ...]


class Rows(Protocol):
    """An array [n, width] of features or hidden states that may stay in device memory: decoding only selects rows and
    feeds them back. An engine on the host returns NumPy arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | npt.NDArray[np.int64], /) -> Rows:
        """Returns the rows of a slice, which may share memory with these, or a copy of the rows of an index array."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Returns a copy on the host."""
