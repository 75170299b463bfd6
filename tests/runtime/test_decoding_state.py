"""A state that goes on from an earlier text holds what a new one would, and reads no more than what is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.tree import root_only
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.decoding_state import DecodingState, common_prefix
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import generate
from eagle_runtime.core.session import Array
from eagle_runtime.core.target import SHORT_CHUNK, Target
from eagle_runtime.drafting import head as head_module
from eagle_runtime.drafting.coupling import GumbelRanker
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, chain
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.sampling.sampler import Sampler
from fakes import Blend, FakeHead, FakeTarget, Table, rows_of
from insides import bundle_in, sessions_of

VOCAB, CAPACITY, SMALL_WINDOW = 8, 200, 6
TARGET = Table(VOCAB, 0, 1.0)
GOOD = Blend(3.0, TARGET, Table(VOCAB, 1, 1.0))


class Counting(FakeTarget):
    """Counts the rows that it computes."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.rows = 0

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        self.rows += len(feeds["input_ids"])
        return super().run(feeds, cache)


def drafter_of(name: str, head: Head, sampler: Sampler) -> Drafter:
    if name == "vanilla":
        return NoDraft()
    return EagleDrafter(head, chain(3)) if name == "chain" else EagleDrafter(head, DynamicTree(12, 2, 3))


def decode(state: DecodingState, drafter: Drafter, params: SamplingParams, ids: list[int], cycles: int) -> list[int]:
    sampler = Sampler(params, ids, state.target.vocab_size)
    steps = islice(generate(state, drafter, sampler, ids), cycles)
    return [token for cycle in steps for token in cycle.step.tokens.tolist()]


