"""Several answers at once: every text is the one that its request gets alone, with and without an engine that joins
rows; errors, early ends and waiting."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from conftest import needs_operators
from eagle_runtime import ClosedError, ContextError, EagleError, EagleModel, RequestError
from eagle_runtime.app.batch import Beginnings
from eagle_runtime.base.tree import Tree
from eagle_runtime.core.head import Proposal
from eagle_runtime.core.rounds import MOST_ROWS, Rounds, Timed, Wish
from eagle_runtime.core.session import Session, run_passes
from eagle_runtime.drafting.cost_learning import unknown
from eagle_runtime.drafting.cost_model import (
    CONTEXTS,
    HEAD_ROWS,
    LARGEST,
    TARGET_ROWS,
    Costs,
    Pass,
    Timings,
    shared,
)
from eagle_runtime.drafting.cost_storage import LearnedCosts
from eagle_runtime.drafting.head import Head
from eagle_runtime.opening.joined_heads import check_head
from eagle_runtime.ort.session import OrtSession
from insides import sessions_of, shared_passes, turns_of
from patience import PATIENCE_S

PROMPTS = [[5, 6, 7, 5, 6], list(range(3, 90)), [11], [5, 6, 7, 5, 6, 7, 8], [40, 41] * 9, [2, 3, 4, 5]]


@pytest.fixture(
    params=[
        ("cpu", "fp32"),
        pytest.param(("native", "int4"), marks=needs_operators),
        pytest.param(("native", "int8+int8 cache"), marks=needs_operators),
    ]
)
def model(request: pytest.FixtureRequest, bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    backend, precision = request.param
    bundle = bundle_of("eagle3", precision)
    with EagleModel.load(bundle, backend=backend, threads=1, context=256, check_hashes=False) as loaded:
        yield loaded


def requests() -> list[dict[str, Any]]:
    """Of every kind: greedy or not, long and short, without drafts, with a head, with matches."""
    kinds: Iterator[dict[str, Any]] = itertools.cycle(
        [{}, {"temperature": 1.0}, {"method": "vanilla"}, {"method": "lookup", "temperature": 0.7, "top_p": 0.9}]
    )
    return [
        {"prompt": prompt, "seed": number, "max_new_tokens": 8 + 5 * number, "ignore_eos": True, **kind}
        for number, (prompt, kind) in enumerate(zip(PROMPTS * 2, kinds, strict=False))
    ]


@pytest.mark.parametrize("width", [1, 3, 8])
def test_texts_are_those_that_requests_get_alone(model: EagleModel, width: int) -> None:
    alone = [model.generate(**request) for request in requests()]
    texts: dict[int, list[int]] = {}
    for number, piece in model.batch(requests(), width=width):
        texts.setdefault(number, []).extend(token for token in piece.token_ids)
        if piece.result is not None:
            assert piece.result.token_ids == alone[number].token_ids
            assert piece.result.stop == alone[number].stop
    assert [tuple(texts[number]) for number in range(len(alone))] == [one.token_ids for one in alone]


@needs_operators
def test_trees_of_several_texts_are_verified_in_one_pass(
    bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = shared_passes(monkeypatch)
    with EagleModel.load(bundle_of("eagle3", "int4"), backend="native", threads=1, context=256) as model:
        for _ in model.batch(PROMPTS[:4], width=4, max_new_tokens=40, ignore_eos=True, temperature=0.0):
            pass
    assert max(map(len, rows)) == 4


@needs_operators
def test_one_pass_has_a_bound_of_rows(bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the texts are the same."""
    rows = shared_passes(monkeypatch)
    asked: dict[str, Any] = {"method": "eagle", "tree": "dynamic", "total_token": 10, "depth": 4, "temperature": 0.0}
    with EagleModel.load(bundle_of("eagle3", "int4"), backend="native", threads=1, context=256) as model:
        texts = []
        for bound in (MOST_ROWS, 25):
            monkeypatch.setattr("eagle_runtime.core.rounds.MOST_ROWS", bound)
            rows.clear()
            batch = model.batch(PROMPTS[:4], width=4, max_new_tokens=12, ignore_eos=True, **asked)
            texts.append({number: piece.result.token_ids for number, piece in batch if piece.result is not None})
            assert max(map(sum, rows)) == (40 if bound == MOST_ROWS else 20)
    assert texts[0] == texts[1] and len(texts[0]) == 4


