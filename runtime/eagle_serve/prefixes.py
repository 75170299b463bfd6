"""Texts whose keys and values are kept, so that the next request of a chat reads only what is new."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle_runtime import EagleModel, Turn


class Prefixes:
    """States of a model."""

    def __init__(self, model: EagleModel, most: int) -> None:
        self._model = model

    @contextlib.contextmanager
    def turn(self, ids: Sequence[int], settings: Mapping[str, Any]) -> Iterator[Turn]:
        """Within the block the turn of a prompt."""
        with self._model.stream(ids, **settings) as turn:
            yield turn

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def gauges(self) -> Mapping[str, tuple[str, float]]:
        return {}

    def close(self) -> None:
        """Free all states."""
