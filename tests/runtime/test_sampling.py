"""The sampler against Hugging Face's own logits processors, and the rules that HF leaves open."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eagle_runtime.base.errors import EagleError, RequestError
from eagle_runtime.sampling.noise import exponential_noise
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.sampling.scores import Row, Scores

VOCAB = 40


def hf_scores(logits: npt.NDArray[np.float32], prompt: list[int], params: SamplingParams) -> Row:
    """What transformers' generate would sample from, its processors in its order."""
    steps = LogitsProcessorList()
    if params.logit_bias:
        steps.append(SequenceBiasLogitsProcessor({(t,): b for t, b in params.logit_bias.items()}))
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    scores: Row = steps(torch.tensor([prompt]), torch.tensor(logits, dtype=torch.float64)[None])[0].numpy()
    return scores


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.6, 1.0, 1.4]),
    top_k=st.sampled_from([0, 1, 3, 39, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    penalty=st.sampled_from([1.0, 1.2, 0.7]),
    bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=4),
)
def test_scores_equal_hugging_face(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float, bias: dict[int, float]
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, VOCAB).astype(np.float32)
    prompt = rng.integers(0, VOCAB, 12).tolist()
    params = SamplingParams(temperature, top_k, top_p, min_p, penalty, logit_bias=bias)
    scores = Sampler(params, prompt, VOCAB).scores
    ours = scores.filtered(scores.adjusted(logits))
    theirs = hf_scores(logits, prompt, params)
    assert np.array_equal(np.isfinite(ours), np.isfinite(theirs))
    np.testing.assert_allclose(ours[np.isfinite(ours)], theirs[np.isfinite(theirs)], rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_count_the_output_only() -> None:
    sampler = Sampler(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), [0, 0, 1], 4)
    logits = np.array([0, 0, 3, 2.5], np.float32)
    assert [sampler.next(logits) for _ in range(3)] == [2, 3, 2]
    np.testing.assert_allclose(sampler.scores.adjusted(logits), [0, 0, 3 - 0.5 - 0.5, 2.5 - 0.5 - 0.25])


def test_large_biases_leave_the_order_of_the_logits() -> None:
    logits = np.array([0, 2, 5, 30], np.float32)
    for bias in (1e9, 1e300):
        params = SamplingParams(logit_bias={1: bias, 2: bias})
        assert Sampler(params, [0], 4).next(logits) == 2
    assert Sampler(SamplingParams(logit_bias={3: -1e300, 2: -np.inf}), [0], 4).next(logits) == 1


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert Sampler(SamplingParams(), [0], 4).next(np.array([0, 2, 2, 1], np.float32)) == 1
    penalised = Sampler(SamplingParams(repetition_penalty=1.1), [3], 4)
    assert penalised.next(np.array([0, 2, 2, 1], np.float32)) == 1


def test_the_smallest_top_p_keeps_one_token() -> None:
    """Also where all are equally likely: the highest id, as other small values keep."""
    for top_p in (5e-324, 1e-17, 1e-3):
        assert Sampler(SamplingParams(1.0, top_p=top_p), [0], 8).next(np.zeros(8, np.float32)) == 7
        assert Sampler(SamplingParams(1.0, top_p=top_p), [0], 8).next(np.eye(8, dtype=np.float32)[2]) == 2


def test_draw_depends_on_seed_and_position_only() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=5)
    first = Sampler(params, [1, 2, 3], VOCAB)
    run = [first.next(logits) for _ in range(8)]
    later = Sampler(params, [1, 2, 3, *run[:4]], VOCAB)
    assert [later.next(logits) for _ in range(4)] == run[4:]
    other = Sampler(SamplingParams(temperature=1.0, seed=6), [1, 2, 3], VOCAB)
    assert [other.next(logits) for _ in range(8)] != run


def test_the_noise_is_exponential_and_depends_on_the_position() -> None:
    for numbers in (
        np.concatenate([exponential_noise(seed, position, 4) for seed in range(40) for position in range(25)]),
        np.array([exponential_noise(seed, position, 7)[6] for seed in range(40) for position in range(100)]),
    ):
        shares = np.sort(1 - np.exp(-numbers))
        # Kolmogorov-Smirnov: 1.95 / sqrt(n) is the 0.1 % point
        assert np.abs(shares - np.arange(len(shares)) / len(shares)).max() < 1.95 / math.sqrt(len(shares))
    longer = exponential_noise(3, 7, 50)
    assert np.array_equal(longer[:20], exponential_noise(3, 7, 20))
    assert not np.isin(longer, np.concatenate([exponential_noise(3, 8, 50), exponential_noise(4, 7, 50)])).any()


