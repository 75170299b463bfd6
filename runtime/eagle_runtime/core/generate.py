"""The loop: grow -> verify -> accept -> keep -> learn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eagle_runtime.base.tree import MAX_NODES, Float, Tree, root_only
from eagle_runtime.core.accept import Step, accept
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.session import SharedPass, run_passes
from eagle_runtime.core.target import SHORT_CHUNK
from eagle_runtime.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Cycle:
    """One turn of the loop: the tree, what was accepted of it, and the seconds of drafting, of the target's forward
    pass, and of the host's work after it."""

    tree: Tree
    step: Step
    draft_s: float
    verify_s: float
    host_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """A part of the prompt was read: `count` of its `total` tokens are known to the target."""

    count: int
    total: int


def asking(
    state: DecodingState,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
    others: Callable[[], int] = lambda: 0,
    on_rows: Callable[[Float], None] | None = None,
) -> Iterator[Reading | Cycle | SharedPass]:
    """Decode without end: yields one Cycle after another until the cache is full. The first one is the prompt's: its
    tree is the prompt's last token alone, and it emits the first token. Before it comes one Reading for every chunk of
    the prompt but the last; before every other Cycle comes the SharedPass that verifies its tree, and before that one
    of the head that this tree may need, which the caller runs before it goes on. The caller decides when to stop.

    state: of the prompt's beginning, whatever else; after each Cycle it holds the text up to there. clock: returns
    seconds. others: returns how many other texts wait for this one's next event (DecodingState.read).
    on_rows: called with the logits [R, V] after the prompt's first R tokens, the next R, and so on; the whole prompt is
    read then, also what the state knows of it."""
    target, tokens = state.target, state.tokens
    seconds = 0.0
    started = clock()
    learned = 1 if target.keeps_logits else drafter.prompt_rows
    rows = learned
    if on_rows is not None:
        state.forget()
        rows, others = SHORT_CHUNK, lambda: 1  # short parts: of each, all logits are in the memory
    for chunk in state.read(prompt, rows, others):
        if on_rows is not None:
            on_rows(chunk.logits)
        drafter.learn_prompt(tokens, chunk.logits[-learned:])
        read = clock()
        seconds += read - started
        if chunk.count < len(prompt):
            yield Reading(chunk.count, len(prompt))
            started = clock()
    tokens.append(sampler.next(chunk.logits[-1]))
    first = Step(np.zeros(1, np.int64), np.array(tokens[-1:], np.int64), log_probs=sampler.taken_log_probs())
    yield Cycle(root_only(prompt[-1]), first, 0.0, seconds, clock() - read)
    while target.cache.room > 0:
        started = clock()
        # A tree never needs more rows than are left: it shrinks, in the end to its root.
        room = min(target.cache.room, MAX_NODES)
        if room > 1 and (reading := drafter.reading(tokens)) is not None:
            yield reading
        tree = drafter.grow(tokens, room) if room > 1 else root_only(tokens[-1])
        grown = clock()
        outputs: list[Mapping[str, Any]] = []
        yield target.verification(tree, sampler, outputs.append)
        verified = clock()
        step = accept(tree, outputs[-1]["logits"], sampler)
        features = target.keep(step.path, outputs[-1]["features"])
        state.emit(step.tokens.tolist(), features)
        drafter.learn(step)
        yield Cycle(tree, replace(step, logits=None), grown - started, verified - grown, clock() - verified)


def generate(
    state: DecodingState,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Cycle]:
    """The cycles of `asking` alone, with every pass run for itself."""
    for event in asking(state, drafter, sampler, prompt, clock):
        if isinstance(event, SharedPass):
            run_passes([event])
        elif isinstance(event, Cycle):
            yield event
