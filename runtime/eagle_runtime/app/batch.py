"""Answers to several requests at once, each with caches of its own: their next steps are one round (core.rounds), which
verifies all their trees in one forward pass where the engine can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from eagle_runtime.app.result import Piece
from eagle_runtime.app.turn import Turn
from eagle_runtime.core.rounds import Asked
from eagle_runtime.core.scheduler import Serve

Begin = Callable[[], Turn]


def pieces_of(begins: Sequence[Begin], width: int, serve: Serve) -> Iterator[tuple[int, Piece]]:
    """Yields (number, piece) of turns as their pieces come, `width` turns at once; the last piece of each has its
    result. begins: each returns a turn; called once it is that turn's time. serve: grants the wishes of all. Raises
    what a turn raises, and then ends the others, as it does where the iteration is left early."""
    numbers = iter(range(len(begins)))
    running: dict[int, Turn] = {}
    try:
        while True:
            wishes = []
            free, served = width - len(running), deque(running)
            while free > 0 or served:
                if served:
                    number = served.popleft()
                elif (following := next(numbers, None)) is not None:
                    number, free = following, free - 1
                    running[number] = begins[number]()
                else:
                    break
                for event in running[number].events:
                    if isinstance(event, Asked):
                        wishes.append(event)
                        break
                    yield number, event
                else:
                    running.pop(number).close()
                    free += 1
            if not running:
                return
            serve(wishes)
    finally:
        for turn in running.values():
            turn.close()
