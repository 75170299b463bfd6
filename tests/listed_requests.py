"""Prompts for samplers of answers."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_train.answering import Request


class Listed:
    """Requests of a list."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.left = list(requests)

    def take(self) -> Request | None:
        return self.left.pop(0) if self.left else None
