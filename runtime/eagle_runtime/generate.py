"""The loop: grow -> verify -> accept -> keep -> learn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eagle_runtime.accept import Step, accept
from eagle_runtime.drafting.drafter import Drafter
from eagle_runtime.sampling import Sampler
from eagle_runtime.target import Target
from eagle_runtime.tree import Tree, root_only


@dataclass(frozen=True, slots=True)
class Cycle:
    """One turn of the loop: the tree, what was accepted of it, and the seconds of drafting, of the target's forward
    pass, and of the host's work after it."""

    tree: Tree
    step: Step
    draft_s: float
    verify_s: float
    host_s: float


def generate(
    target: Target,
    drafter: Drafter,
    sampler: Sampler,
    prompt: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Cycle]:
    """Decode without end: yields one Cycle after another until the cache is full. The first one is the prompt's: its
    tree is the prompt's last token alone, and it emits the first token. The caller decides when to stop. clock: returns
    seconds."""
    started = clock()
    logits, features = target.prefill(prompt)
    read = clock()
    tokens = [*prompt, sampler.next(logits)]
    first = Step(np.zeros(1, np.int64), np.array(tokens[-1:], np.int64))
    yield Cycle(root_only(prompt[-1]), first, 0.0, read - started, clock() - read)
    while target.cache.room > 0:
        started = clock()
        room = target.cache.room  # a tree never needs more rows than are left: it shrinks, in the end to its root
        tree = drafter.grow(tokens, features, room) if room > 1 else root_only(tokens[-1])
        grown = clock()
        logits, features = target.verify(tree)
        verified = clock()
        step = accept(tree, logits, sampler)
        target.cache.keep(step.path)
        drafter.learn(step)
        tokens.extend(step.tokens.tolist())
        features = features[step.path]
        yield Cycle(tree, step, grown - started, verified - grown, clock() - verified)