def test_rounding_hardly_ever_changes_a_draw() -> None:
    """Logits of a large vocabulary with the noise of another order of summation draw the same tokens."""
    rng = np.random.default_rng(1)
    params, parted = SamplingParams(temperature=1.0, seed=11), 0
    one, other = (Sampler(params, [0], 20000) for _ in range(2))
    for _ in range(1000):
        logits = rng.normal(scale=2.0, size=20000).astype(np.float32)
        noise = rng.normal(scale=1e-5, size=20000).astype(np.float32)
        parted += one.next(logits) != other.next(logits + noise)
    assert parted == 0  # on a cumulative distribution about 7


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_logit_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        Sampler(SamplingParams(logit_bias={4: 1.0}), [0], 4)


def test_nothing_left_to_draw_is_an_error() -> None:
    everything = dict.fromkeys(range(4), -math.inf)
    with pytest.raises(RequestError, match="no token is left"):
        Sampler(SamplingParams(temperature=1.0, logit_bias=everything), [0], 4).next(np.zeros(4, np.float32))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error(temperature: float) -> None:
    logits = np.array([0, math.nan, 1, 2], np.float32)
    with pytest.raises(EagleError, match="not finite"):
        Sampler(SamplingParams(temperature=temperature), [0], 4).next(logits)


@pytest.mark.parametrize("temperature", [1e-30, 0.05, 0.7, 1.0, 30.0, 1e30])
def test_the_token_whose_clock_rings_first_is_drawn(temperature: float) -> None:
    rng, vocab = np.random.default_rng(4), 3000
    sampler = Sampler(SamplingParams(temperature=temperature, seed=9), [1, 2], vocab)
    for position in range(2, 202):
        logits = rng.normal(0, rng.choice([0.1, 3, 20]), vocab).astype(np.float32)
        logits[rng.random(vocab) < rng.choice([0, 0.5, 0.999])] = -np.inf
        logits[rng.integers(vocab)] = 0
        scores = logits.astype(np.float64) / temperature
        rates = np.exp(scores - scores.max())
        assert sampler.next(logits) == int(np.argmax(rates / exponential_noise(9, position, vocab)))


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-5},
    {"min_p": 0.1},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.95, "min_p": 0.05},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": -0.1, "top_p": 0.9},
    {"logit_bias": {7: 4.0, 8: -math.inf, 9: -0.5}, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05},
]


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 0.2, 1.0, 30.0, 1e5, 1e30])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_draw_from_few_scores_is_that_from_all(
    filters: dict[str, Any], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, vocab = np.random.default_rng(5), 2000
    few, every = (Sampler(SamplingParams(temperature=temperature, seed=3, **filters), [0, 5], vocab) for _ in range(2))
    for _ in range(100):
        logits = (rng.normal(0, 3, vocab) * rng.choice([1e-38, 0.1, 1, 1e20])).astype(np.float32).round(rng.integers(3))
        logits[rng.random(vocab) < rng.choice([0, 0.5, 0.999])] = -np.inf
        logits[rng.integers(10, vocab)] = rng.choice([0, 3])
        token = few.next(logits)
        with monkeypatch.context() as patch:
            patch.setattr("eagle_runtime.sampling.sampler.drawn", lambda *_: None)
            assert every.next(logits) == token
    for one in (few, every):
        if temperature < 1:
            with pytest.raises(RequestError, match="no token is left"):
                Sampler(replace(one.params, temperature=1e-310), [0], vocab).next(np.full(vocab, 9, np.float32))


def test_most_draws_need_the_scores_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, vocab, whole = np.random.default_rng(6), 20_000, []
    filtered = Scores.filtered

    def noted(scores: Scores, adjusted: npt.NDArray[np.float32]) -> Row:
        whole.append(scores.position)
        return filtered(scores, adjusted)

    monkeypatch.setattr(Scores, "filtered", noted)
    for filters in FILTERS:
        sampler = Sampler(SamplingParams(temperature=0.8, seed=3, **filters), [0], vocab)
        for _ in range(50):
            sampler.next(rng.normal(0, 3, vocab).astype(np.float32))
    assert len(whole) < 0.1 * 50 * len(FILTERS), "of all draws"
