"""What a tree costs on this processor: grown level by level by the host, as on the backend cpu, and in one call of the
graph that engines for GPUs are made of.

    python -m studies one_call BUNDLE [--threads 1] [--states 200]

BUNDLE is in fp32. Both heads read the same random features and take turns; the trees are compared, and the time is the
median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.vocabulary import known_tokens
from eagle_export.tensorrt.compose import table_of
from eagle_export.tensorrt.draft_graph import draft_graph
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Int, hiding
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec, read_manifest
from eagle_runtime.commands.command import Parser
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.session import Drafted, Session, Weights
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.one_call import OneCallHead
from eagle_runtime.drafting.shapes import DynamicTree
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.session import OrtSession

CAPACITY, PROMPT = 700, 200  # rows of a text, and those that it begins with
WARM_UP = 20  # states that are not timed
SHAPE = DynamicTree()


def add_options(parser: Parser) -> None:
    """What is timed."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a pair in fp32")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of a forward pass (default 1)")
    parser.add_argument("--states", type=int, default=200, metavar="N", help="trees to grow (default 200)")


def report(args: argparse.Namespace) -> str:
    """Returns the medians, and how many trees differ."""
    manifest = read_manifest(args.bundle)
    if manifest.head is None or manifest.head.graph.inputs["tree_mask"].dtype != "float32":
        raise RequestError(f"{args.bundle} has no head in fp32; export a pair with -p fp32")
    graph, vocab = manifest.head.graph, manifest.target.vocab_size
    depth, top_k = SHAPE.depth, SHAPE.top_k
    levels = Head(OrtSession(args.bundle / graph.file, graph, args.threads, None), CAPACITY, depth * top_k, vocab)
    one = OneCallHead(OrtOneCall(args.bundle, graph, depth, top_k, threads=args.threads), CAPACITY, vocab)
    heads: list[Head] = [levels, one]
    random, text = np.random.default_rng(0), [1]
    seconds: list[list[float]] = [[], []]
    different = 0
    for state in range(WARM_UP + args.states):
        rows = PROMPT if len(text) == 1 else int(random.choice([1, 3, 5]))
        text = [*text, *random.integers(0, vocab, rows).tolist()]
        features = random.normal(0, 1, (rows, manifest.head.hidden_size)).astype(np.float32)
        trees = {}
        for which in (state % 2, 1 - state % 2):
            head = heads[which]
            head.note(features)
            started = time.perf_counter()
            trees[which] = SHAPE.grow(head, text[-1], head.catch_up(text), SHAPE.num_nodes)
            if state >= WARM_UP and rows < PROMPT:
                seconds[which].append(time.perf_counter() - started)
        different += not np.array_equal(trees[0].tokens, trees[1].tokens)
        if len(text) > CAPACITY - PROMPT:
            text = [1]
            for head in heads:
                head.truncate(0)
    by_level, called = (median(each) * 1e3 for each in seconds)
    return (
        f"{args.bundle}, {args.threads} threads: {by_level:.3f} ms level by level, {called:.3f} ms in one call "
        f"({called / by_level:.2f}); {different} of {WARM_UP + args.states} trees differ\n"
    )


class OrtOneCall(Session):
    """The graph, run by ONNX Runtime on the CPU, with and without padding as an engine on a GPU gets it.

    most_rows, depth, top_k, known: as in OneCallSession. past: the number of rows that pasts are padded to; 0 for
    none. rows: the same of the rows that are read."""

    def __init__(
        self, folder: Path, graph: GraphSpec, depth: int, top_k: int, past: int = 0, rows: int = 0, threads: int = 1
    ) -> None:
        source = folder / graph.file
        model = ir.load(source)
        table = table_of(model.graph).const_value
        assert table is not None
        self._table = table.numpy().copy()
        self.inputs: Mapping[str, TensorSpec] = graph.inputs
        self.outputs: Mapping[str, TensorSpec] = graph.outputs
        self.depth, self.top_k, self.most_rows, self.known = depth, top_k, 64, known_tokens(model.graph)
        self._known = len(self._table) if self.known is None else len(self.known)
        self._graph, self._past, self._rows = graph, past, rows
        self._dtype = np.dtype(graph.inputs["tree_mask"].dtype)
        content = ir.to_proto(draft_graph(source, depth, top_k)).SerializeToString()
        self._session = open_graph(source, threads=threads, model=content)

    def new_cache(self, capacity: int) -> KVCache:
        _, _, heads, width = self._graph.inputs[self._graph.past[0]].shape
        return KVCache(len(self._graph.past) // 2, capacity, int(heads), int(width), self._dtype)

    def draft(self, tokens: Int, features: Any, weights: Weights, cache: KVCache) -> Drafted:
        count, length = len(tokens), cache.length
        cache.make_room(count)
        rows, past = max(count, self._rows), max(length, self._past)
        read = np.concatenate([np.arange(count), np.full(rows - count, count - 1)])
        mask = np.where(np.tri(rows, dtype=np.bool_), 0, hiding(self._dtype)).astype(self._dtype)
        stored = np.full((len(cache.rows), past, *cache.rows.shape[2:]), 7, self._dtype)
        stored[:, :length] = cache.rows[:, :length]
        feeds = {
            "embeds": self._table[tokens[read]][None],
            "features": np.asarray(features, self._dtype)[read][None],
            "position_ids": (length + read)[None],
            "tree_mask": mask[None, None],
            "past_mask": np.where(np.arange(past) < length, 0, hiding(self._dtype)).astype(self._dtype)[
                None, None, None
            ],
            "row_mask": np.where(np.arange(rows) < count, 0, hiding(self._dtype)).astype(self._dtype)[None, None, None],
            "last_row": np.array([count - 1]),
            "level_positions": length + count + np.arange(self.depth),
            "noise": np.zeros((self.depth + 1, self._known), np.float32) if weights.noise is None else weights.noise,
            "ranking": weights.numbers,
            **{name: stored[index][None] for index, name in enumerate(self._graph.past)},
        }
        out = dict(
            zip([value.name for value in self._session.get_outputs()], self._session.run(None, feeds), strict=True)
        )
        for index, name in enumerate(self._graph.present):
            cache.rows[index, length : length + count] = out[name][0, :count]
        pool, frontier, root = (out[name].astype(np.int64) for name in ("pool_tokens", "frontier", "root_tokens"))
        return Drafted(pool, out["pool_log_probs"], frontier, root, out["root_log_probs"])

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        raise AssertionError("a one-call head asks for whole trees")

    def joined(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts)

    def close(self) -> None: ...
