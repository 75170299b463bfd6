"""Where conversations keep their rows: on the CPU in caches of their own, within a budget; elsewhere in the model's.

An engine of a GPU is tied to the addresses of one pair of caches, so all conversations there share this pair. When one
conversation goes on after another, it reads again what the two texts do not have in common.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eagle_runtime.base.errors import MemoryLimitError
from eagle_runtime.core.decoding_state import DecodingState, Snapshot, common_prefix
from eagle_runtime.core.engines import Engines
from eagle_runtime.core.scheduler import Scheduler

COPIED = 16  # tokens in common for which rows of another text are copied; fewer are read again
_clock = itertools.count()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that a model takes. weights: of the files that are mapped or read; kv_reserved: allocated for keys and
    values, of which kv_used hold a text; kv_budget: what conversations may take. conversations: that are open, of which
    `resident` hold rows; dropped: how often one lost its rows to the budget. On devices the reserved bytes are the
    engine's own, and not counted."""

    weights: int
    kv_reserved: int
    kv_used: int
    kv_budget: int
    conversations: int
    resident: int
    dropped: int


class Slot:
    """The rows of one conversation. note: why there are none any more; busy: whether a turn is running in it; expected:
    tokens of the prompt of a turn that runs or will, which the slot holds once they are read; turn: the number of that
    turn."""

    def __init__(self, slots: Slots, state: DecodingState, scheduler: Scheduler, shared: bool) -> None:
        self.state = state
        self.scheduler = scheduler
        self.note: str | None = None
        self.busy = False
        self.expected = 0
        self.turn = 0
        self.used = next(_clock)
        self._slots = slots
        self._shared = shared
        self._source: weakref.ref[Slot] | None = None
        self._copied: int | None = None  # tokens of it that are taken, None for all
        self._awaited = 0  # the number of its turn then
        if not shared:
            state.release()
            for cache in state.caches:
                cache.watch_growth(lambda nbytes: slots.make_room(self, nbytes))

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for this conversation alone."""
        return 0 if self._shared else sum(cache.nbytes for cache in self.state.caches)

    def rows(self, ids: Sequence[int]) -> int:
        """Tokens of a text whose rows the target holds."""
        cache = self.state.target.cache
        return cache.reach(min(common_prefix(self.state.tokens, ids), cache.length))

    def copy_from(self, source: Slot, most: int | None = None) -> None:
        """Take the rows of another conversation as they will be at the first step. most: of its first tokens alone,
        which the turn waits for where the other one's reads them; fewer than COPIED are read again instead."""
        if most is None or most >= COPIED:
            self._source, self._copied, self._awaited = weakref.ref(source), most, source.turn

    def expect(self, tokens: int) -> None:
        """A turn is going to run, whose prompt has so many tokens."""
        self.expected = tokens
        self.turn += 1

    @property
    def source(self) -> Slot | None:
        """The conversation whose rows the first step is going to copy."""
        return None if self._source is None else self._source()

    @property
    def waits(self) -> bool:
        """Whether the rows that the first step is going to copy are still to be read, by a turn that was there before
        this one: two turns never wait for each other, though the source may begin another that copies from here."""
        source, most = self.source, self._copied
        if self._shared or source is None or most is None or source.turn != self._awaited or source.expected < most:
            return False
        return not source.busy or len(source.state.tokens) < most

    def begin(self) -> None:
        """Called in the first step of a turn."""
        self.busy = True
        self.used = next(_clock)
        self._slots.make_room(self, 0)
        source, self._source = self.source, None
        if source is not None and not self._shared and source.state.tokens:
            snapshot = source.state.snapshot(self._copied)
            self._slots.make_room(self, len(snapshot.tokens) * self.state.token_bytes)
            self.state.restore(snapshot)

    def end(self) -> None:
        """Called when a turn has ended."""
        self.busy = False
        self.expected = 0
        if self._copied is not None:  # what this turn's prompt had in common with another one
            self._source = None

    def snapshot(self) -> Snapshot | None:
        """Returns a copy of the rows; None where they are shared or there are none. Raises ClosedError."""
        if self._shared or not self.state.tokens:
            return None
        return self._slots.engines.step(self.state.snapshot)

    def restore(self, snapshot: Snapshot, context: int) -> str | None:
        """Take the rows of a file; returns why they could not be taken, None if they were. Raises ClosedError."""
        if self._shared:
            return "this engine's caches are shared, so rows are read again"
        if len(snapshot.tokens) >= self._slots.most_rows(context):
            return "the rows of the file are more than the context or kv_budget"

        def take() -> str | None:
            self._slots.make_room(self, len(snapshot.tokens) * self.state.token_bytes)
            try:
                self.state.restore(snapshot)
            except ValueError:
                return "the rows of the file do not fit the engine's caches"
            return None

        self.used = next(_clock)
        return self._slots.engines.step(take)

    def drop(self, note: str) -> None:
        """Free the rows. note: why."""
        if not self._shared:
            self._slots.engines.step(self.state.release)
        self._source, self.note = None, note

    def close(self) -> None:
        """Free the rows for good; does nothing where the engines are closed."""
        if not self._slots.engines.closed:
            self.drop("closed")
        if not self._shared:
            for cache in self.state.caches:
                cache.watch_growth(None)  # which refers to this slot: both would wait for the collector
        self._slots.remove(self)


