"""Answers to several requests at once, each with caches of its own: their next steps are one round (core.rounds), which
verifies all their trees in one forward pass where the engine can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

from eagle_runtime.app.result import Piece
from eagle_runtime.app.slots import Slot
from eagle_runtime.app.turn import Turn
from eagle_runtime.app.turns import Turns
from eagle_runtime.core.decoding_state import common_prefix
from eagle_runtime.core.rounds import Wish
from eagle_runtime.core.scheduler import Serve

Begin = Callable[[], Turn]


class Beginnings:
    """The prompts of a batch's texts. What two of them have in common at their beginning is read once: the later text
    waits until the earlier one has read it, and copies its rows (Slot.copy_from). A text that has ended keeps its rows
    as long as another waits for them, or none has ended after it."""

    def __init__(self) -> None:
        self._prompts: dict[Slot, Sequence[int]] = {}
        self._ended: list[Slot] = []

    def add(self, slot: Slot, prompt: Sequence[int]) -> None:
        """A text is going to be answered in an empty slot."""
        known = [(common_prefix(prompt, other), source) for source, other in self._prompts.items()]
        count, source = max(known, key=lambda pair: pair[0], default=(0, slot))
        slot.copy_from(source, count)
        self._prompts[slot] = prompt

    def end(self, slot: Slot) -> None:
        """Its text has ended."""
        self._ended.append(slot)
        self.close({slot, *(one.source for one in self._prompts)})

    def close(self, but_for: Container[Slot | None] = ()) -> None:
        """Close the slots of texts that have ended."""
        for slot in [slot for slot in self._ended if slot not in but_for]:
            self._ended.remove(slot)
            del self._prompts[slot]
            slot.close()


def batch(turns: Turns, asked: Sequence[tuple[list[int], dict[str, Any]]], width: int) -> Iterator[tuple[int, Piece]]:
    """As EagleModel.batch. asked: ids of each prompt, and its settings, which were checked."""
    beginnings = Beginnings()

    def begin(prompt: list[int], settings: dict[str, Any]) -> Turn:
        slot = turns.slots.new()
        beginnings.add(slot, prompt)
        return turns.in_slot(slot, prompt, lambda *_: beginnings.end(slot), settings)

    begins = [partial(begin, *one) for one in asked]
    return pieces_of(begins, width, turns.engines.rounds.serve, beginnings.close)


def pieces_of(
    begins: Sequence[Begin], width: int, serve: Serve, ended: Callable[[], None]
) -> Iterator[tuple[int, Piece]]:
    """Yields (number, piece) of turns as their pieces come, `width` turns at once; the last piece of each has its
    result. begins: each returns a turn; called once it is that turn's time. serve: grants the wishes of all. ended:
    called after the last. Raises what a turn raises, and then ends the others, as it does where the iteration is left
    early."""
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
                    if isinstance(event, Wish):
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
        ended()
