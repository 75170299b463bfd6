"""Texts whose keys and values are kept, so that the next request of a chat reads only what is new.

A request goes on in the state with the longest common beginning, if that is at least half of what the state holds.
Otherwise it takes a copy of the beginning: a front end's requests for a title or for tags must not evict the chat. It
also copies from a state that another request is using, and waits until that has read what the two have in common.
Which state a request gets changes what is read again, not the answer.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime import Conversation, EagleModel, Turn

Ids = npt.NDArray[np.int64]


class _State:
    """A conversation without messages. ids: of its text; of the prompt while it is read, or was when it was left.
    used: a number that grows with each turn."""

    def __init__(self, chat: Conversation) -> None:
        self.chat = chat
        self.ids: Ids = np.zeros(0, np.int64)
        self.busy = False
        self.used = 0

    def take(self, prompt: Ids) -> _State:
        """A turn begins in it."""
        self.busy, self.ids = True, prompt
        return self


class Prefixes:
    """The states of a model. most: how many are kept at once; the model's budget of memory may empty some of them."""

    def __init__(self, model: EagleModel, most: int) -> None:
        self._model = model
        self._most = most
        self._lock = threading.Lock()
        self._states: list[_State] = []
        self._clock = itertools.count()

    @contextlib.contextmanager
    def turn(self, ids: Sequence[int], settings: Mapping[str, Any]) -> Iterator[Turn]:
        """Within the block the turn that answers a prompt. Raises what `Conversation.complete` raises."""
        state = self._take(np.asarray(ids, np.int64))
        try:
            with state.chat.complete(ids, **settings) as turn:
                yield turn
        finally:
            read = state.chat.token_ids
            whole = read if read[: len(ids)] == tuple(ids) else ids
            with self._lock:
                state.ids, state.used, state.busy = np.asarray(whole, np.int64), next(self._clock), False

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the states hold."""
        with self._lock:
            return sum(state.chat.kv_bytes for state in self._states)

    @property
    def gauges(self) -> Mapping[str, tuple[str, float]]:
        """Name -> (what it is, its value now), for the metrics."""
        memory = self._model.memory()
        return {
            "kv_bytes": ("Bytes of keys and values that are kept.", self.kv_bytes),
            "kv_states": ("Texts that are kept.", len(self._states)),
            "kv_budget_bytes": ("Bytes that they may take.", memory.kv_budget),
            "kv_dropped": ("Times that keys and values were dropped to keep the budget.", memory.dropped),
        }

    def close(self) -> None:
        """Free all states; no turn may be running."""
        with self._lock:
            states, self._states = self._states, []
        for state in states:
            state.chat.close()

    def _take(self, ids: Ids) -> _State:
        """Returns a state for a prompt, which is busy until it is given back."""
        with self._lock:
            known = [(common(state.ids, ids), state) for state in self._states]
            count, best = max(known, key=lambda one: (one[0], not one[1].busy, -len(one[1].ids)), default=(0, None))
            if best is not None and not best.busy and count and 2 * count >= len(best.ids):
                return best.take(ids)
            state = self._other([state for _, state in known if not state.busy and state is not best])
            if best is not None:
                state.chat.share_rows(best.chat, count)
            return state.take(ids)

    def _other(self, idle: Sequence[_State]) -> _State:
        """Returns a new state, or once there are enough the one of `idle` that was used longest ago: making and freeing
        conversations all the time would leave the process's memory in pieces."""
        if len(self._states) < self._most or not idle:
            state = _State(self._model.conversation())
            self._states.append(state)
            return state
        return min(idle, key=lambda one: one.used)


def common(first: Ids, second: Ids) -> int:
    """Returns how many tokens two texts have in common from their beginning on."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
