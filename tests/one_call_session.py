"""A one-call draft graph (eagle_export.tensorrt.draft_graph), run by ONNX Runtime on the CPU, with and without padding
as an engine on a GPU gets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from eagle_export.tensorrt.compose import table_of
from eagle_export.tensorrt.draft_graph import draft_graph, known_tokens
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec
from eagle_runtime.cache import KVCache
from eagle_runtime.session.protocol import Drafted, Session, Weights
from eagle_runtime.tree import Int, hiding


class OrtOneCall(Session):
    """most_rows, depth, top_k, known: as in OneCallSession. past: the number of rows that pasts are padded to; 0 for
    none. rows: the same of the rows that are read."""

    def __init__(self, folder: Path, graph: GraphSpec, depth: int, top_k: int, past: int = 0, rows: int = 0) -> None:
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
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(source.parent))
        content = ir.to_proto(draft_graph(source, depth, top_k)).SerializeToString()
        self._session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])

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
