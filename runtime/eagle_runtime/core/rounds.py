"""Generations that want their next item at the same time get it in one round: their trees are verified in one forward
pass, where the session can do that, and their heads read what was verified in another.

Whoever's turn on the engines comes first leads: it waits a moment for generations that are about to ask, advances all
that wait up to their heads' reading and then to their verification, runs these passes, and advances them to their
items. A row has the bits that it has alone, so nobody's text depends on who was there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from eagle_runtime.base.errors import EagleError
from eagle_runtime.core.session import Session, SharedPass, run_passes
from eagle_runtime.core.ticket_queue import this_thread

PATIENCE_S = 0.003  # that a round waits for generations which asked again as quickly the last time
# Of a pass of several texts: more are no cheaper together, and the logits of 256 take 268 MB of a vocabulary of 262k.
MOST_ROWS = 256
TIMED = 64  # passes that are remembered until somebody looks
Advance = Callable[[], list[Any]]  # returns the next item in a list, which is empty at the end


class Member:
    """A generation that takes part. thread: that asked last; left: when it got its last item; gap: seconds until it
    asked for the next one, the last time."""

    def __init__(self) -> None:
        self.thread: object = None
        self.left = 0.0
        self.gap = 0.0


class Wish:
    """A member's wish for its next item, which Rounds.serve grants. wanted: the pass that it needs before; done:
    whether `items` or `error` is there."""

    def __init__(self, member: Member, advance: Advance) -> None:
        self.member = member
        self.items: list[Any] = []
        self.error: Exception | None = None
        self.wanted: SharedPass | None = None
        self.done = False
        self._advance = advance

    def advance(self) -> None:
        """Go on, up to a pass that is wanted or to the next item."""
        try:
            items = self._advance()
        except Exception as error:
            self.fail(error)
            return
        except BaseException:  # of the thread that leads, whose own generation this need not be
            self.fail(EagleError("the thread that decoded this answer beside its own was interrupted; ask again"))
            raise
        self.wanted = items[0] if items and isinstance(items[0], SharedPass) else None
        if self.wanted is None:
            self.items, self.done = items, True

    @property
    def rows(self) -> int:
        """Of the tree that its pass verifies; 0 for none."""
        return 0 if self.wanted is None or self.wanted.tree is None else self.wanted.tree.num_nodes

    def fail(self, error: Exception) -> None:
        self.error, self.done = error, True

    def taken(self) -> list[Any]:
        """Returns the item in a list, which is empty at the generation's end, once the wish was served. Raises what
        `advance` or the forward pass raised."""
        assert self.done
        if self.error is not None:
            raise self.error
        return self.items


class Timed(NamedTuple):
    """A pass that has verified trees of several texts. rows: of all; context: committed rows of a text, in the mean."""

    rows: int
    context: int
    seconds: float


class Rounds:
    """others: how many other generations take part in the round that runs now. timed: the passes of late, for whoever
    learns what they cost, and removes them."""

    def __init__(self, step: Callable[[Callable[[], None]], None], session: Session | None) -> None:
        """step: calls a function when it is the caller's turn on the engines (Engines.step). session: the target's."""
        self._step = step
        self._most = session.most_texts if session is not None and session.joins else 1
        self.joins = self._most > 1  # whether a round has one forward pass for all
        self._members: set[Member] = set()
        self._waiting: list[Wish] = []
        self._changed = threading.Condition()
        self.others = 0
        self.timed: deque[Timed] = deque(maxlen=TIMED)

    def enter(self) -> Member:
        """A generation begins."""
        member = Member()
        with self._changed:
            self._members.add(member)
        return member

    def leave(self, member: Member) -> None:
        """It has ended, or was left; a second call does nothing."""
        with self._changed:
            self._members.discard(member)
            self._changed.notify_all()

    def serve(self, wishes: Sequence[Wish]) -> None:
        """Grant wishes of this thread, together with those that other threads wait for. Raises what Engines.step does;
        what a generation or its forward pass raises is its wish's `error`."""
        thread, now = this_thread(), time.perf_counter()
        with self._changed:
            for asked in wishes:
                asked.member.thread, asked.member.gap = thread, now - asked.member.left
            self._waiting += wishes
            self._changed.notify_all()
        try:
            self._step(lambda: self._lead(wishes))
        finally:
            with self._changed:
                self._waiting = [asked for asked in self._waiting if asked not in wishes]
        left = time.perf_counter()
        for asked in wishes:
            asked.member.left = left

    def _lead(self, own: Sequence[Wish]) -> None:
        while wishes := [asked for asked in own if not asked.done]:
            if self.joins:
                self._wait_for_others()
            with self._changed:
                round_of = [*wishes, *(asked for asked in self._waiting if asked not in own)][: self._most]
                self._waiting = [asked for asked in self._waiting if asked not in round_of]
            self.others = len(round_of) - 1
            try:
                self._run(round_of)
            finally:
                self.others = 0
                with self._changed:  # after an interrupt: whoever is next leads them
                    self._waiting += [asked for asked in round_of if not asked.done]

    def _run(self, round_of: list[Wish]) -> None:
        for asked in round_of:
            if asked.wanted is None:
                asked.advance()
        # Those that an interrupt kept waiting may want to be verified already.
        _grant([asked for asked in round_of if asked.rows == 0], run_passes)
        for some in _by_rows(round_of):
            _grant(some, self._verify)

    def _verify(self, wanted: Sequence[SharedPass]) -> None:
        began = time.perf_counter()
        # the same caches in the same places: less to bind
        run_passes(sorted(wanted, key=lambda one: id(one.cache)))
        if len(wanted) > 1:
            rows = sum(one.tree.num_nodes for one in wanted if one.tree is not None)
            context = sum(one.cache.length for one in wanted) // len(wanted)
            self.timed.append(Timed(rows, context, time.perf_counter() - began))

    def _wait_for_others(self) -> None:
        """Wait until the members that are about to ask have asked."""
        me, began = this_thread(), time.perf_counter()
        with self._changed:
            while True:
                now = time.perf_counter()
                here = {asked.member for asked in self._waiting}
                left = began + PATIENCE_S - now
                if left <= 0 or not any(
                    one not in here and one.thread is not me and one.gap < PATIENCE_S and now - one.left < PATIENCE_S
                    for one in self._members
                ):
                    return
                self._changed.wait(left)


def _by_rows(round_of: Sequence[Wish]) -> Iterator[list[Wish]]:
    """Yields wishes whose trees one pass verifies: together of at most MOST_ROWS rows, or one tree."""
    some: list[Wish] = []
    rows = 0
    for asked in round_of:
        if some and rows + asked.rows > MOST_ROWS:
            yield some
            some, rows = [], 0
        some.append(asked)
        rows += asked.rows
    yield some


def _grant(round_of: Sequence[Wish], run: Callable[[Sequence[SharedPass]], None]) -> None:
    """Run the passes that are wanted, and advance those who wanted them."""
    both = [(asked, asked.wanted) for asked in round_of if not asked.done and asked.wanted is not None]
    if not both:
        return
    try:
        run([wanted for _, wanted in both])
    except Exception as error:
        for asked, _ in both:
            asked.fail(error)
    for asked, _ in both:
        if not asked.done:
            asked.advance()
