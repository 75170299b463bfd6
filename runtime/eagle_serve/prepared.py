"""A request made ready to decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_serve.request import Request


@dataclass(frozen=True, slots=True)
class Prepared:
    """ids: of the whole prompt. settings: for the runtime. Everything about it was checked, so that what can still fail
    is the engine. index: of this answer among those to the request; first: whether it is its prompt's first. echo: what
    the answer begins with."""

    request: Request
    ids: tuple[int, ...]
    settings: Mapping[str, Any]
    index: int = 0
    first: bool = True
    echo: str = ""
