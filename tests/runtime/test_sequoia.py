"""Static trees planned from acceptance by rank and depth: the plan is the best of all trees, the counts are those of a
plain count, and both are kept from run to run."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel
from eagle_runtime.base.tree import choice_parents
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.cost_model import LARGEST, Costs, Seconds, Timings
from eagle_runtime.drafting.rank_acceptance import FIRST, LEVELS, RANKS, Chances, Key, RankCounts, Ranks, from_json
from eagle_runtime.drafting.sequoia import best_trees, planned
from insides import bundle_in, turns_of
from machine_fake import FixedCosts

Choice = tuple[int, ...]
# A pass over 16 nodes takes hardly longer than one over the root, and a level of the head a hundredth of it.
CHEAP_DRAFTS = Costs(Timings((1, 16, 64), (64,), ((1.0, 1.1, 3.0),)), Timings((1, 32), (64,), ((0.01, 0.02),)))
GREEDY = Key("eagle", True, False)


def reached(choice: Choice, chances: Chances) -> float:
    """The chance that a node's whole path is emitted."""
    return float(np.prod([chances[depth, rank] for depth, rank in enumerate(choice)]))


@functools.cache
def all_trees(nodes: int, levels: int, ranks: int) -> frozenset[frozenset[Choice]]:
    """All static trees of so many nodes, root left out, made by adding one node at a time."""
    if nodes == 0:
        return frozenset([frozenset()])
    grown: set[frozenset[Choice]] = set()
    for tree in all_trees(nodes - 1, levels, ranks):
        for above, rank in itertools.product([(), *tree], range(ranks)):
            if len(above) < levels and (*above, rank) not in tree:
                grown.add(tree | {(*above, rank)})
    return frozenset(grown)


@pytest.mark.parametrize("seed", range(6))
def test_the_tree_of_each_size_is_the_best_of_all(seed: int) -> None:
    """Chances that do not fall with the rank are among them."""
    chances = np.random.default_rng(seed).dirichlet(np.ones(4), 3)[:, :3]
    for levels, trees in enumerate(best_trees(chances, 6), 1):
        for nodes in range(1, 7):
            values = [
                sum(reached(choice, chances) for choice in tree)
                for drafted in range(nodes)
                for tree in all_trees(drafted, levels, 3)
            ]
            choices = trees.choices(nodes)
            assert len(choice_parents(choices)) == 1 + len(choices), "parents come first, or this raises"
            assert len(choices) <= nodes - 1 and max(map(len, choices), default=0) <= levels
            assert np.isclose(trees.tokens[nodes], 1 + sum(reached(choice, chances) for choice in choices))
            assert np.isclose(trees.tokens[nodes], 1 + max(values))


def rate_of(choices: frozenset[Choice], chances: Chances, verify: Seconds, level: Seconds) -> float:
    tokens = 1 + sum(reached(choice, chances) for choice in choices)
    rows = np.bincount([len(choice) for choice in {choice[:-1] for choice in choices}])[1:]
    spent = level[round(tokens)] + level[rows].sum()
    return float(tokens / (verify[len(choices)] + spent))


