"""The large model of a pair: reads the prompt, verifies trees, scores texts.

Shapes: T rows of one forward pass, N tree nodes, V vocabulary, Hd width of features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import (
    MAX_DEPTH,
    MAX_NODES,
    Bool,
    Float,
    Int,
    Tree,
    additive_mask,
    ancestor_mask,
    node_depths,
)
from eagle_runtime.core.session import Array, Rows, Session, SharedPass
from eagle_runtime.sampling.sampler import Sampler

PREFILL_CHUNK = 512  # rows of one prefill pass: bounds the T x T mask and the activations
NATIVE_CHUNK = 256  # with the native operators: 512 rows save 2 % of the time and take 27 MB more (SmolLM2-135M, int4)
# The same where attention is exact, which it is for no more new rows (eagle_export.recipes.attention), and while other
# texts decode, which wait for it.
SHORT_CHUNK = 64
PROMPT_ROWS = 64  # of a prefill pass whose logits a drafter may learn from; chosen: bounds the logits, as SCORE_CHUNK
SCORE_CHUNK = 64  # rows of one scoring pass: bounds the logits, of which every row is wanted

Floating = npt.NDArray[np.floating]
Features = Floating | Rows


def row_numbers(count: int) -> Int:
    """0..count-1, 64 bits wide on every platform (NumPy's default integer is not)."""
    return np.arange(count, dtype=np.int64)


def causal(count: int) -> Bool:
    """[count, count]: each row sees itself and the rows before it."""
    return np.tri(count, dtype=np.bool_)


class Target:
    """The large model. Its cache holds the rows of every token but the last one, which is the root of the next tree."""

    def __init__(self, session: Session, capacity: int, chunk: int | None = None) -> None:
        """chunk: rows of one prefill pass; None for PREFILL_CHUNK."""
        self._session = session
        self.chunk = chunk or PREFILL_CHUNK
        self.cache = session.new_cache(capacity)
        self.vocab_size = int(session.outputs["logits"].shape[2])
        self.keeps_logits = "watched_ids" in session.inputs  # whether they stay on a GPU unless they are asked for
        self._mask_dtype = session.inputs["tree_mask"].dtype

    def prefill(self, prompt: Sequence[int]) -> tuple[Float, Features]:
        """Forget all rows and read a text; returns the last row's logits [V] and all features [len, Hd]."""
        self.cache.truncate(0)
        features = []
        for start in range(0, len(prompt), self.chunk):
            logits, read = self.read(prompt[start : start + self.chunk])
            features.append(read)
        return logits[-1], self._session.joined(features)

    def read(self, tokens: Sequence[int], last: int = 1) -> tuple[Float, Features]:
        """Read the next tokens of a text, at most `chunk`, and commit their rows; returns the logits [R, V] of the
        `last` rows, or of fewer if there are no more, and all features [len, Hd]."""
        count = len(tokens)
        rows = row_numbers(count)
        out = self._run(np.array(tokens, np.int64), self.cache.length + rows, causal(count), rows[-last:])
        self.cache.advance(count)
        return np.array(out["logits"]), self._session.joined([out["features"]])

    def verify(self, tree: Tree, sampler: Sampler | None = None) -> tuple[Any, Features]:
        """One forward pass over all nodes; returns logits [N, V], or a GPU's DeviceLogits, and features [N, Hd], valid
        until the next pass.

        The tree's rows follow the committed ones in the cache until `keep` commits the accepted ones. sampler: will
        draw from the logits; where they stay on a GPU, it says which of them it may need. Raises RequestError for a
        tree of more than MAX_NODES nodes or MAX_DEPTH levels, in which rows would not be exact."""
        out = self._session.run(self._feeds_of(tree, sampler), self.cache)
        return out["logits"], out["features"]

    def verification(self, tree: Tree, sampler: Sampler, take: Callable[[Mapping[str, Any]], None]) -> SharedPass:
        """Returns the pass that `verify` runs, for the caller to run. take: as in SharedPass."""
        return SharedPass(self._session, self.cache, partial(self._feeds_of, tree, sampler), take, tree)

    def _feeds_of(self, tree: Tree, sampler: Sampler | None) -> dict[str, Array]:
        depths = node_depths(tree.parents)
        if tree.num_nodes > MAX_NODES or depths.max() > MAX_DEPTH:
            raise RequestError(
                f"the tree has {tree.num_nodes} nodes and is {depths.max()} levels deep, but a forward pass verifies "
                f"at most {MAX_NODES} and {MAX_DEPTH}; draft a smaller one"
            )
        positions = self.cache.length + depths
        rows = row_numbers(tree.num_nodes)
        asked: dict[str, Array] = {}
        if sampler is not None and not sampler.scores.takes_highest and self.keeps_logits:
            count = int(self._session.inputs["watched_ids"].shape[1])
            asked = {
                "watched_ids": sampler.on_device.watched(1 + positions, count),
                "inverse_temperature": np.full(1, sampler.on_device.inverse_temperature, np.float32),
            }
        return self._feeds(tree.tokens, positions, ancestor_mask(tree.parents), rows) | asked

    def keep(self, path: Int, features: Features) -> Features:
        """Commit the rows of an accepted path of the last verification; returns their features. path: see
        Cache.keep."""
        kept: Features = self._session.keep(self.cache, path, features)
        return kept

    def look_at(self, tokens: Int, depths: Int, visible: Bool, wanted: Int) -> Any:
        """Read rows that follow the committed ones, and keep none of them; returns the logits [R, V] of the rows
        `wanted` [R], valid until the next pass. depths [T]: positions after the committed rows; visible [T, T]: what
        rows see of each other."""
        return self._run(tokens, self.cache.length + depths, visible, wanted)["logits"]

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
        """Forget everything, read a text; yields the logits of the rows tokens[first], tokens[first + 1], ... in
        pieces [R, V] of at most SCORE_CHUNK rows."""
        self.cache.truncate(0)
        for start in range(0, len(tokens), SCORE_CHUNK):
            chunk = tokens[start : start + SCORE_CHUNK]
            wanted = len(chunk) - max(0, first - start)
            logits, _ = self.read(chunk, max(1, wanted))
            if wanted > 0:
                yield logits

    def _run(self, tokens: Int, positions: Int, visible: Bool, logit_rows: Int) -> dict[str, Any]:
        return self._session.run(self._feeds(tokens, positions, visible, logit_rows), self.cache)

    def _feeds(self, tokens: Int, positions: Int, visible: Bool, logit_rows: Int) -> dict[str, Array]:
        return {
            "input_ids": tokens,
            "position_ids": positions,
            "tree_mask": additive_mask(visible, self._mask_dtype),
            "logit_rows": logit_rows,
        }
