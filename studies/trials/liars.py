"""Adversaries of verification: drafts that are replaced by wrong ones where an engine, a table or a text gives them.

They stand at the boundary of the real parts: around the session of a head or of a draft model, in place of a block
head's transitions or of a model's habits, and around a drafter that learns from logits. Targets are never touched.

Shapes: R rows, k proposed tokens per row, V vocabulary, N nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from eagle_runtime.base.tree import Float, Int, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.session import Session
from eagle_runtime.drafting.cost_learning import unknown
from eagle_runtime.drafting.cost_model import Costs, Pass, Timings
from eagle_runtime.drafting.cost_storage import LearnedCosts
from eagle_runtime.drafting.habits import SUCCESSORS, Context, Habits, Row
from eagle_runtime.drafting.transitions import Transitions

Lie = Literal["none", "random", "constant", "not numbers", "outside", "wrong", "shuffled", "mixed"]
LIES: tuple[Lie, ...] = get_args(Lie)
NOT_NUMBERS = (np.nan, np.inf, -np.inf)
SWITCH = 0.3  # chance that the next pass of a mixture lies in another way
FREE = Costs(Timings((1, 64), (1,), ((1.0, 1.1),)), Timings((1, 64), (1,), ((1e-3, 1e-3),)))


class Liar:
    """Replaces proposals, in one way per answer, or in ways that change from pass to pass.

    - none: leaves them as they are. shuffled: gives each row's log-probabilities to other tokens of it
    - random: any tokens, and any log-probabilities. constant: one token everywhere
    - not numbers: NaN and infinities, in all places or in some. outside: ids that do not exist
    - wrong: tokens that the target holds least likely, as sure as can be; none of them comes in the answer
    - mixed: any of these"""

    def __init__(self, vocab: int, random: np.random.Generator) -> None:
        self._vocab = vocab
        self._random = random
        self._lie: Lie = "none"
        self._mixed = False
        self._wrong: Int = np.zeros(1, np.int64)
        self._constant = 0

    def begin(self, lie: Lie, wrong: Int) -> None:
        """Lie in this way until the next call. wrong: tokens that do not come, the least likely first."""
        self._mixed, self._lie = lie == "mixed", "none" if lie == "mixed" else lie
        self._wrong = wrong
        self._constant = int(self._random.integers(self._vocab))

    def proposals(self, ids: Int, log_probs: Float) -> tuple[Int, Float]:
        """Returns new arrays in place of ids [R, k] and log-probabilities [R, k]."""
        ids, log_probs = np.array(ids, np.int64), np.array(log_probs, np.float32)
        lie, random = self._of_a_pass(), self._random
        if lie == "random":
            ids = random.integers(0, self._vocab, ids.shape)
            log_probs = random.normal(-5, 30, log_probs.shape).astype(np.float32)
        elif lie == "constant":
            ids[...] = self._constant
        elif lie == "not numbers":
            log_probs[self._places(log_probs)] = random.choice(NOT_NUMBERS)
        elif lie == "outside":
            there = self._places(ids)
            ids[there] = random.choice([-1, -(2**62), self._vocab, 10**6, 2**62], int(there.sum()))
        elif lie == "wrong":
            ids[...] = np.resize(self._wrong, ids.shape[-1])
            log_probs[...] = -1e-6 * np.arange(ids.shape[-1])
        elif lie == "shuffled":
            log_probs = random.permuted(log_probs, axis=-1)
        return ids, log_probs

    def rows(self, scores: Float) -> Float:
        """Returns a new array in place of logits or log-probabilities of all tokens [R, V]."""
        scores = np.array(scores, np.float32)
        lie, random = self._of_a_pass(), self._random
        if lie == "random":
            scores = random.normal(-5, 30, scores.shape).astype(np.float32)
        elif lie == "constant":
            scores[...] = 0
            scores[..., self._constant % scores.shape[-1]] = 50
        elif lie in ("not numbers", "outside"):
            scores[self._places(scores)] = random.choice(NOT_NUMBERS)
        elif lie == "wrong":
            scores -= 50
            scores[..., self._wrong[self._wrong < scores.shape[-1]]] = 50
        elif lie == "shuffled":
            scores = random.permuted(scores, axis=-1)
        return scores

    def states(self, hidden: Any) -> Any:
        """Returns hidden states in place of those that a head gives itself."""
        lie = self._of_a_pass()
        if lie == "random":
            return np.asarray(self._random.normal(0, 10, hidden.shape), hidden.dtype)
        if lie == "not numbers":
            return np.full_like(hidden, self._random.choice(NOT_NUMBERS))
        return hidden

    def text(self, tokens: Sequence[int]) -> list[int]:
        """Returns a text that begins like this one now and then: tokens of it, some of them replaced."""
        ids = np.array(tokens, np.int64)[None]
        lies, _ = self.proposals(ids, np.zeros(ids.shape, np.float32))
        replaced = np.where(self._random.random(ids.shape) < 0.3, lies % self._vocab, ids)
        return [int(token) for token in replaced[0]]

    def _of_a_pass(self) -> Lie:
        if self._mixed and self._random.random() < SWITCH:
            self._lie = LIES[int(self._random.integers(len(LIES) - 1))]
        return self._lie

    def _places(self, array: Any) -> Any:
        """All places of an array, or about a third of them."""
        share = self._random.choice([0.3, 1.0])
        return self._random.random(array.shape) < share


class LyingSession(Session):
    """The session of a head, or of a draft model, whose outputs are replaced."""

    def __init__(self, session: Session, liar: Liar) -> None:
        self.inputs, self.outputs = session.inputs, session.outputs
        self._session = session
        self._liar = liar

    def __getattr__(self, name: str) -> Any:
        """What a session of its kind has beyond the protocol."""
        return getattr(self._session, name)

    def new_cache(self, capacity: int) -> Any:
        """As in Session."""
        return self._session.new_cache(capacity)

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        """As in Session."""
        out = dict(self._session.run(feeds, cache))
        for name in list(out):
            if name.startswith("token_ids"):
                chances = name.replace("token_ids", "log_probs")
                out[name], out[chances] = self._liar.proposals(out[name], out[chances])
            elif name in ("scores", "logits"):
                out[name] = self._liar.rows(out[name])
            elif name == "hidden":
                out[name] = self._liar.states(out[name])
        return out

    def keep(self, cache: Any, path: Int, features: Any) -> Any:
        """As in Session."""
        return self._session.keep(cache, path, features)

    def joined(self, parts: Sequence[Any]) -> Any:
        """As in Session."""
        return self._session.joined(parts)

    def close(self) -> None:
        """As in Session."""
        self._session.close()


@dataclasses.dataclass(frozen=True)
class LyingTransitions(Transitions):
    """Transitions whose candidates are replaced."""

    liar: Liar

    def given(self, tokens: Int, scores: Float, likeliest: Int) -> tuple[Int, Float]:
        """As in Transitions."""
        return self.liar.proposals(*Transitions.given(self, tokens, scores, likeliest))


class LyingHabits(Habits):
    """Habits that are wrong, whatever was learned; of contexts that are not known, too."""

    def __init__(self, vocab: int, liar: Liar) -> None:
        super().__init__(vocab)
        self._liar = liar

    def after(self, context: Context) -> Row:
        """As in Habits."""
        known = super().after(context) or {token: 0.5 ** (1 + token) for token in range(SUCCESSORS)}
        best = sorted(known, key=lambda token: -known[token])
        ids, log_probs = np.array(best, np.int64), np.log(np.array([known[token] for token in best], np.float32))
        lies = self._liar.proposals(ids[None], log_probs[None])
        with np.errstate(over="ignore"):
            return dict(zip(lies[0][0].tolist(), np.exp(lies[1][0]).tolist(), strict=True))


class FreeDrafts(LearnedCosts):
    """Costs by which drafts are nearly free, whatever passes take, so that trees do not depend on the machine."""

    def __init__(self) -> None:
        super().__init__(unknown(FREE))

    @property
    def asks_for_plain(self) -> bool:
        """As in LearnedCosts."""
        return False

    def learn(self, passes: Sequence[Pass]) -> None:
        """Passes say nothing here."""


class Misled(Drafter):
    """A drafter that learns from wrong logits."""

    def __init__(self, drafter: Drafter, liar: Liar) -> None:
        self._drafter = drafter
        self._liar = liar

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        """As in Drafter."""
        return self._drafter.grow(tokens, max_nodes)

    def learn(self, step: Step) -> None:
        """As in Drafter."""
        if isinstance(step.logits, np.ndarray):
            step = dataclasses.replace(step, logits=self._liar.rows(step.logits))
        self._drafter.learn(step)


class AnyTree(Drafter):
    """Draws trees of any form: chains, stars, siblings that are equal, among their tokens those that the text goes on
    with."""

    def __init__(self, liar: Liar, answer: Sequence[int], start: int, random: np.random.Generator) -> None:
        """answer: tokens from position `start` of the text on."""
        self._liar = liar
        self._answer, self._start = answer, start
        self._random = random

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        """As in Drafter."""
        count = int(self._random.integers(1, min(24, max_nodes)))
        straight = self._random.random()
        above = np.arange(count)
        parents = np.where(self._random.random(count) < straight, above, self._random.integers(0, above + 1))
        depths = np.zeros(count + 1, np.int64)
        for node, parent in enumerate(parents, 1):
            depths[node] = depths[parent] + 1
        places = len(tokens) - self._start + depths[1:] - 1
        right = np.array(self._answer)[np.minimum(places, len(self._answer) - 1)]
        drafted = np.array(self._liar.text(right.tolist()), np.int64)
        ids = np.concatenate([[tokens[-1]], drafted])
        return Tree(ids, np.concatenate([[-1], parents]), np.zeros(count + 1, np.float32))

    def learn(self, step: Step) -> None:
        """Nothing depends on it."""