@pytest.mark.parametrize("per_row", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("per_level", [0.01, 0.2])
def test_the_plan_has_the_highest_rate(per_row: float, per_level: float) -> None:
    chances = np.array([[0.6, 0.2, 0.1], [0.5, 0.1, 0.2], [0.7, 0.1, 0.05]])
    verify: Seconds = 1 + per_row * np.arange(7, dtype=np.float64)
    level = np.full(65, per_level)
    plan = planned(chances, verify, level, free=False)
    everything = itertools.chain.from_iterable(all_trees(nodes, 3, 3) for nodes in range(1, 7))
    best = max(rate_of(tree, chances, verify, level) for tree in everything)
    assert np.isclose(rate_of(frozenset(plan.tree.choices), chances, verify, level), best)
    assert list(plan.rows.values()) == list(range(len(plan.rows)))
    assert set(plan.rows) == {choice[:-1] for choice in plan.tree.choices}


@pytest.mark.parametrize("per_row", [0.3, 0.03, 0.003, 0.0])
def test_small_sizes_are_tried_first_and_no_better_one_is_missed(per_row: float) -> None:
    chances = RankCounts().chances()[:6, :8]
    verify: Seconds = 1 + per_row * np.arange(LARGEST, dtype=np.float64)
    level = np.full(LARGEST + 1, 0.05)
    plan = planned(chances, verify, level, free=False)
    rates = [
        rate_of(frozenset(trees.choices(nodes)), chances, verify, level)
        for trees in best_trees(chances, LARGEST)
        for nodes in range(2, LARGEST + 1)
    ]
    assert np.isclose(rate_of(frozenset(plan.tree.choices), chances, verify, level), max(rates))


def test_trees_shrink_as_rows_and_levels_cost_more() -> None:
    chances = RankCounts().chances()[:, :10]

    def nodes(row: float, level: float, free: bool = False) -> int:
        verify: Seconds = 1 + row * np.arange(LARGEST, dtype=np.float64)
        return len(planned(chances, verify, np.full(LARGEST + 1, level), free).tree.choices)

    assert nodes(0.3, 0.05) < nodes(0.05, 0.05) < nodes(0.005, 0.05)
    assert nodes(0.05, 0.5) < nodes(0.05, 0.01)
    assert nodes(0.05, 0.5) < nodes(0.05, 0.5, free=True), "a head whose levels cost one pass drafts all of them"


def test_counts_become_chances() -> None:
    counts = RankCounts()
    assert np.allclose(counts.chances()[3], FIRST)
    rng = np.random.default_rng(1)
    true = np.array([[0.5, 0.3, 0.1], [0.2, 0.6, 0.1]])
    for _ in range(3000):
        ranks: list[int | None] = []
        for depth in range(2):
            drawn = int(rng.choice(4, p=[*true[depth], 1 - true[depth].sum()]))
            ranks.append(None if drawn == 3 else drawn)
            if drawn:
                break  # as if the tree had children below the first proposal alone
        counts.learn(ranks)
    chances = counts.chances()
    assert np.allclose(chances[:2, :3], true, atol=0.07)
    assert (chances[:2, 4:] < 0.01).all()
    mean = true[0] / 1.5 + true[1] / 3
    assert np.allclose(chances[5, :3], mean, atol=0.07), "a depth that was never reached takes after all others"
    counts.learn([0] * (LEVELS + 5))
    counts.learn([RANKS + 3])
    assert (counts.chances().sum(1) <= 1 + 1e-9).all()


def test_a_model_counts_what_a_plain_count_finds(tmp_path: Path, bundle_of: Callable[..., Path]) -> None:
    """Of a verification the first emitted token's rank is that of the head's proposals for the root, drafted or not."""
    settings: dict[str, Any] = {"method": "eagle", "tree": "sequoia", "max_new_tokens": 60, "ignore_eos": True}
    with EagleModel.load(bundle_of("eagle1", "fp32"), threads=1, context=128, check_hashes=False) as model:
        turns_of(model).bundle = dataclasses.replace(bundle_in(model), costs=FixedCosts(CHEAP_DRAFTS))
        counts = bundle_in(model).ranks.of(GREEDY)
        trees: list[tuple[int, ...]] = []
        accepted: list[int] = []

        def note(cycle: Cycle) -> None:
            trees.append(tuple(cycle.tree.parents.tolist()))
            accepted.append(cycle.step.num_accepted)

        result = model.generate([5, 6, 7], on_cycle=note, **settings)
        plain = model.generate([5, 6, 7], method="vanilla", max_new_tokens=60, ignore_eos=True)
        assert result.token_ids == plain.token_ids
        drafted = [number for tree, number in zip(trees, accepted, strict=True) if len(tree) > 1]
        assert 10 < counts.verifications <= len(drafted)
        assert len(set(trees)) <= 4, "a static tree stays, but for some plans at first, and the context's end"
        least = sum(number > 0 for number in drafted) / (len(drafted) + 4)
        assert least <= counts.chances()[0].sum() + 0.05, "what was accepted is among what was counted"


def test_counts_are_kept_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle_of: Callable[..., Path]
) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    bundle = bundle_of("eagle1", "int8")
    files = {path: path.read_bytes() for path in bundle.rglob("*.json")}

    def answered() -> float:
        with EagleModel.load(bundle, threads=1, context=256, check_hashes=False) as model:
            before = bundle_in(model).ranks.of(GREEDY).verifications
            turns_of(model).bundle = dataclasses.replace(bundle_in(model), costs=FixedCosts(CHEAP_DRAFTS))
            for first in range(5, 9):
                settings: dict[str, Any] = {"max_new_tokens": 100, "ignore_eos": True}
                model.generate([first, 6, 7], method="eagle", tree="sequoia", **settings)
            assert bundle_in(model).ranks.of(GREEDY).verifications > before + 32
            assert bundle_in(model.twin()).ranks is bundle_in(model).ranks
        return before

    assert answered() == 0 and answered() > 32
    (kept,) = tmp_path.glob("ranks-*.json")
    assert {path: path.read_bytes() for path in bundle.rglob("*.json")} == files, "the bundle stays as it was"
    for damaged in (b"", b"[]", b"{", kept.read_bytes().replace(b"0.", b"-9."), kept.read_bytes()[:-9], b"NaN"):
        kept.write_bytes(damaged)
        assert Ranks(kept.name).of(GREEDY).verifications == 0, "what cannot be read is counted again"


def test_few_verifications_are_not_worth_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path))
    ranks = Ranks("ranks.json")
    for _ in range(31):
        ranks.of(GREEDY).learn([0])
    ranks.save()
    assert not list(tmp_path.iterdir())
    ranks.of(GREEDY).learn([1, None])
    ranks.save()
    again = Ranks("ranks.json")
    assert np.allclose(again.of(GREEDY).chances(), ranks.of(GREEDY).chances())
    assert again.of(Key("eagle", False, False)).verifications == 0


def test_only_counts_are_read() -> None:
    good = RankCounts().as_json()
    from_json(good)
    for name, wrong in (
        ("tried", [1.0] * (LEVELS - 1)),
        ("tried", [-1.0] * LEVELS),
        ("tried", [float("nan")] * LEVELS),
        ("tried", [1e9] * LEVELS),
        ("emitted", [[1.0] * RANKS] * LEVELS),
        ("emitted", [["a"] * RANKS] * LEVELS),
    ):
        assert _refused(good | {name: wrong}), (name, wrong)


def _refused(data: Any) -> bool:
    try:
        from_json(data)
    except (ValueError, TypeError):
        return True
    return False
