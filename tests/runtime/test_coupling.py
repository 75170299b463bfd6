"""Proposals ranked with the random numbers that will decide: certain where the head is right, and with chances that are
frequencies where it errs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from eagle_runtime import SamplingParams
from eagle_runtime.base.tree import Float
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import WINDOW
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.coupling import (
    HEAD_NOISE,
    GreedyRanker,
    GumbelRanker,
    at_temperature,
    log_softmax,
)
from eagle_runtime.drafting.head import NEVER, Head
from eagle_runtime.drafting.shapes import EagleDrafter, chain
from eagle_runtime.sampling.sampler import Sampler
from fakes import FakeHead, FakeTarget

VOCAB = 50
FILTERS: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.7}]


def candidates(logits: npt.NDArray[np.float32], count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """A head's proposal: logits [V] -> tokens [1, count] and log-probabilities [1, count], best first."""
    tokens = np.argsort(-logits, kind="stable")[None, :count]
    log_probs = logits - np.log(np.exp(logits).sum())
    return tokens, log_probs[tokens].astype(np.float32)


def logits_of(seed: int, spread: float = 2.0) -> npt.NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal(VOCAB)).astype(np.float32)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_a_head_that_is_right_knows_every_token(temperature: float, filters: dict[str, Any]) -> None:
    for seed in range(40):
        params = SamplingParams(temperature=temperature, seed=seed, **filters)
        logits, sampler = logits_of(seed), Sampler(params, [0] * seed, VOCAB)
        drafted, chances = GumbelRanker(sampler, 1.0).rank(*candidates(logits, VOCAB), seed)
        assert sorted(drafted[0]) == list(range(VOCAB)) and np.all(np.diff(chances[0]) <= 0)
        assert np.exp(chances).sum() == pytest.approx(1, abs=1e-5)
        assert drafted[0, 0] == sampler.next(logits)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_chances_are_frequencies(noise: float) -> None:
    """The head proposes 40 tokens of 50 and errs by Gumbel noise, or says what the target says of each context on the
    mean of contexts that look alike to it. What it holds likely is drawn as often as it says, with the weight for such
    a head."""
    rng = np.random.default_rng(1)
    said, came, listed, in_list = [], [], 0.0, 0
    for seed in range(4000):
        sampler, proposal = Sampler(SamplingParams(temperature=1.0, seed=seed), [0], VOCAB), logits_of(seed)
        drafted, chances = GumbelRanker(sampler, noise).rank(*candidates(proposal, 40), 1)
        one_hot = np.full(VOCAB, -100.0)
        one_hot[rng.choice(VOCAB, p=np.exp(log_softmax(proposal[None].astype(np.float64))[0]))] = 0
        token = sampler.next((proposal + rng.gumbel(size=VOCAB) if noise else one_hot).astype(np.float32))
        said.append(np.exp(chances[0]))
        came.append(drafted[0] == token)
        listed, in_list = listed + float(said[-1].sum()), in_list + int(token in drafted)
    check_frequencies(said, came)
    assert listed == pytest.approx(in_list, rel=0.03)


def check_frequencies(said: list[npt.NDArray[np.float32]], came: list[npt.NDArray[np.bool_]]) -> None:
    """Of the candidates that are said to have some chance, about that share came."""
    confidence, outcome = np.concatenate(said), np.concatenate(came)
    for low, high in ((0.05, 0.15), (0.15, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 1.0)):
        inside = (confidence > low) & (confidence <= high)
        assert inside.sum() > 100 and confidence[inside].mean() == pytest.approx(outcome[inside].mean(), abs=0.07)


@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_chances_are_frequencies_at_low_temperatures(temperature: float) -> None:
    """The head's logits err by as much noise as heads are taken to. It proposes 8 tokens of 50."""
    rng = np.random.default_rng(2)
    said, came = [], []
    for seed in range(2000):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), [0], VOCAB)
        proposal = logits_of(seed)
        ranker = GumbelRanker(sampler, 1.0) if temperature else GreedyRanker()
        drafted, chances = ranker.rank(*candidates(proposal, 8), 1)
        token = sampler.next((proposal + HEAD_NOISE * rng.gumbel(size=VOCAB)).astype(np.float32))
        assert np.all(np.diff(chances[0]) <= 0) and np.exp(chances[0]).sum() <= 1 + 1e-6
        said.append(np.exp(chances[0]))
        came.append(drafted[0] == token)
    check_frequencies(said, came)


def test_more_candidates_never_make_the_best_proposal_worse() -> None:
    right = dict.fromkeys((1, 4, 16, VOCAB), 0)
    for seed in range(500):
        logits, sampler = logits_of(seed), Sampler(SamplingParams(temperature=1.0, seed=seed), [0], VOCAB)
        token = sampler.next(logits)
        for count in right:
            right[count] += GumbelRanker(sampler, 1.0).rank(*candidates(logits, count), 1)[0][0, 0] == token
    assert right[1] < right[4] < right[16] < right[VOCAB] == 500


def test_what_cannot_be_drawn_stays_finite_and_what_a_head_computes_wrong_stays_last() -> None:
    tokens, log_probs = candidates(logits_of(0), 8)
    one = GumbelRanker(Sampler(SamplingParams(temperature=1.0, top_k=1), [0], VOCAB))
    _, chances = one.rank(tokens, log_probs, 3)
    assert chances[0, 0] == 0 and np.all(chances[0, 1:] == NEVER)
    two = np.concatenate([log_probs, np.full_like(log_probs, np.nan)])
    every = GumbelRanker(Sampler(SamplingParams(temperature=1.0), [0], VOCAB))
    drafted, chances = every.rank(np.repeat(tokens, 2, 0), two, 3)
    assert np.isfinite(chances[0]).all() and sorted(drafted[1]) == sorted(tokens[0])
    drafted, chances = GreedyRanker().rank(np.repeat(tokens, 2, 0), two, 3)
    assert np.isfinite(chances[0]).all() and np.isnan(chances[1]).all() and np.array_equal(drafted[1], tokens[0])


@pytest.mark.parametrize("count", [1, 8, VOCAB])
def test_greedy_chances_are_probabilities_at_another_temperature(count: int) -> None:
    tokens, log_probs = candidates(logits_of(0), count)
    _, chances = GreedyRanker().rank(tokens, log_probs, 3)
    scores = np.concatenate(at_temperature(log_probs.astype(np.float64), HEAD_NOISE), 1)
    np.testing.assert_allclose(chances, log_softmax(scores)[:, :-1], rtol=1e-5)


@pytest.mark.parametrize("read", [3, WINDOW + 40])
def test_numbers_are_those_of_the_position_in_the_whole_text(read: int) -> None:
    """Also where the head began to read in the middle of the prompt: it says what the target says, so that it knows
    what will be drawn. Its chain of three is accepted whole in every cycle."""
    language = Always(VOCAB)
    prompt = [n % VOCAB for n in range(read)]
    sampler = Sampler(SamplingParams(temperature=1.0, seed=4), prompt, VOCAB)
    head = Head(FakeHead(language, top_k=VOCAB), 600, 8)
    drafter = EagleDrafter(head, chain(3), GumbelRanker(sampler, 1.0))
    state = DecodingState(Target(FakeTarget(language), 600), head)
    events = itertools.islice(generate(state, drafter, sampler, prompt), 30)
    assert [cycle.step.num_accepted for cycle in list(events)[1:]] == [3] * 29


class Always:
    """Says the same of every token, whatever was before."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def logits(self, history: Float) -> Float:
        return logits_of(1, spread=1.0)
