"""What an engine must do. Decoding uses nothing else of a backend.

A new backend derives a class from Session for one graph, which a GraphSpec describes, and gets a branch in
`backends.open_sessions`. The smallest example is tests/numpy_engine.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Tree
from eagle_runtime.bundle.manifest import TensorSpec
from eagle_runtime.core.cache import Cache
from eagle_runtime.core.counters import Counters

Array = npt.NDArray[np.generic]
S = TypeVar("S", bound="Session")


class Session(Protocol):
    """One loaded graph: the target or the draft head. The batch is always 1 and arrays have no axis for it:
    input_ids [T], tree_mask [T, L], logits [R, V].

    T rows are fed. The mask covers the last L rows, the T new ones included; every row sees all rows before those. Of R
    rows (logit_rows) the logits or proposals are wanted. inputs, outputs: the graph's tensors in its own shapes,
    without the key/value rows, which only the cache and the session handle. joins: whether it computes rows of several
    texts in one forward pass, of `most_texts` at once, each with the bits that it has alone. facts: what the times of
    forward passes depend on besides bundle and library: the GPU's name and compute capability, the engine's SHA-256."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    joins: bool = False
    most_texts: int = 1
    facts: tuple[str, ...] = ()

    def new_cache(self, capacity: int) -> Cache:
        """Returns an empty cache of `capacity` rows, in the graph's type and layout."""

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        """Run one forward pass. Returns every output: features and hidden as Rows, the others as NumPy arrays, all
        valid until the next run.

        feeds: a value for every input. cache: made by this session. Its rows below cache.length are the past; the pass
        writes the T new rows after them, and the caller commits those it keeps. Raises BackendError."""

    def run_together(self, passes: Sequence[tuple[Mapping[str, Any], Any]]) -> list[dict[str, Any]]:
        """As `run` for the feeds and cache of each text, in one forward pass, where the session joins texts. Raises
        BackendError."""
        raise AssertionError("the caller looks at `joins`")

    def keep(self, cache: Any, path: npt.NDArray[np.int64], features: Any) -> Any:
        """Commit the rows of an accepted path of the last run; returns their features as Rows, which later runs may
        overwrite. path, features: as in Cache.keep, and as `run` returned them."""
        cache.keep(path)
        return features[path]

    def joined(self, parts: Sequence[Any]) -> Any:
        """Returns Rows of earlier runs, concatenated. They are a copy, which later runs leave alone."""
        return np.concatenate(parts)

    def warm(self, cache: Any, report: Callable[[int, int], None]) -> None:
        """Compile kernels and capture graphs for the forward passes to come, when a bundle is opened. cache: an empty
        one of this session. report: called with the steps done and all of them, after each. Raises BackendError."""
        return

    def counters(self) -> Counters | None:
        """Returns what was counted of the GPU's work since the sessions were opened, which may share it; None where it
        is not counted."""
        return None

    def close(self) -> None:
        """Free the engine. The session cannot be used afterwards."""

    def __enter__(self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class SharedPass:
    """A forward pass that the session may join with those of other texts. feeds: makes its inputs.
    take: is called with the outputs, which stay valid until the session's next pass. tree: that it verifies; None for
    rows that a head reads."""

    session: Session
    cache: Cache
    feeds: Callable[[], Mapping[str, Any]]
    take: Callable[[Mapping[str, Any]], None]
    tree: Tree | None = None


def run_passes(passes: Sequence[SharedPass]) -> None:
    """Run passes of several texts as one of their common session, or one alone. A row's bits are those of a pass of its
    own. Raises BackendError, and what `feeds` raises."""
    session, given = passes[0].session, [(one.feeds(), one.cache) for one in passes]
    outputs = session.run_together(given) if len(given) > 1 else [session.run(*given[0])]
    for one, out in zip(passes, outputs, strict=True):
        one.take(out)


@dataclass(frozen=True, slots=True)
class Weights:
    """How an engine that grows levels ranks candidates. numbers [5]: see eagle_export.tensorrt.draft_graph; noise
    [levels, known tokens] float32: what each token's score gets in addition, None for nothing."""

    numbers: npt.NDArray[np.float32]
    noise: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """What one call returns. tokens, log_probs [N]: by level, the children of a node next to each other, best first;
    frontier [D - 1, k]: which of the second level, the third, ... grew children; root_tokens, root_log_probs [C]."""

    tokens: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float32]
    frontier: npt.NDArray[np.int64]
    root_tokens: npt.NDArray[np.int64]
    root_log_probs: npt.NDArray[np.float32]


@runtime_checkable
class OneCallSession(Session, Protocol):
    """A head's engine that grows a tree of `depth` levels below the root's children, with top_k children per node.

    most_rows: rows that one call reads. known: the target's ids of the tokens that the head knows; None for all."""

    depth: int
    top_k: int
    most_rows: int
    known: npt.NDArray[np.int64] | None

    def draft(self, tokens: npt.NDArray[np.int64], features: Any, weights: Weights, cache: Any) -> Drafted:
        """Read rows, which follow the committed ones, and grow a tree after the last. The caller commits the rows. The
        result is valid until the next call. Raises BackendError."""


class Rows(Protocol):
    """An array [n, width] of features or hidden states that may stay in device memory: decoding only selects rows and
    feeds them back. An engine on the host returns NumPy arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | npt.NDArray[np.int64], /) -> Rows:
        """Returns the rows of a slice, which may share memory with these, or a copy of the rows of an index array."""

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Returns a copy on the host."""