@dataclass
class Slots:
    """The slots of a model. engines: of the model; new_state: makes a state with empty caches of its own, and a
    scheduler for it; None where all share `shared`. budget: bytes for keys and values of all slots."""

    engines: Engines
    new_state: Callable[[], tuple[DecodingState, Scheduler]] | None
    shared: tuple[DecodingState, Scheduler]
    budget: int

    def __post_init__(self) -> None:
        self._members: weakref.WeakSet[Slot] = weakref.WeakSet()
        self._lock = threading.Lock()  # of the set: one thread may open a conversation while another one counts bytes
        self.dropped = 0

    def new(self) -> Slot:
        """Returns a slot without rows."""
        state, scheduler = self.shared if self.new_state is None else self.new_state()
        slot = Slot(self, state, scheduler, shared=self.new_state is None)
        with self._lock:
            self._members.add(slot)
        return slot

    def remove(self, slot: Slot) -> None:
        """Forget a slot whose conversation is closed."""
        with self._lock:
            self._members.discard(slot)

    @property
    def members(self) -> list[Slot]:
        """The slots of open conversations."""
        with self._lock:
            return list(self._members)

    @property
    def nbytes(self) -> int:
        """Bytes that all slots have allocated."""
        return sum(slot.nbytes for slot in self.members)

    def most_rows(self, context: int) -> int:
        """Returns how many rows of one conversation fit the budget, `context` at most."""
        if self.new_state is None:
            return context
        return min(context, self.budget // max(1, self.shared[0].token_bytes))

    def check(self, tokens: int, context: int) -> None:
        """Raises MemoryLimitError for a text of so many tokens that does not fit the budget by itself."""
        if tokens >= self.most_rows(context):
            needed = (tokens + 1) * self.shared[0].token_bytes
            raise MemoryLimitError(
                f"the text of {tokens} tokens takes {needed / 1e6:.1f} MB of keys and values, but kv_budget is "
                f"{self.budget / 1e6:.1f} MB; raise it, or shorten the text"
            )

    def make_room(self, slot: Slot, nbytes: int) -> None:
        """Before `slot` grows by `nbytes`, in a step: drop the rows of idle slots, least recently used first, until the
        budget holds what is left. A slot that is alone may exceed it by its last growth."""
        others = sorted(
            (o for o in self.members if o is not slot and not o.busy and o.state.tokens), key=lambda o: o.used
        )
        for other in others:
            if self.nbytes + nbytes <= self.budget:
                return
            other.state.release()
            other.note = "dropped, since kv_budget is full"
            self.dropped += 1
