"""What worker and server keep of an answer that was asked for, from before it begins until it has ended."""

from __future__ import annotations

from eagle_runtime.app.turn import Turn


class AwaitedTurn:
    """A turn that waits to begin, or runs; any thread may end it. cancelled: whether that was asked."""

    def __init__(self) -> None:
        self.cancelled = False
        self._turn: Turn | None = None

    def cancel(self) -> None:
        """End it after the running step; a second call does nothing."""
        self.cancelled = True
        if (turn := self._turn) is not None:
            turn.cancel()

    def begin(self, turn: Turn) -> Turn:
        """It has begun: `cancel` reaches it from now on."""
        self._turn = turn
        if self.cancelled:
            turn.cancel()
        return turn
