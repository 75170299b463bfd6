"""Generations that want their next item at the same time get it in one round: their trees are verified in one forward
pass, where the session can do that.

Whoever's turn on the engines comes first leads: it waits a moment for generations that are about to ask, advances all
that wait up to their verification, runs the pass, and advances them to their items. A row has the bits that it has
alone, so nobody's text depends on who was there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from eagle_runtime.core.session import JoiningSession
from eagle_runtime.core.target import Verification, verify_together
from eagle_runtime.core.ticket_queue import this_thread

PATIENCE_S = 0.003  # that a round waits for generations which asked again as quickly the last time
Advance = Callable[[], list[Any]]  # returns the next item in a list, which is empty at the end


class Member:
    """A generation that takes part. thread: that asked last; left: when it got its last item; gap: seconds until it
    asked for the next one, the last time."""

    def __init__(self) -> None:
        self.thread: object = None
        self.left = 0.0
        self.gap = 0.0


class Asked:
    """A member's wish for its next item, which Rounds.serve grants. wanted: the verification that it needs before;
    done: whether `items` or `error` is there."""

    def __init__(self, member: Member, advance: Advance) -> None:
        self.member = member
        self.items: list[Any] = []
        self.error: Exception | None = None
        self.wanted: Verification | None = None
        self.done = False
        self._advance = advance

    def advance(self) -> None:
        """Go on, up to a verification that is wanted or to the next item."""
        try:
            items = self._advance()
        except Exception as error:
            self.error, self.done = error, True
            return
        self.wanted = items[0] if items and isinstance(items[0], Verification) else None
        if self.wanted is None:
            self.items, self.done = items, True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.done = error, True

    def taken(self) -> list[Any]:
        """Returns the item in a list, which is empty at the generation's end, once the wish was served. Raises what
        `advance` or the forward pass raised."""
        assert self.done
        if self.error is not None:
            raise self.error
        return self.items


class Rounds:
    """others: how many other generations take part in the round that runs now."""

    def __init__(self, step: Callable[[Callable[[], None]], None], session: object) -> None:
        """step: calls a function when it is the caller's turn on the engines (Engines.step). session: the target's."""
        self._step = step
        self._most = session.most_texts if isinstance(session, JoiningSession) and session.joins else 1
        self._members: set[Member] = set()
        self._waiting: list[Asked] = []
        self._changed = threading.Condition()
        self.others = 0

    @property
    def joins(self) -> bool:
        """Whether a round has one forward pass for all."""
        return self._most > 1

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

    def serve(self, wishes: Sequence[Asked]) -> None:
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

    def _lead(self, own: Sequence[Asked]) -> None:
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

    def _run(self, round_of: list[Asked]) -> None:
        for asked in round_of:
            if asked.wanted is None:
                asked.advance()
        wanting = [asked for asked in round_of if asked.wanted is not None and not asked.done]
        wanted = [asked.wanted for asked in wanting if asked.wanted is not None]
        wanted.sort(key=lambda one: id(one.target))  # the same caches in the same places: less to bind
        try:
            if len(wanted) == 1:
                wanted[0].run()
            elif wanted:
                verify_together(wanted)
        except Exception as error:
            for asked in wanting:
                asked.fail(error)
        for asked in wanting:
            if not asked.done:
                asked.advance()

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
