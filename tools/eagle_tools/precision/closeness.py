"""How close predictions are to the reference's over texts. Shapes: R rows, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from eagle_calib.scoring import Double, divergence, log_softmax
from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.tree import Float

PIECE = 64  # rows that are compared at once: the logits of a whole text may take gigabytes
LONGEST_OWN = 256  # tokens of one text that the reference writes


class Scorer(Protocol):
    """A loaded target."""

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
        """Yields the logits after tokens[first], tokens[first + 1], ... in arrays [R, V]."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A text whose tokens after tokens[first] are predicted, each from all before it."""

    tokens: tuple[int, ...]
    first: int = 0


@dataclass(slots=True)
class Closeness:
    """Figures over scored rows. kls: nats, of each row. same: number of rows that rank the same token first as the
    reference. nll: negative log-likelihood of the text, in nats."""

    kls: list[float] = field(default_factory=list)
    same: int = 0
    nll: float = 0.0

    def add(self, reference: Double, compared: Double, following: Sequence[int]) -> None:
        """Add rows. reference, compared [R, V]: log-probabilities. following [R]: the token after each row."""
        self.kls += divergence(reference, compared).tolist()
        self.same += int((reference.argmax(-1) == compared.argmax(-1)).sum())
        self.nll -= float(compared[np.arange(len(compared)), list(following)].sum())

    @property
    def rows(self) -> int:
        return len(self.kls)

    @property
    def kl(self) -> float:
        """The mean."""
        return math.fsum(self.kls) / self.rows

    @property
    def agreement(self) -> float:
        return self.same / self.rows

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.rows)

    def percentile(self, share: float) -> float:
        """Returns the KL that `share` percent of the rows do not exceed."""
        return float(np.percentile(self.kls, share))


def compare_texts(
    models: Sequence[Scorer], passages: Sequence[Passage], on_passage: Callable[[], None] = lambda: None
) -> list[Closeness]:
    """Returns the closeness of each model to the first one over all passages. on_passage: called after each."""
    sums = [Closeness() for _ in models]
    for passage in passages:
        read = passage.first
        streams = (pieces(model.score(passage.tokens[:-1], passage.first)) for model in models)
        for rows in zip(*streams, strict=True):
            following = passage.tokens[read + 1 : read + 1 + len(rows[0])]
            reference = log_softmax(rows[0])
            for closeness, compared in zip(sums, rows, strict=True):
                closeness.add(reference, log_softmax(compared), following)
            read += len(following)
        on_passage()
    return sums


def pieces(arrays: Iterator[Float]) -> Iterator[Float]:
    """Yields the rows of the arrays in pieces of PIECE rows, the last one shorter."""
    waiting: list[Float] = []
    for array in arrays:
        waiting.append(array)
        if sum(map(len, waiting)) >= PIECE:
            rows = np.concatenate(waiting)
            whole = len(rows) // PIECE * PIECE
            yield from np.split(rows[:whole], whole // PIECE)
            waiting = [rows[whole:]]
    if waiting and len(rows := np.concatenate(waiting)):
        yield rows


def own_text(
    model: EagleModel,
    prompts: Sequence[Sequence[int]],
    positions: int,
    seed: int,
    temperature: float = 1.0,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[Passage]:
    """Returns texts that the model writes after the prompts in turn, `positions` new tokens in all, the same for the
    same seed. At temperature 0 a prompt has one text, and all texts the same length; some may end early. on_tokens:
    called with the number of new tokens after each text."""
    passages: list[Passage] = []
    left, longest = positions, LONGEST_OWN if temperature else -(-positions // len(prompts))
    while left and (temperature or len(passages) < len(prompts)):
        number = len(passages)
        prompt = list(prompts[number % len(prompts)])
        limit = max(1, min(left, longest, model.context - len(prompt)))
        sampling = SamplingParams(temperature=temperature, seed=seed + number)
        made = model.generate(prompt, method="vanilla", sampling=sampling, max_new_tokens=limit)
        passages.append(Passage((*prompt, *made.token_ids), len(prompt) - 1))
        left -= len(made.token_ids)
        on_tokens(len(made.token_ids))
    return passages
