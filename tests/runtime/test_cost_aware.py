"""Trees sized by costs: connected, of the best size, never slower than plain decoding for long, and lossless."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import MAX_DEPTH, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import WINDOW
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.acceptance import (
    FEWEST,
    LOOK,
    MOST,
    AcceptanceStats,
    DraftGain,
    LevelGains,
    UsualGain,
    match_kinds,
)
from eagle_runtime.drafting.candidate_pool import MatchedChain, Pool
from eagle_runtime.drafting.cost_aware import CostAwareDrafter, best_size
from eagle_runtime.drafting.cost_model import LARGEST, Costs, Timings
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.shapes import DynamicTree
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from fakes import Blend, FakeHead, FakeTarget, Language, Table
from machine_fake import FixedCosts

VOCAB = 12
CHEAP = Costs(
    Timings((1, 16, 64), (64,), ((1.0, 1.1, 1.4),)),
    Timings((1, 32), (64,), ((0.01, 0.02),)),
)
STEEP = Costs(
    Timings((1, 2, 64), (64,), ((1.0, 2.0, 64.0),)),  # verifying two tokens costs as much as decoding two
    Timings((1, 32), (64,), ((0.06, 0.1),)),
)


class Recording(CostAwareDrafter):
    """Keeps the cost of the last tree, in verifications of one token; None: nothing was drafted."""

    cost: float | None = None

    def learn(self, step: Step) -> None:
        self.cost = self._last.cost if self._last is not None else None
        super().learn(step)

    def lose(self) -> None:
        self._gain(0).note(1, 10.0)


def decode(
    target: Language,
    head: Language,
    costs: Costs,
    count: int,
    *,
    lookup: bool,
    acceptance: AcceptanceStats | None = None,
    others: int = 0,
) -> tuple[list[int], list[Tree], float]:
    """Tokens of greedy decoding, its trees, and what they cost in verifications of one token. others: texts that share
    the passes."""
    model = Target(FakeTarget(target), 600)
    acceptance = AcceptanceStats() if acceptance is None else acceptance
    draft = Head(FakeHead(head, top_k=4), 600, 200)
    fixed = FixedCosts(costs)
    fixed.share(lambda: others, deque())
    drafter = Recording(draft, fixed, acceptance, top_k=4, lookup=lookup)
    sampler = Sampler(SamplingParams(), [1, 2, 3], VOCAB)
    tokens, trees, cost = [], [], 0.0
    for number, cycle in enumerate(generate(DecodingState(model, draft), drafter, sampler, [1, 2, 3])):
        tokens += cycle.step.tokens.tolist()
        if number > 0:
            trees.append(cycle.tree)
            cost += drafter.cost or 1.0
        if len(tokens) >= count:
            break
    return tokens, trees, cost


def plain(target: Language, count: int) -> list[int]:
    tokens = [1, 2, 3]
    for _ in range(count):
        history = np.array([tokens, range(len(tokens))], np.float32)
        tokens.append(int(target.logits(history).argmax()))
    return tokens[3:]


TARGET = Table(VOCAB, 0, 3.0)
GOOD, USELESS = Blend(3.0, TARGET, Table(VOCAB, 1, 3.0)), Table(VOCAB, 2, 6.0)


WAITING = Costs(  # up to four rows a pass waits for memory; each further one costs nearly as much
    Timings((1, 4, 64), (64,), ((1.0, 1.0, 49.0),)),
    Timings((1, 32), (64,), ((0.06, 0.1),)),
)


def test_drafts_end_where_other_texts_fill_the_pass_and_go_on_alone() -> None:
    acceptance = AcceptanceStats()
    tokens, trees, _ = decode(TARGET, GOOD, WAITING, 60, lookup=False, acceptance=acceptance)
    assert tokens[:60] == plain(TARGET, 60) and len(trees) < 45
    _, shared_trees, _ = decode(TARGET, GOOD, WAITING, 60, lookup=False, acceptance=acceptance, others=3)
    assert {tree.num_nodes for tree in shared_trees} == {1}
    tokens, shared_trees, _ = decode(TARGET, GOOD, CHEAP, 60, lookup=False, acceptance=acceptance, others=3)
    assert tokens[:60] == plain(TARGET, 60) and max(tree.num_nodes for tree in shared_trees) > 2
    _, trees, _ = decode(TARGET, GOOD, WAITING, 60, lookup=False, acceptance=acceptance)
    assert len(trees) < 45


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("costs", [CHEAP, STEEP])
@pytest.mark.parametrize("head", [GOOD, USELESS])
def test_output_is_the_targets_own_and_trees_are_whole(head: Language, costs: Costs, lookup: bool) -> None:
    tokens, trees, _ = decode(TARGET, head, costs, 150, lookup=lookup)
    assert tokens[:150] == plain(TARGET, 150)
    for tree in trees:
        assert 1 <= tree.num_nodes <= LARGEST
        assert tree.parents[0] == -1 and np.all(tree.parents[1:] < np.arange(1, tree.num_nodes))
        assert np.all(tree.parents[1:] >= 0) and np.all(tree.scores[1:] <= tree.scores[tree.parents[1:]])
        siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
        assert len(set(siblings)) == len(siblings)


def test_a_good_head_pays_where_nodes_are_cheap() -> None:
    tokens, trees, cost = decode(TARGET, GOOD, CHEAP, 150, lookup=False)
    assert cost < 0.5 * len(tokens)
    assert np.mean([tree.num_nodes for tree in trees]) > 8


def test_trees_shrink_where_nodes_cost_much() -> None:
    _, cheap, _ = decode(TARGET, GOOD, CHEAP, 150, lookup=False)
    _, steep, _ = decode(TARGET, GOOD, STEEP, 150, lookup=False)
    assert np.mean([tree.num_nodes for tree in steep]) < 0.3 * np.mean([tree.num_nodes for tree in cheap])


def test_a_useless_head_costs_no_more_than_three_percent() -> None:
    tokens, _, cost = decode(TARGET, USELESS, STEEP, 400, lookup=True)
    assert cost <= 1.03 * len(tokens)


def test_the_head_comes_back_when_it_pays_again() -> None:
    """After a useless head the same acceptance serves a good one: it is tried again, and stays."""
    acceptance = AcceptanceStats()
    decode(TARGET, USELESS, CHEAP, 60, lookup=False, acceptance=acceptance)
    decode(TARGET, USELESS, STEEP, 200, lookup=False, acceptance=acceptance)
    tokens, _, cost = decode(TARGET, GOOD, CHEAP, 400, lookup=False, acceptance=acceptance)
    assert cost < 0.7 * len(tokens)


def test_copies_alone_need_no_head() -> None:
    model = Target(FakeTarget(Loop()), 600)
    costs = Costs(CHEAP.target, None)
    drafter = CostAwareDrafter(None, FixedCosts(costs), AcceptanceStats(), lookup=True)
    passes = tokens = 0
    sampler = Sampler(SamplingParams(), [1, 2, 3], VOCAB)
    for cycle in generate(DecodingState(model, None), drafter, sampler, [1, 2, 3]):
        passes += 1
        tokens += len(cycle.step.tokens)
        if tokens > 200:
            break
    assert passes < 40


class Loop:
    """A target that counts to seven over and over."""

    vocab_size = VOCAB

    def logits(self, history: np.typing.NDArray[np.float32]) -> np.typing.NDArray[np.float32]:
        logits = np.zeros(VOCAB, np.float32)
        logits[int(history[0, -1] + 1) % 7] = 9
        return logits


def test_head_and_copies_meet_in_one_tree() -> None:
    """A head that knows the loop and an n-gram match of it draft the same nodes, once each."""
    tokens, trees, cost = decode(Loop(), Loop(), CHEAP, 120, lookup=True)
    assert tokens[:120] == plain(Loop(), 120)
    assert max(tree.num_nodes for tree in trees) <= LARGEST and cost < 0.3 * len(tokens)


chances = st.lists(st.floats(0, 1), max_size=70)
steps = st.lists(st.floats(0, 1), min_size=1, max_size=63)


@given(chances=chances, steps=steps, spent=st.floats(0, 3))
@settings(deadline=None)
def test_best_size_is_the_best_of_all(chances: list[float], steps: list[float], spent: float) -> None:
    verify = np.array([1.0, *itertools.accumulate(steps, initial=1.0)])[1:]
    nodes, rate = best_size(np.array(chances), verify, spent)
    ranked = sorted(chances, reverse=True)
    rates = [
        (1 + sum(ranked[: n - 1])) / (verify[n - 1] + spent) for n in range(1, min(len(ranked) + 1, len(verify)) + 1)
    ]
    assert rate == pytest.approx(max(rates)) and rates[nodes - 1] == pytest.approx(rate)


def test_the_chances_of_an_overconfident_head_are_corrected() -> None:
    acceptance, probs = AcceptanceStats(), np.log(np.array([0.9, 0.05], np.float32))
    tree = Tree(np.array([0, 1, 2]), np.array([-1, 0, 0]), np.zeros(3, np.float32))
    log_probs = np.array([np.nan, *probs], np.float32)
    for number in range(400):  # half of what it calls 90 % sure comes true
        path = np.array([0, 1] if number % 2 else [0])
        acceptance.learn(tree, path, log_probs, np.zeros(3, np.int64))
    corrected = np.exp(acceptance.corrected(probs))
    assert corrected[0] == pytest.approx(0.5, abs=0.04) and corrected[1] < 0.02


def test_the_chance_of_a_match_follows_the_counts() -> None:
    acceptance = AcceptanceStats()
    kinds = match_kinds(np.array([3, 4, 40]))
    before = np.exp(acceptance.matched(kinds))
    tree = Tree(np.array([0, 1]), np.array([-1, 0]), np.zeros(2, np.float32))
    for _ in range(300):
        acceptance.learn(tree, np.array([0]), np.full(2, np.nan, np.float32), np.array([0, 3]))
    after = np.exp(acceptance.matched(kinds))
    assert after[0] < 0.05 < before[0] and after[1:] == pytest.approx(before[1:])


@pytest.mark.parametrize("chance", [0.1, 0.9])
def test_a_matched_token_that_the_head_proposes_gets_the_higher_value(chance: float) -> None:
    chain = MatchedChain([7, 8, 9], 4, AcceptanceStats())
    before = chain.values.copy()
    values, matches = np.log(np.array([0.05, chance], np.float32)), np.zeros(2, np.int64)
    chain.follow(np.array([3, 7]), np.array([-1, -1]), values, matches, 0)
    assert np.exp(values) == pytest.approx([0.05, max(chance, np.exp(before[0]))], rel=1e-5)
    assert matches.tolist() == [0, 4] and (chain.in_pool, chain.node) == (1, 1)
    assert chain.values_left - values[1] == pytest.approx(before[1:] - before[0], abs=1e-6)


@pytest.mark.parametrize("chance", [0.1, 0.9])
def test_a_head_that_weighs_the_match_has_the_last_word(chance: float) -> None:
    chain = MatchedChain([7, 8, 9], 4, AcceptanceStats(), weighed=True)
    before = chain.values.copy()
    values, matches = np.log(np.array([0.05, chance], np.float32)), np.zeros(2, np.int64)
    chain.follow(np.array([3, 7]), np.array([-1, -1]), values, matches, 0)
    assert np.exp(values) == pytest.approx([0.05, chance], rel=1e-5) and matches.tolist() == [0, 4]
    assert chain.values_left - values[1] == pytest.approx(before[1:] - before[0], abs=1e-6)


def test_matched_tokens_that_the_head_does_not_propose_are_added_as_a_chain() -> None:
    chain, pool = MatchedChain([7, 8, 9], 4, AcceptanceStats()), Pool()
    before = chain.values.copy()
    level = (np.array([3, 5]), np.array([-1, -1]), np.log(np.array([0.5, 0.3], np.float32)))
    matches = np.zeros(2, np.int64)
    chain.follow(*level, matches, 0)
    pool.add(*level, level[2], matches)
    chain.follow(np.array([7]), np.array([0]), np.zeros(1, np.float32), np.zeros(1, np.int64), 2)  # 7, but after 3
    assert not matches.any() and np.array_equal(chain.values, before)
    chain.append_to(pool)
    assert pool.matches[1].tolist() == [4, 5, 6]
    assert pool.parents[1].tolist() == [-1, 2, 3]


def paused(gain: DraftGain) -> int:
    """Verifications until the head may draft again."""
    return next(count for count in range(1000) if not gain.pauses())


@pytest.mark.parametrize("cost", [1.5, 2.5])
def test_drafts_lose_no_more_than_they_may(cost: float) -> None:
    gain, lost, tries = DraftGain(UsualGain()), 0.0, 0
    for _ in range(2000):
        if not gain.pauses():
            gain.note(1, cost)
            lost, tries = lost + cost - 1, tries + 1
    assert tries > 20 and lost < 6 + 0.024 * 2000


def test_pauses_grow_while_drafts_lose_and_are_short_again_once_they_pay() -> None:
    gain = DraftGain(UsualGain())
    seen: list[int] = []
    while len(seen) < 6:
        gain.note(1, 4.0)
        seen += [count] if (count := paused(gain)) else []
    assert seen == [FEWEST, 2 * FEWEST, 4 * FEWEST, MOST, MOST, MOST]
    for _ in range(20):
        gain.note(3, 1.5)
        assert not gain.pauses()
    while not (count := paused(gain)):
        gain.note(1, 4.0)
    assert count == FEWEST


def test_drafts_that_lose_where_texts_share_passes_pause_there_alone() -> None:
    acceptance = AcceptanceStats()
    _, useless, _ = decode(TARGET, USELESS, CHEAP, 100, lookup=False, acceptance=acceptance, others=3)
    assert sum(tree.num_nodes == 1 for tree in useless[-40:]) > 30
    assert acceptance.usual_gain(3).tokens < acceptance.usual_gain(2).tokens
    tokens, good, _ = decode(TARGET, GOOD, CHEAP, 60, lookup=False, others=3)
    assert tokens == plain(TARGET, len(tokens))
    assert all(tree.num_nodes > 1 for tree in good[1:])


def test_a_text_begins_with_what_drafts_of_others_gained() -> None:
    losing, paying = UsualGain(), UsualGain()
    for _ in range(400):
        losing.note(-0.5)
        paying.note(0.5)
    drafts = []
    for usual in (losing, paying):
        gain, count = DraftGain(usual), 0
        while not gain.pauses():
            gain.note(1, 1.5)
            count += 1
        drafts.append(count)
    assert drafts[0] == 1 and 3 <= drafts[1] <= 6


def test_reading_what_a_pause_left_unread_is_part_of_the_cost() -> None:
    """After a pause the head reads all tokens since its last draft at once, and the draft counts that."""
    per_row = 0.01
    costs = Costs(CHEAP.target, Timings((1, LARGEST), (64,), ((per_row, LARGEST * per_row),)))
    acceptance = AcceptanceStats()
    head = Head(FakeHead(GOOD, top_k=4), 600, 200)
    drafter = Recording(head, FixedCosts(costs), acceptance, top_k=4)
    rested, paid = 0, []
    state = DecodingState(Target(FakeTarget(TARGET), 600), head)
    cycles = generate(state, drafter, Sampler(SamplingParams(), [1], VOCAB), [1])
    next(cycles)
    for _ in cycles:
        if drafter.cost is None:
            rested += 1
            continue
        paid.append(drafter.cost)
        if len(paid) == 2:
            break
        for _ in range(5):
            drafter.lose()
    assert rested == MOST and paid[1] > paid[0] + 0.8 * min(rested, WINDOW) * per_row


def test_the_head_is_not_run_where_a_match_promises_more() -> None:
    """Where the text goes in circles, drafts of a head that is of little use are not made."""
    tokens, _, cost = decode(Loop(), USELESS, CHEAP, 400, lookup=True)
    assert tokens[:400] == plain(Loop(), 400)
    assert cost < 0.12 * len(tokens)


ROWS = np.linspace(1.0, 7.4, 65)  # seconds of passes of so many rows


def chain_of(levels: int, chance: float) -> Tree:
    """A root with one node at each level, each accepted by this chance given the one above."""
    scores = np.log(chance) * np.arange(levels + 1)
    return Tree(np.zeros(levels + 1, np.int64), np.arange(levels + 1) - 1, scores.astype(np.float32))


@pytest.mark.parametrize(("chance", "least", "most"), [(0.1, 2, 2), (0.98, 8, 8), (0.6, 3, 7)])
def test_a_block_has_as_many_rows_as_pay(chance: float, least: int, most: int) -> None:
    gains, verify = LevelGains(), 3 * ROWS[1:]
    for _ in range(100):
        rows, levels = gains.choose(range(2, 9), ROWS, verify)
        assert levels == rows - 1
        tree = chain_of(rows - 1, chance)
        gains.learn(tree, tree.parents >= 0, rows - 1)
    chosen = [gains.choose(range(2, 9), ROWS, verify)[0] for _ in range(LOOK)]
    assert chosen.count(8) >= 1  # levels that are not drafted are looked at now and then
    assert all(least <= rows <= most for rows in chosen if rows != 8) and (most < 8) == (min(chosen) < 8)
    assert all(gains.choose(range(8, 9), ROWS, verify) == (8, MAX_DEPTH) for _ in range(5))


def test_rows_follow_a_text_that_becomes_easy() -> None:
    gains, verify, rows = LevelGains(), 3 * ROWS[1:], []
    for number in range(200):
        rows.append(gains.choose(range(1, 9), ROWS, verify)[0])
        tree = chain_of(rows[-1], 0.2 if number < 100 else 0.95)
        gains.learn(tree, tree.parents >= 0, rows[-1])
    assert np.median(rows[80:100]) <= 2 and np.median(rows[180:]) == 8


@pytest.fixture(scope="module")
def model(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagleModel]:
    with (
        pytest.MonkeyPatch.context() as patch,
        EagleModel.load(bundle_of("eagle3"), backend="cpu", threads=1, context=512) as loaded,
    ):
        patch.setenv("EAGLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield loaded


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "tree"), [("eagle", "cost-aware"), ("eagle+lookup", None), ("lookup", None)])
def test_methods_of_a_model(model: EagleModel, method: str, tree: str | None, temperature: float) -> None:
    for seed, prompt in enumerate((list(b"a loop of a loop of a"), [65, 66, 67])):
        settings: dict[str, Any] = {"max_new_tokens": 48, "temperature": temperature, "seed": seed, "ignore_eos": True}
        wanted = model.generate(prompt, method="vanilla", **settings)
        result = model.generate(prompt, method=method, tree=tree, **settings)
        assert result.token_ids == wanted.token_ids
        assert result.usage.method == method


@pytest.mark.parametrize(
    ("asked", "method"),
    [
        ({}, "eagle+lookup"),
        ({"tree": "cost-aware"}, "eagle+lookup"),
        ({"draft_top_k": 3}, "eagle+lookup"),
        ({"tree": "dynamic"}, "eagle"),
        ({"tree": "chain"}, "eagle"),
        ({"total_token": 8}, "eagle"),
        ({"depth": 2}, "eagle"),
        ({"tree": DynamicTree(8, 2, 2)}, "eagle"),
    ],
)
def test_the_method_where_none_is_given(model: EagleModel, asked: dict[str, Any], method: str) -> None:
    assert model.generate([1, 2, 3], max_new_tokens=2, **asked).usage.method == method


@pytest.mark.parametrize("tree", ["dynamic", "static"])
@pytest.mark.parametrize("method", ["lookup", "eagle+lookup"])
def test_trees_that_a_method_does_not_draft(model: EagleModel, method: str, tree: str) -> None:
    with pytest.raises(RequestError, match=f"does not draft a {tree} tree"):
        model.generate([1, 2, 3], method=method, tree=tree)
    with pytest.raises(RequestError, match="takes no tree shape of your own"):
        model.generate([1, 2, 3], method=method, tree=DynamicTree(8, 2, 2))


def test_lookup_drafts_a_chain_of_fixed_length(model: EagleModel) -> None:
    prompt = [65, 66, 67] * 6
    wanted = model.generate(prompt, method="vanilla", max_new_tokens=24)
    assert model.generate(prompt, method="lookup", tree="chain", max_new_tokens=24).token_ids == wanted.token_ids