def read(session: Session, number: int) -> Head:
    """A head that has read a text and has three rows more to read."""
    head = Head(session, 200, 50)
    rng = np.random.default_rng(number)
    width = int(session.inputs["features"].shape[2])
    head.note(rng.standard_normal((7 + 4 * number, width)).astype(np.float32))
    head.catch_up(list(range(1, 9 + 4 * number)))
    head.note(rng.standard_normal((3, width)).astype(np.float32))
    return head


@needs_operators
def test_heads_of_several_texts_read_in_one_pass(bundle_of: Callable[..., Path]) -> None:
    """What they propose, then and after, is what each proposes that reads alone."""
    with EagleModel.load(bundle_of("eagle3", "int4"), backend="native", threads=1, context=256) as model:
        session = sessions_of(model)[1]
        texts = [list(range(1, 12 + 4 * number)) for number in range(3)]
        alone, joined = ([read(session, number) for number in range(3)] for _ in range(2))
        expected = [head.catch_up(tokens) for head, tokens in zip(alone, texts, strict=True)]
        passes = [head.reading(tokens) for head, tokens in zip(joined, texts, strict=True)]
        assert all(one is not None for one in passes)
        run_passes([one for one in passes if one is not None])
        run_passes([one for one in passes if one is not None])  # as after an interrupt: nothing is read twice
        for head, other, tokens, one in zip(joined, alone, texts, expected, strict=True):
            assert head.unread == 0 and head.cache.length == other.cache.length
            same(head.catch_up(tokens), one)
            for reader in (head, other):
                reader.note(np.ones((2, np.asarray(one.hidden).shape[1]), np.float32))
            same(head.catch_up([*tokens, 5, 6]), other.catch_up([*tokens, 5, 6]))


