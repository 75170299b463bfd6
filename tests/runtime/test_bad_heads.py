"""A head that computes garbage costs drafts, and nothing else: no exception, no other token, one warning."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from eagle_runtime import SamplingParams
from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.base.tree import EAGLE1_CHOICES
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import Ranker
from eagle_runtime.core.session import Array
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.acceptance import AcceptanceStats, UsualGain
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.cost_model import Costs, Timings
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.rank_acceptance import RankCounts
from eagle_runtime.drafting.sequoia import SequoiaDrafter
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, StaticTree, chain
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.sampling.sampler import Sampler
from fakes import Blend, FakeHead, FakeTarget, Table, observed
from machine_fake import FixedCosts

VOCAB, TOP_K, CAPACITY, SCRATCH = 40, 12, 200, 80
PROMPT = [1, 2, 3, 1, 2, 3, 1, 2]
EVENTS = 25  # of a generation
Spoil = Callable[[np.random.Generator, dict[str, Array]], None]


def some(rng: np.random.Generator, array: Array) -> Any:
    """Places in an array, about a third of them."""
    return rng.random(array.shape) < 0.3


def fill(name: str, value: float) -> Spoil:
    """A value in places of an output."""

    def spoil(rng: np.random.Generator, out: dict[str, Array]) -> None:
        out[name][some(rng, out[name])] = value

    return spoil


def fill_all(name: str, value: float) -> Spoil:
    def spoil(rng: np.random.Generator, out: dict[str, Array]) -> None:
        out[name][...] = value

    return spoil


def wild_ids(rng: np.random.Generator, out: dict[str, Array]) -> None:
    ids = out["token_ids"]
    places = some(rng, ids)
    ids[places] = rng.choice([-1, -(2**62), VOCAB, 10**6, 2**62], int(places.sum()))


def shuffled(rng: np.random.Generator, out: dict[str, Array]) -> None:
    rng.shuffle(out["log_probs"], axis=1)


def far_below(rng: np.random.Generator, out: dict[str, Array]) -> None:
    out["log_probs"] = np.multiply(out["log_probs"], np.float32(1e30))


def everything(rng: np.random.Generator, out: dict[str, Array]) -> None:
    for spoil in SPOILS.values():
        if spoil is not everything and rng.random() < 0.5:
            spoil(rng, out)


SPOILS: dict[str, Spoil] = {
    "NaN": fill("log_probs", np.nan),
    "NaN alone": fill_all("log_probs", np.nan),
    "infinity": fill("log_probs", np.inf),
    "infinity alone": fill_all("log_probs", np.inf),
    "minus infinity": fill("log_probs", -np.inf),
    "minus infinity alone": fill_all("log_probs", -np.inf),
    "above 0": fill("log_probs", 5.0),
    "far below 0": far_below,
    "out of order": shuffled,
    "ids that do not exist": wild_ids,
    "no id that exists": fill_all("token_ids", VOCAB),
    "one id for all": fill_all("token_ids", 3),
    "hidden states of NaN": fill("hidden", np.nan),
    "hidden states of infinity": fill_all("hidden", np.inf),
    "everything": everything,
}
WARNED = {name for name in SPOILS if name.startswith(("NaN", "infinity", "ids", "no id", "everything"))}


class BadHead(FakeHead):
    """Spoils what it returns, in some passes."""

    def __init__(self, spoil: Spoil, seed: int) -> None:
        super().__init__(Blend(2.0, LANGUAGE, Table(VOCAB, 7, 1.0)), TOP_K)
        self._spoil = spoil
        self._rng = np.random.default_rng(seed)

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        out = super().run(feeds, cache)
        for name, array in out.items():
            out[name] = np.array(array)
        if self._rng.random() < 0.7:
            self._spoil(self._rng, out)
        return out


LANGUAGE = Table(VOCAB, 1, 3.0)
FLAT = Timings((1, 64), (1,), ((1.0, 1.5),))
TREES: dict[str, Callable[[Head, Ranker], Drafter]] = {
    "dynamic": lambda head, ranker: EagleDrafter(head, DynamicTree(20, 3, 5), ranker),
    "dynamic, not ranked": lambda head, ranker: EagleDrafter(head, DynamicTree(20, 3, 5)),
    "static": lambda head, ranker: EagleDrafter(head, StaticTree(EAGLE1_CHOICES), ranker),
    "chain": lambda head, ranker: EagleDrafter(head, chain(4), ranker),
    "cost-aware": lambda head, ranker: CostAwareDrafter(
        head, FixedCosts(Costs(FLAT, FLAT)), AcceptanceStats(), top_k=6, ranker=ranker
    ),
    "cost-aware, lookup": lambda head, ranker: CostAwareDrafter(
        head, FixedCosts(Costs(FLAT, FLAT)), AcceptanceStats(), top_k=6, lookup=True, ranker=ranker
    ),
    "sequoia": lambda head, ranker: SequoiaDrafter(
        head, FixedCosts(Costs(FLAT, FLAT)), RankCounts(), UsualGain(), top_k=6, ranker=ranker
    ),
}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.05},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.05},
    {"temperature": 3.0, "repetition_penalty": 1.3, "logit_bias": {5: 2.0}},
]


def tokens_of(drafter: Drafter, state: DecodingState, sampler: Sampler) -> list[int]:
    tokens: list[int] = []
    for event in itertools.islice(generate(state, drafter, sampler, PROMPT), EVENTS):
        tokens += event.step.tokens.tolist()
    return tokens


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", SPOILS)
def test_output_is_vanillas(name: str, tree: str) -> None:
    for number, sampling in enumerate(SAMPLINGS):
        params = SamplingParams(seed=number, **sampling)
        target = Target(FakeTarget(LANGUAGE), CAPACITY)
        sampler = Sampler(params, PROMPT, VOCAB)
        head = Head(BadHead(SPOILS[name], number), CAPACITY, SCRATCH, VOCAB)
        ranker = GumbelRanker(sampler) if params.temperature else GreedyRanker()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            drafted = tokens_of(TREES[tree](head, ranker), DecodingState(target, head), sampler)
        alone = DecodingState(Target(FakeTarget(LANGUAGE), CAPACITY), None)
        plain = tokens_of(NoDraft(), alone, Sampler(params, PROMPT, VOCAB))
        count = min(len(drafted), len(plain))
        assert drafted[:count] == plain[:count] and count >= EVENTS
        assert [warning.category for warning in said] == [EagleWarning] * (name in WARNED), [str(w) for w in said]


def test_a_sound_head_is_left_as_it_is() -> None:
    """Bit for bit, and without a word; a log-probability that rounded above 0 becomes 0."""
    head = Head(FakeHead(Table(VOCAB, 7, 1.0), TOP_K), CAPACITY, SCRATCH, VOCAB)
    sound = FakeHead(Table(VOCAB, 7, 1.0), TOP_K)
    cache = sound.new_cache(CAPACITY)
    features = np.array([[1, 0], [2, 1]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        proposal = observed(head, [2, 3], features)
    feeds = {
        "input_ids": np.array([2, 3]),
        "features": features,
        "position_ids": np.array([0, 1]),
        "tree_mask": np.where(np.tri(2), 0, np.finfo(np.float32).min).astype(np.float32),
        "logit_rows": np.array([1]),
    }
    out = sound.run(feeds, cache)
    assert np.array_equal(proposal.tokens, out["token_ids"]) and np.array_equal(proposal.log_probs, out["log_probs"])
