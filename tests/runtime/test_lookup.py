"""Lookup: the longest earlier n-gram match, and its continuation as a lossless draft."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_runtime import EagleModel
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.drafting.matches import LONGEST, PLACES, SHORTEST, NgramIndex
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from insides import bundle_in

texts = st.lists(st.integers(0, 3), max_size=60)


def slow_match(tokens: list[int]) -> tuple[int, int]:
    """The latest of the longest matches among the PLACES latest places, by trying all."""
    best, tried = (0, 0), 0
    for place in range(len(tokens) - 1, SHORTEST - 1, -1):
        length = 0
        while length < min(LONGEST, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length < SHORTEST:
            continue
        tried += 1
        if tried <= PLACES and length > best[1]:
            best = (place, length)
    return best


@given(text=texts, pieces=st.lists(st.integers(1, 9), max_size=12))
@settings(deadline=None)
def test_a_text_that_grows_in_pieces_matches_as_a_whole(text: list[int], pieces: list[int]) -> None:
    index = NgramIndex()
    for end in (*itertools.accumulate(pieces), len(text)):
        if end <= len(text):
            index.extend(text[:end])
            assert index.match() == slow_match(text[:end])


def test_a_match_is_continued_and_a_loop_goes_round() -> None:
    index = NgramIndex()
    index.extend([1, 2, 3, 4, 9, 1, 2])
    assert index.match() == (2, 2)
    assert index.continuation(2, 3) == [3, 4, 9]
    loop = NgramIndex()
    loop.extend([7, 8, 7, 8, 7])
    place, length = loop.match()
    assert (place, length) == (3, 3)
    assert loop.continuation(place, 5) == [8, 7, 8, 7, 8]


def test_a_text_that_never_repeats_drafts_nothing() -> None:
    tree = LookupDrafter().grow(list(range(30)), 20)
    assert tree.num_nodes == 1 and tree.tokens.tolist() == [29]


@pytest.mark.parametrize("max_nodes", [2, 5, 40])
def test_a_draft_is_a_chain_of_the_size_that_is_allowed(max_nodes: int) -> None:
    tree = LookupDrafter(num_drafted=6).grow([5, 6, 7, 8, 9, 1, 2, 3, 5, 6], max_nodes)
    drafted = [7, 8, 9, 1, 2, 3][: max_nodes - 1]
    assert tree.tokens.tolist() == [6, *drafted]
    assert tree.parents.tolist() == list(range(-1, len(drafted)))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_output_is_the_targets_own_and_copies_are_accepted(
    model_of: Callable[..., EagleModel], temperature: float
) -> None:
    model, accepted = model_of("eagle1"), 0
    for seed, prompt in enumerate(([40, 41, 42, 43] * 5, list(b"the cat and the dog and the cat and the"))):
        outputs = []
        for drafter in (NoDraft(), LookupDrafter()):
            sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), prompt, 256)
            tokens: list[int] = []
            for event in generate(DecodingState(bundle_in(model).target, None), drafter, sampler, prompt):
                tokens += event.step.tokens.tolist()
                accepted += event.step.num_accepted
                if len(tokens) >= 40:
                    break
            outputs.append(tokens[:40])
        assert outputs[0] == outputs[1]
    assert accepted > 10