def same(one: Proposal, other: Proposal) -> None:
    assert one.position == other.position
    for name in ("tokens", "log_probs", "hidden"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@needs_operators
def test_a_head_that_does_not_join_texts_reads_alone(
    bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with operators that were not made for it."""
    with EagleModel.load(bundle_of("eagle3", "int4"), backend="native", threads=1, context=256) as model:
        session = sessions_of(model)[1]
        head = read(session, 0)
        assert head.reading(list(range(1, 12))) is not None
        together = OrtSession.run_together

        def swapped(session: OrtSession, passes: Any) -> Any:
            return together(session, passes)[::-1]

        monkeypatch.setattr(OrtSession, "run_together", swapped)
        check_head(session)
        assert read(session, 0).reading(list(range(1, 12))) is None


def test_requests_are_checked_before_anything_runs(model: EagleModel) -> None:
    good = {"prompt": [1, 2]}
    for bad, error in (
        ({"prompt": [1], "temperature": -1}, RequestError),
        ({"max_new_tokens": 3}, RequestError),
        ({"prompt": [1] * 300}, ContextError),
        ({"prompt": [1], "colour": 1}, Exception),
    ):
        with pytest.raises(error):
            model.batch([good, bad])
    with pytest.raises(RequestError, match="width"):
        model.batch([good], width=0)
    assert list(model.batch([])) == []


def test_an_error_of_one_ends_the_others(model: EagleModel) -> None:
    class Broken:
        def grow(self, tokens: object, max_nodes: int) -> Tree:
            raise ValueError("a drafter of the caller's")

        def learn(self, step: object) -> None:
            """Nothing comes here."""

    batch = model.batch([{"prompt": [1, 2]}, {"prompt": [3], "drafter": Broken()}], max_new_tokens=200, ignore_eos=True)
    with pytest.raises(ValueError, match="a drafter of the caller's"):
        for _ in batch:
            pass
    assert model.memory().conversations == 0


def test_an_interrupt_in_the_step_of_another_text_is_an_error_of_that_text() -> None:
    """Which would else end without one, as if its context were full."""
    rounds = Rounds(lambda step: step(), cast(Any, SimpleNamespace(most_texts=2, joins=True)))

    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    other = Wish(rounds.enter(), interrupted)
    rounds._waiting.append(other)
    with pytest.raises(KeyboardInterrupt):
        rounds.serve([Wish(rounds.enter(), lambda: ["item"])])
    with pytest.raises(EagleError, match="interrupted; ask again"):
        other.taken()


def test_a_batch_may_be_left(model: EagleModel) -> None:
    batch = model.batch(PROMPTS, width=3, max_new_tokens=150, ignore_eos=True)
    next(batch)
    batch.close()  # type: ignore[attr-defined]
    assert model.memory().conversations == 0
    assert len(model.generate([1, 2, 3], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def test_all_is_computed_in_the_thread_that_asks(model: EagleModel) -> None:
    threads = set()
    settings: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
    for _ in model.batch(PROMPTS[:3], on_cycle=lambda _: threads.add(threading.current_thread()), **settings):
        pass
    assert threads == {threading.current_thread()}


def test_an_answer_that_begins_later_joins_the_next_pass(model: EagleModel) -> None:
    """Of two places one is free after the first answer's end: the third answer's first piece comes before the second's
    last one."""
    order = []
    lengths = [2, 40, 4]
    requests = [{"prompt": [7 + n], "max_new_tokens": length} for n, length in enumerate(lengths)]
    for number, piece in model.batch(requests, width=2, ignore_eos=True, method="vanilla"):
        order.append((number, piece.result is not None))
    assert order.index((0, True)) < order.index((2, False)) < order.index((2, True)) < order.index((1, True))


def test_what_prompts_have_in_common_is_read_once(model: EagleModel) -> None:
    """The second and the third wait for the first, which reads 150 tokens; the last one shares more
    with the third than with the first."""
    common = [3 + number % 90 for number in range(150)]
    prompts = [
        [*common, 5, 6],
        [*common, 7],
        [*common[:120], 8, 9, *[4] * 60],
        [*common[:120], 8, 9, *[4] * 70],
        [5, 6],
    ]
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    alone = [model.generate(prompt, **settings) for prompt in prompts]
    results = {number: piece.result for number, piece in model.batch(prompts, **settings) if piece.result is not None}
    assert [results[number].token_ids for number in range(5)] == [one.token_ids for one in alone]
    assert [results[number].usage.cached_tokens for number in range(5)] == [0, 149, 119, 181, 0]
    assert model.memory().conversations == 0


def test_a_text_that_ends_early_keeps_no_other_waiting(model: EagleModel) -> None:
    """The first one ends before it has read what the second waits for: then that reads for itself."""
    common = [3 + number % 90 for number in range(200)]
    settings = {"max_new_tokens": 3, "ignore_eos": True, "temperature": 0}
    slots = [turns_of(model).slots.new() for _ in range(2)]
    beginnings = Beginnings()
    turns = []
    for slot in slots:
        beginnings.add(slot, common)
        turns.append(turns_of(model).in_slot(slot, common, lambda *_, slot=slot: beginnings.end(slot), settings))
    assert [slot.waits for slot in slots] == [False, True]
    turns[0].close()
    assert not slots[1].waits
    with turns[1] as turn:
        result = [piece.result for piece in turn][-1]
    assert result is not None
    assert result.usage.cached_tokens == 0
    assert result.token_ids == model.generate(common, max_new_tokens=3, ignore_eos=True, temperature=0).token_ids
    beginnings.close()
    assert model.memory().conversations == 0


@pytest.mark.parametrize("width", [1, 2, 8])
def test_answers_of_one_token_share_what_their_prompts_have_in_common(model: EagleModel, width: int) -> None:
    """Texts end as soon as they have read their prompts."""
    common = [3 + number % 90 for number in range(200)]
    prompts = [[*common, number] for number in range(5)]
    settings: dict[str, Any] = {"max_new_tokens": 1, "ignore_eos": True, "temperature": 0}
    alone = [model.generate(prompt, **settings).token_ids for prompt in prompts]
    batch = model.batch(prompts, width=width, **settings)
    results = {number: piece.result for number, piece in batch if piece.result is not None}
    assert [results[number].token_ids for number in range(5)] == alone
    assert [results[number].usage.cached_tokens for number in range(5)] == [0, *[199] * 4]
    assert model.memory().conversations == 0


def test_a_closed_model_ends_a_batch(model: EagleModel) -> None:
    batch = model.batch(PROMPTS[:3], max_new_tokens=150, ignore_eos=True)
    next(batch)
    model.close()
    with pytest.raises(ClosedError):
        for _ in batch:
            pass


def test_nobody_waits_for_a_slow_consumer(model: EagleModel) -> None:
    """A stream that is left alone for a while delays another one by the patience of one round at most."""
    slow = model.stream([1, 2, 3], max_new_tokens=100, ignore_eos=True)
    twin = model.twin()
    next(slow)
    done = threading.Event()

    def other() -> None:
        twin.generate([5, 6], max_new_tokens=100, ignore_eos=True)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert done.wait(PATIENCE_S)
    thread.join()
    slow.close()


@needs_operators
def test_a_prompt_is_read_in_short_chunks_while_others_decode(bundle_of: Callable[..., Path]) -> None:
    """Alone in one chunk of 200 tokens; beside an answer that goes on in chunks of 64."""
    prompt = [3 + number % 90 for number in range(200)]
    read: list[int] = []
    with EagleModel.load(bundle_of("eagle3", "int4"), backend="native", threads=1, context=256) as model:
        settings: dict[str, Any] = {
            "max_new_tokens": 1,
            "ignore_eos": True,
            "on_prefill": lambda count, _: read.append(count),
        }
        alone = model.generate(prompt, **settings)
        assert read == []
        twin, done = model.twin(), threading.Event()

        def other() -> None:
            while not done.is_set():
                twin.generate([5, 6], max_new_tokens=200, ignore_eos=True)

        thread = threading.Thread(target=other)
        thread.start()
        try:
            beside = [model.generate(prompt, **settings) for _ in range(4)]
        finally:
            done.set()
            thread.join()
    assert {one.token_ids for one in beside} == {alone.token_ids}
    assert 64 in read


def test_what_other_texts_leave_of_a_pass() -> None:
    """Rows of a pass cost 5 ms for the first four together, and 1 ms each beyond: of three texts each has a third of
    5 ms, and pays a third of what it costs that all have as many rows as it has."""
    rows = (1, 4, LARGEST)
    costs = Costs(Timings(rows, (64,), ((5.0, 5.0, 65.0),)), None)
    table = shared(costs, 2).target.at(64)
    np.testing.assert_allclose(table[1:4], [5 / 3, 7 / 3, 10 / 3])
    assert table[LARGEST] - table[LARGEST - 16] == pytest.approx(16)
    assert shared(costs, 2).plain_at(64) == pytest.approx(5 / 3)


def test_rows_that_all_texts_have_more() -> None:
    """Of four texts that have two rows each, each pays its part of eight; one that has two alone, the fifth."""
    rows = (1, 4, 5, 8, LARGEST)
    cheap_fifth = Costs(Timings(rows, (64,), ((4.0, 4.0, 4.0, 8.0, 64.0),)), None)
    np.testing.assert_allclose(shared(cheap_fifth, 3).target.at(64)[1:3], [1, 2])
    expensive_fifth = Costs(Timings(rows, (64,), ((4.0, 4.0, 8.0, 8.0, 64.0),)), None)
    np.testing.assert_allclose(shared(expensive_fifth, 3).target.at(64)[1:3], [1, 5])


def test_passes_of_several_texts_teach_what_their_rows_cost() -> None:
    """The table says that a ninth row is as cheap as the eighth. Passes of eight texts show that it costs as much as
    four; a text alone learns nothing from them."""
    line = tuple(1.0 + 0.1 * rows for rows in TARGET_ROWS)
    head = Timings(HEAD_ROWS, CONTEXTS, ((0.2,) * len(HEAD_ROWS),) * 2)
    costs = LearnedCosts(unknown(Costs(Timings(TARGET_ROWS, CONTEXTS, (line, line)), head)))
    timed: deque[Timed] = deque()
    alone, others = costs.now, 7
    costs.share(lambda: others, timed)

    def second_row() -> float:
        table = costs.now.target.at(64)
        return float((table[2] - table[1]) / table[1])

    before = second_row()
    for _ in range(40):
        timed += [Timed(8, 64, 1.8), Timed(9, 64, 2.2)]
        costs.learn([Pass("target", 1, 64, 9.0)])
        assert costs.now.target.at(64)[1] < 1.0
    assert not timed
    assert second_row() > 1.5 * before
    others = 0
    assert costs.now is alone