turns = st.lists(
    st.tuples(
        st.sampled_from(["vanilla", "chain", "tree"]),
        st.integers(0, 12),  # tokens of the text before that are dropped
        st.lists(st.integers(0, VOCAB - 1), max_size=9),  # new ones
        st.integers(1, 6),  # cycles
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=1,
    max_size=7,
)


@given(turns)
@settings(deadline=None, max_examples=150)
def test_any_walk_gives_what_new_states_give(walk: list[tuple[str, int, list[int], int, float]]) -> None:
    """Texts go on, are cut and edited, and decoded with or without drafts; a small window makes the head lose rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_module, "WINDOW", SMALL_WINDOW)
        session = Counting()
        head = Head(FakeHead(GOOD, top_k=4), CAPACITY, 40)
        state = DecodingState(Target(session, CAPACITY), head)
        for seed, (name, dropped, new, cycles, temperature) in enumerate(walk):
            before = state.tokens
            ids = [*before[: max(0, len(before) - dropped)], *new] or [1]
            ids = ids[: CAPACITY - 60]
            params = SamplingParams(temperature=temperature, seed=seed)
            session.rows = 0
            known = before.copy()
            sampler = Sampler(params, ids, VOCAB)
            steps = generate(state, drafter_of(name, head, sampler), sampler, ids)
            emitted = next(steps).step.tokens.tolist()
            assert session.rows == len(ids) - max(0, min(common_prefix(known, ids), len(ids)) - 1)
            emitted += [token for cycle in islice(steps, cycles) for token in cycle.step.tokens.tolist()]
            fresh = DecodingState(Target(FakeTarget(TARGET), CAPACITY), None)
            assert emitted == decode(fresh, NoDraft(), params, ids, len(emitted))
            assert state.tokens == [*ids, *emitted]
            check_rows(state)


def check_rows(state: DecodingState) -> None:
    """The rows of both caches are those of the text."""
    tokens, head = state.tokens, state.head
    assert isinstance(head, Head) and state.target.cache.length == len(tokens) - 1
    assert rows_of(state.target.cache)[0, : len(tokens) - 1, 0, 0].tolist() == tokens[:-1]
    first, count = head._first, head.cache.length
    assert first + count <= len(tokens) - 1
    features, inputs = rows_of(head.cache)[:, :count, 0]
    assert features.tolist() == [[tokens[first + row], first + row] for row in range(count)]
    assert inputs.tolist() == [[tokens[first + row + 1], row] for row in range(count)]
    assert head._noted_from + head.unread == len(tokens) - 1
    assert head._noted_from >= first + count
    if head.unread:
        noted = np.concatenate([np.asarray(part) for part in head._noted])
        start = head._noted_from
        assert noted.tolist() == [[tokens[start + row], start + row] for row in range(head.unread)]


def test_a_text_that_is_known_as_a_whole_is_read_from_its_last_token() -> None:
    session = Counting()
    state = DecodingState(Target(session, CAPACITY), None)
    first = decode(state, NoDraft(), SamplingParams(), [1, 2, 3], 4)
    session.rows = 0
    assert decode(state, NoDraft(), SamplingParams(), [1, 2, 3], 4) == first
    assert session.rows == 1 + 3
    session.rows = 0
    decode(state, NoDraft(), SamplingParams(), [1, 2, 3, *first], 1)
    assert session.rows == 1
    state.forget()
    assert state.tokens == [] and state.target.cache.length == 0


@pytest.mark.parametrize("most", [1, 7, 12, None])
def test_the_beginning_of_a_text_can_be_copied_alone(most: int | None) -> None:
    """The copy reads what it did not get, and goes on as the text itself would."""
    ids, params = list(range(8)), SamplingParams(temperature=1.0, seed=4)
    head = Head(FakeHead(GOOD, top_k=4), CAPACITY, 40)
    state = DecodingState(Target(FakeTarget(TARGET), CAPACITY), head)
    decode(state, drafter_of("tree", head, Sampler(params, ids, VOCAB)), params, ids, 5)
    text, session, other = list(state.tokens), Counting(), Head(FakeHead(GOOD, top_k=4), CAPACITY, 40)
    copy = DecodingState(Target(session, CAPACITY), other)
    copy.restore(state.snapshot(most))
    assert copy.tokens == text[:most] and copy.target.cache.length == min(len(text) - 1, most or CAPACITY)
    longer = [*text, 5]
    emitted = decode(copy, drafter_of("tree", other, Sampler(params, longer, VOCAB)), params, longer, 1)
    assert session.rows == len(longer) - min(len(text), most or CAPACITY) + 1
    fresh = DecodingState(Target(FakeTarget(TARGET), CAPACITY), None)
    assert emitted == decode(fresh, NoDraft(), params, longer, 1)
    check_rows(copy)


def test_a_step_that_was_interrupted_is_no_part_of_the_text() -> None:
    """Whatever the caches hold when the text was not noted yet: the next answer is that of a new state."""
    head = Head(FakeHead(GOOD, top_k=4), CAPACITY, 40)
    state = DecodingState(Target(FakeTarget(TARGET), CAPACITY), head)
    ids = [1, 2, 3]

    class Interrupted(EagleDrafter):
        def learn(self, step: Any) -> None:
            raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for owner, name in ((None, ""), (state, "emit"), (head, "feed")):
        drafter = EagleDrafter(head, chain(3)) if owner else Interrupted(head, chain(3))
        with pytest.MonkeyPatch.context() as patch:
            if owner is not None:
                patch.setattr(owner, name, stop)
            with pytest.raises(KeyboardInterrupt):
                decode(state, drafter, SamplingParams(), ids, 3)
        ids = [*state.tokens, 5]
        answer = decode(state, EagleDrafter(head, chain(3)), SamplingParams(), ids, 3)
        fresh = DecodingState(Target(FakeTarget(TARGET), CAPACITY), None)
        assert answer == decode(fresh, NoDraft(), SamplingParams(), ids, len(answer))
        check_rows(state)
        ids = state.tokens


# Real engines.


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_rows_do_not_depend_on_the_chunks_they_were_read_in(
    precision: str, model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    """Nor on whether they were read or decoded: to the bit, over 1,200 tokens."""
    session = sessions_of(model_of("eagle1", precision))[0]
    words = [token for prompt in prompts for token in prompt]
    text = (words * (1 + 1200 // len(words)))[:1200]
    decoded, rows = Target(session, 1200), []
    for token in text:
        logits, features = decoded.verify(root_only(token))
        decoded.cache.keep(np.zeros(1, np.int64))
        rows.append(np.array(features)[0])
    wanted = logits[0].copy()
    for chunk in (7, 33, SHORT_CHUNK):
        last, read = Target(session, 1200, chunk).prefill(text)
        np.testing.assert_array_equal(np.asarray(read), np.stack(rows))
        np.testing.assert_array_equal(last, wanted)


def answer(state: DecodingState, params: SamplingParams, ids: list[int], count: int) -> tuple[list[int], int]:
    """Returns `count` tokens, and how many cycles they took; with drafts if the state has a head."""
    sampler, drafter = Sampler(params, ids, state.target.vocab_size), cast(Drafter, NoDraft())
    if state.head is not None:
        ranker = GumbelRanker(sampler) if params.temperature else None
        drafter = EagleDrafter(state.head, DynamicTree(), ranker)
    tokens: list[int] = []
    for number, cycle in enumerate(generate(state, drafter, sampler, ids)):
        tokens += cycle.step.tokens.tolist()
        if len(tokens) >= count:
            return tokens[:count], number
    raise AssertionError("the context is full")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_twenty_turns_equal_those_of_new_states(
    precision: str, temperature: float, model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    """Reuse changes no token, with drafts or without, and loses no acceptance."""
    model = model_of("eagle1", precision)
    twins = model.twin(), model.twin()
    drafted, plain = DecodingState(bundle_in(model).target, model.head), DecodingState(bundle_in(twins[0]).target, None)
    reused = anew = 0
    ids: list[int] = []
    for turn in range(20):
        ids = [*ids, *prompts[turn % len(prompts)][:20]]
        params = SamplingParams(temperature=temperature, seed=turn)
        tokens, cycles = answer(drafted, params, ids, 12)
        assert answer(plain, params, ids, 12)[0] == tokens
        fresh, more = answer(DecodingState(bundle_in(twins[1]).target, twins[1].head), params, ids, 12)
        assert fresh == tokens
        reused, anew = reused + cycles, anew + more
        ids = [*ids, *tokens]
    assert reused <= 1.03 * anew < 20 * 12
