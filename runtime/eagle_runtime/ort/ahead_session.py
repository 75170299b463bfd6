"""Medusa's and Hydra's heads on ONNX Runtime: a graph without keys and values, whose inputs and outputs are small
arrays on the host, whatever the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime.bundle.manifest import GraphSpec
from eagle_runtime.core.cache import NoRows
from eagle_runtime.core.session import Array, Session
from eagle_runtime.ort.library import engine_error
from eagle_runtime.ort.session import check_graph


class AheadSession(Session):
    """Such a graph (eagle_export.graphs.ahead_graph)."""

    def __init__(self, session: Any, path: Path, spec: GraphSpec) -> None:
        """session: an InferenceSession of the graph that `spec` describes; path: its file, for messages."""
        check_graph(session, path, spec)
        self.inputs, self.outputs = spec.inputs, spec.outputs
        self._session = session

    def new_cache(self, capacity: int) -> NoRows:
        return NoRows(capacity)

    def run(self, feeds: Mapping[str, Any], cache: NoRows) -> dict[str, Array]:
        arrays = {name: np.ascontiguousarray(feeds[name])[None] for name in self.inputs}
        try:
            values = self._session.run(list(self.outputs), arrays)
        except Exception as error:
            raise engine_error("run a forward pass", error) from None
        return {name: value[0] for name, value in zip(self.outputs, values, strict=True)}

    def close(self) -> None:
        del self._session
