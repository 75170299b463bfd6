"""Drafts from the model's own habits and from a suffix automaton: the rules, and that they change no token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_tokenizer
from eagle_runtime import Constraint, EagleModel
from eagle_runtime.accept import Step
from eagle_runtime.drafting.habits import Habits, successors
from eagle_runtime.drafting.head import NEVER, Scratch
from eagle_runtime.drafting.recycling import HostCosts, RecyclingHead
from eagle_runtime.drafting.suffix import SuffixAutomaton
from eagle_runtime.target import Target
from eagle_runtime.tree import Tree
from fakes import FakeTarget, Table

SAMPLING: list[dict[str, Any]] = [
    {"temperature": temperature, "seed": seed} for temperature in (0.0, 0.7, 1.0) for seed in (1, 2)
]


def occurrences(text: list[int], length: int) -> list[int]:
    """The positions after earlier occurrences of the text's last `length` tokens."""
    return [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_the_automaton_finds_what_a_search_of_all_substrings_finds(alphabet: int) -> None:
    for seed in range(20):
        text = np.random.default_rng(seed).integers(0, alphabet, 60).tolist()
        index = SuffixAutomaton()
        for size in range(1, len(text) + 1):
            known = text[:size]
            if size % 3:  # in pieces of one or two tokens
                index.extend(known)
                place, length = index.match()
                longest = max((n for n in range(1, size) if occurrences(known, n)), default=0)
                assert length == longest
                if longest:
                    assert place in occurrences(known, longest)
                    if alphabet > 2:  # with few repetitions it is the latest one
                        assert place == occurrences(known, longest)[-1]
                    assert index.continuation(place, 2)[0] == known[place]
                else:
                    assert place == 0


def rows(*likeliest: tuple[int, int]) -> np.ndarray:
    """Logits of 6 tokens: 3 for the first of each pair, 2 for the second, else 0."""
    logits = np.zeros((len(likeliest), 6), np.float32)
    for row, (first, second) in enumerate(likeliest):
        logits[row, first], logits[row, second] = 3, 2
    return logits


def test_a_verified_tree_teaches_the_successors_of_all_its_nodes() -> None:
    """Of the text 0 1 the root is 1; 2 and 3 are drafted after it, 4 after 2; 3 is accepted, then 5 emitted."""
    habits = Habits(6, order=2)
    tree = Tree(np.array([1, 2, 3, 4]), np.array([-1, 0, 0, 1]), np.zeros(4, np.float32))
    step = Step(np.array([0, 2]), np.array([3, 5]), rows((3, 2), (4, 0), (5, 1), (0, 1)))
    habits.learn([0], tree, step)
    known = {context: habits.after(context) for context in [(0, 1), (1, 2), (1, 3), (2, 4), (3,), (7, 3), (5,), (3, 0)]}
    first = {context: None if row is None else row[0][:2].tolist() for context, row in known.items()}
    assert first == {
        (0, 1): [3, 2], (1, 2): [4, 0], (1, 3): [5, 1], (2, 4): [0, 1], (3,): [5, 1], (7, 3): [5, 1], (5,): None,
        (3, 0): None,
    }  # fmt: skip
    row = habits.after((1, 3))
    assert row is not None
    expected = np.array([3.0, 2.0]) - np.log(np.exp([3, 2, 0, 0, 0, 0]).sum())
    np.testing.assert_allclose(row[1][:2], expected, atol=1e-6)
    # Later rows take the place of earlier ones; of one tree those of accepted nodes come last.
    tree = Tree(np.array([1, 1, 1]), np.array([-1, 0, 1]), np.zeros(3, np.float32))
    habits.learn([1], tree, Step(np.array([0]), np.array([2]), rows((2, 3), (4, 5), (5, 4))))
    row = habits.after((1, 1))
    assert row is not None and row[0][0] == 2


def test_the_tree_follows_the_successors_of_each_path() -> None:
    habits = Habits(6, order=2)
    pairs: dict[tuple[int, ...], list[int]] = {(0, 1): [2, 3], (1, 2): [4, 5], (1, 3): [0, 1]}
    habits.put((context, np.array(ids), np.log(np.array([0.6, 0.3], np.float32))) for context, ids in pairs.items())
    head = RecyclingHead(habits, Target(FakeTarget(Table(6, 0, 1.0)), 40).cache)
    head._nothing = (head._nothing[0][:2], head._nothing[1][:2])
    first = head.catch_up([5, 0, 1])
    assert first.tokens.tolist() == [[2, 3]] and first.position == 3
    with Scratch(head) as scratch:
        second = scratch.feed(first.tokens[0], first.hidden[np.zeros(2, np.int64)], np.array([-1, -1]))
        assert second.tokens.tolist() == [[4, 5], [0, 1]] and second.position == 4
        third = scratch.feed(np.array([4, 1]), second.hidden, np.array([0, 1]))
    assert (third.log_probs[0] == NEVER).all() and third.tokens[1].tolist() == [2, 3]  # after 1 alone: (0, 1)


def test_old_contexts_make_room() -> None:
    habits = Habits(100, order=1, most=5)
    for token in range(20):
        habits.put([((token,), np.array([token]), np.zeros(1, np.float32))])
    assert len(habits) == 5 and habits.after((14,)) is None and habits.after((15,)) is not None


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_rows_that_are_broken_teach_nothing(broken: float) -> None:
    logits = rows((1, 2), (3, 4))
    logits[0, 5 if broken != -np.inf else slice(None)] = broken
    with np.errstate(all="ignore"):
        ids, log_probs = successors(logits, 3)
    assert np.isnan(log_probs[0]).all() and ids[1, :2].tolist() == [3, 4]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def alone(request: pytest.FixtureRequest, bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    """The golden target without a head."""
    with EagleModel.load(bundle_of("alone", request.param), threads=1, context=256, check_hashes=False) as model:
        yield model


def adversarial(kind: str, vocab: int) -> Habits:
    """Habits that are wrong: random ones, one token for all, or log-probabilities that are not numbers."""
    random, habits = np.random.default_rng(1), Habits(vocab)
    for token in range(vocab):
        ids = random.integers(0, vocab, 8) if kind == "random" else np.full(8, 3)
        log_probs = np.sort(-random.exponential(1, 8))[::-1].astype(np.float32)
        if kind == "outside":
            ids, log_probs = ids + vocab, np.where(np.arange(8) > 2, np.nan, log_probs).astype(np.float32)
        habits.put([((token,), ids, log_probs)])
    return habits


@pytest.mark.parametrize("kind", ["own", "random", "constant", "outside"])
@pytest.mark.filterwarnings("ignore:the draft head computes")
def test_the_output_is_that_of_decoding_without_drafts(
    kind: str, alone: EagleModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "own":
        wrong = adversarial(kind, alone.manifest.target.vocab_size)
        monkeypatch.setattr(alone.bundle.habits, "_rows", wrong._rows)
    drafted = 0
    # Drafts that cost next to nothing, so that trees are grown however slow the machine is.
    monkeypatch.setattr(HostCosts, "asks_for_plain", False)
    monkeypatch.setattr("eagle_runtime.drafting.recycling.LEVEL_S", 1e-9)
    monkeypatch.setattr(HostCosts, "learn", lambda self, passes: None)
    for number, sampling in enumerate(SAMPLING):
        settings = {"max_new_tokens": 32, "ignore_eos": True, **sampling}
        vanilla = alone.generate(prompts[number], method="vanilla", **settings)
        result = alone.generate(prompts[number], method="recycling", **settings)
        assert result.token_ids == vanilla.token_ids
        drafted += result.usage.target_passes < vanilla.usage.target_passes
    assert drafted > 0 or kind != "own"
    one = alone.generate([5], method="recycling", max_new_tokens=3, ignore_eos=True)
    assert one.token_ids == alone.generate([5], method="vanilla", max_new_tokens=3, ignore_eos=True).token_ids
    assert len(alone.bundle.habits) > 0


def test_conversations_and_twins_share_what_was_learned(alone: EagleModel, prompts: list[list[int]]) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 6}
    twin, chat, text = alone.twin(), alone.conversation(), list(prompts[0])
    assert twin.bundle.habits is alone.bundle.habits
    for _ in range(2):
        vanilla = alone.generate(text, method="vanilla", **settings)
        turn = chat.complete(text, method="recycling", **settings)
        assert tuple(token for piece in turn for token in piece.token_ids) == vanilla.token_ids
        assert twin.generate(text, method="recycling", **settings).token_ids == vanilla.token_ids
        text += [*vanilla.token_ids, 7, 8]
    chat.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_hold(
    temperature: float, bundle_of: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    bundle = shutil.copytree(bundle_of("alone"), tmp_path / "bundle")
    put_tokenizer(bundle)
    constraint = Constraint.json_schema({"type": "array", "items": {"enum": ["ab", "cd"]}, "maxItems": 4})
    with EagleModel.load(bundle, threads=1, context=256) as model:
        settings: dict[str, Any] = {"constraint": constraint, "temperature": temperature, "seed": 3}
        vanilla = model.generate(prompts[0], method="vanilla", **settings)
        for _ in range(2):
            assert model.generate(prompts[0], method="recycling", **settings).token_ids == vanilla.token_ids
