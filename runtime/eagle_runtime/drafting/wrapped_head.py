"""What heads around another head have in common: its cache and sizes, and what it is told of new rows."""

from __future__ import annotations

from eagle_runtime.core.head import DraftHead
from eagle_runtime.core.target import Features


class WrappedHead:
    """A head around `head`. Subclasses make the proposals: `catch_up` and `feed`, as in DraftHead."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.cache, self.top_k, self.scratch = head.cache, head.top_k, head.scratch
        self.free_levels, self.row_counts = head.free_levels, head.row_counts

    def note(self, features: Features) -> None:
        """As in DraftHead."""
        self._head.note(features)

    @property
    def unread(self) -> int:
        """As in DraftHead."""
        return self._head.unread
