"""Drafts from the model's own habits and from a suffix automaton: the rules, and that they change no token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_tokenizer
from eagle_runtime import Constraint, EagleModel
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.core.target import PROMPT_ROWS, Target
from eagle_runtime.drafting.habits import FADE, SHORTER, SUCCESSORS, Habits, successors
from eagle_runtime.drafting.head import NEVER, Scratch
from eagle_runtime.drafting.matches import SuffixAutomaton
from eagle_runtime.drafting.recycling import HALF, HostCosts, RecyclingDrafter, RecyclingHead
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.sampling.candidates import Candidates
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from fakes import FakeTarget, Table
from insides import bundle_in

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


LIKELY = np.exp([3.0, 2.0, 0.0, 0.0, 0.0, 0.0])
FIRST, SECOND = (LIKELY[:2] / LIKELY.sum()).tolist()  # probabilities of the tokens that `rows` prefers


def test_what_the_target_said_is_kept_after_the_last_tokens() -> None:
    """Of the text 0 1 3, what came after 1 and after 3 is learned; what comes after others is not known."""
    habits = Habits(6, order=2)
    habits.learn([0, 1, 3], rows((3, 2), (5, 1)))
    for context in [(0, 1), (1,), (7, 1)]:
        assert [token for token in habits.after(context) if habits.after(context)[token] > 0.05] == [2, 3]
    assert habits.after((0, 1))[3] > FIRST - 1e-6 and habits.after((3,))[5] == pytest.approx(FIRST)
    assert habits.after((5,)) == {} == habits.after((0,)) == habits.after(())


def test_several_rows_of_a_context_count_with_their_mean_and_longer_contexts_count_more() -> None:
    habits = Habits(6, order=2)
    habits.put([((0, 1), {2: 1.0}), ((3, 1), {4: 1.0}), ((3, 1), {4: 0.5, 5: 0.5})])
    of_one = habits.after((1,))
    faded = [FADE**2, FADE, 1.0]
    assert of_one == pytest.approx({2: faded[0] / sum(faded), 4: (faded[1] + 0.5) / sum(faded), 5: 0.5 / sum(faded)})
    whole = FADE + 1 + SHORTER
    expected = {token: SHORTER * value / whole for token, value in of_one.items()}
    expected[4] += (FADE + 0.5) / whole
    expected[5] += 0.5 / whole
    assert habits.after((3, 1)) == pytest.approx(expected) and sum(expected.values()) == pytest.approx(1)
    for token in range(100):
        habits.put([((7, 1), {token: 1.0})])
    assert len(habits.after((7,))) == 0 and len(habits._seen[(1,)][0]) == SUCCESSORS


def test_the_tree_follows_the_successors_of_each_path() -> None:
    habits = Habits(6, order=2)
    habits.put([((0, 1), {2: 0.6, 3: 0.3}), ((1, 2), {4: 0.6, 5: 0.3}), ((1, 3), {0: 0.6, 1: 0.3})])
    head = RecyclingHead(habits)
    first = head.catch_up([5, 0, 1])
    assert first.tokens[0, :2].tolist() == [2, 3] and first.position == 3
    assert np.exp(first.log_probs[0, :2]) == pytest.approx([0.6, 0.3]) and (first.log_probs[0, 2:] == NEVER).all()
    with Scratch(head) as scratch:
        second = scratch.feed(first.tokens[0, :2], first.hidden[np.zeros(2, np.int64)], np.array([-1, -1]))
        assert second.tokens[:, :2].tolist() == [[4, 5], [0, 1]] and second.position == 4
        third = scratch.feed(np.array([4, 1]), second.hidden, np.array([0, 1]))
    assert (third.log_probs[0] == NEVER).all() and third.tokens[1, :2].tolist() == [2, 3]  # after 1 alone: (0, 1)


def test_a_match_has_a_share_that_grows_with_its_length() -> None:
    """The text is 1 2 3 4 1 2, and what matches goes on with 3, though the habits say 5; where the path leaves the
    match, the habits alone count."""
    habits = Habits(6, order=1)
    habits.put([((token,), {5: 0.8}) for token in range(6)])
    head = RecyclingHead(habits)
    first = head.catch_up([1, 2, 3, 4, 1, 2])
    chances = dict(zip(first.tokens[0].tolist(), np.exp(first.log_probs[0]).tolist(), strict=True))
    share = 2 / (2 + HALF)
    assert chances[3] == pytest.approx(share) and chances[5] == pytest.approx(0.8 * (1 - share))
    with Scratch(head) as scratch:
        second = scratch.feed(np.array([3, 5]), first.hidden[np.zeros(2, np.int64)], np.array([-1, -1]))
    on = dict(zip(second.tokens[0].tolist(), np.exp(second.log_probs[0]).tolist(), strict=True))
    assert on[4] == pytest.approx(3 / (3 + HALF)) and on[5] == pytest.approx(0.8 * (1 - 3 / (3 + HALF)))
    assert second.tokens[1, 0] == 5 and np.exp(second.log_probs[1, 0]) == pytest.approx(0.8)


def test_old_contexts_make_room() -> None:
    habits = Habits(100, order=1, most=5)
    for token in range(20):
        habits.put([((token,), {token: 1.0}), ((7,), {7: 1.0})])
    assert len(habits) == 5 and habits.after((15,)) == {} and habits.after((16,)) and habits.after((7,))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_rows_that_are_broken_teach_nothing(broken: float) -> None:
    logits = rows((1, 2), (3, 4))
    logits[0, 5 if broken != -np.inf else slice(None)] = broken
    with np.errstate(all="ignore"):
        first, second = successors(logits)
    assert first == {} and list(second)[:1] == [0] and max(second, key=lambda token: second[token]) == 3
    habits = Habits(6)
    habits.put([((1,), first)])
    assert len(habits) == 0


def test_the_likeliest_of_a_flat_row_are_kept() -> None:
    """Also where several are as likely as the last that is kept: then those with the lowest ids."""
    logits = np.random.default_rng(2).normal(0, 0.3, (3, 5000)).astype(np.float32)
    logits[1] = np.round(logits[1], 1)
    logits[2] = 0
    for row, found in zip(logits, successors(logits), strict=True):
        assert list(found) == np.argsort(-row, kind="stable")[:SUCCESSORS].tolist()
        weights = np.exp(row - row.max())
        np.testing.assert_allclose(list(found.values()), weights[list(found)] / weights.sum(), rtol=1e-5)


def test_rows_on_a_card_teach_the_same() -> None:
    logits = rows((1, 2), (3, 4))
    highest = [np.argsort(-row, kind="stable")[:4] for row in logits]
    none = np.zeros(0, np.float32)
    on_card = [
        OnCard(Candidates(ids, row[ids], float(np.log(np.exp(row).sum())), none.astype(np.int64), none))
        for row, ids in zip(logits, highest, strict=True)
    ]
    for known, whole in zip(successors(on_card), successors(logits), strict=True):
        assert known == pytest.approx({token: whole[token] for token in known}, abs=1e-6) and len(known) == 4


def test_the_prompt_teaches_what_the_target_says_in_it() -> None:
    """A prompt of two chunks: the last rows of each are learned, before the first draft."""
    language = Table(11, 3, 2.0)
    prompt = np.random.default_rng(5).integers(0, 11, 2 * PROMPT_ROWS + 30).tolist()
    target = Target(FakeTarget(language), 400, chunk=PROMPT_ROWS + 20)
    habits = Habits(11, order=2)
    drafter = RecyclingDrafter(NoDraft(), habits)
    sampler = Sampler(SamplingParams(), prompt, 11)
    cycles = generate(DecodingState(target, None), drafter, sampler, prompt)
    first = next(cycles).step.tokens.tolist()
    read = [*range(20, PROMPT_ROWS + 20), *range(len(prompt) - PROMPT_ROWS, len(prompt))]
    rows = np.concatenate(list(Target(FakeTarget(language), 400).score(prompt)))
    expected = Habits(11, order=2)
    for row in read:
        expected.learn(prompt[max(0, row - 1) : row + 1], rows[row : row + 1])
    assert habits._seen.keys() == expected._seen.keys()
    for context in [(token,) for token in range(11)] + [tuple(prompt[-2:]), tuple(prompt[21:23])]:
        assert habits.after(context) == pytest.approx(expected.after(context), abs=1e-6)
    assert first == [int(rows[-1].argmax())]
    before = len(habits)
    assert next(cycles).tree.tokens.tolist() == first and len(habits) >= before
    assert target.read([1, 2, 3], 2)[0].shape == (2, 11) and target.read([4])[0].shape == (1, 11)


@dataclass
class OnCard:
    """A row of logits that is not on the host."""

    candidates: Candidates

    def whole(self) -> np.ndarray:
        raise AssertionError("no row is copied from the GPU")


@pytest.fixture(scope="module", params=["fp32", "int8"])
def alone(request: pytest.FixtureRequest, bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    """The golden target without a head."""
    with EagleModel.load(bundle_of("alone", request.param), threads=1, context=256, check_hashes=False) as model:
        yield model


def adversarial(kind: str, vocab: int) -> Habits:
    """Habits that are wrong: random ones, one token for all, or ids outside the vocabulary and no probabilities."""
    random, habits = np.random.default_rng(1), Habits(vocab)
    for token in range(vocab):
        row = dict(zip(random.integers(0, vocab, 8).tolist(), random.dirichlet(np.ones(8)).tolist(), strict=True))
        if kind == "constant":
            row = {3: 1.0}
        if kind == "outside":
            row = {vocab + 1: 0.5, -7: 0.3, 2**62: 7.0, 3: float("nan"), 4: float("inf"), 5: -1.0, 6: float("-inf")}
        habits.put([((token,), row)])
    return habits


@pytest.mark.parametrize("kind", ["own", "random", "constant", "outside"])
@pytest.mark.filterwarnings("ignore:the draft head computes")
def test_the_output_is_that_of_decoding_without_drafts(
    kind: str, alone: EagleModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind != "own":
        wrong = adversarial(kind, alone.manifest.target.vocab_size)
        monkeypatch.setattr(bundle_in(alone).habits, "_seen", wrong._seen)
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
    assert len(bundle_in(alone).habits) > 0


def test_conversations_and_twins_share_what_was_learned(alone: EagleModel, prompts: list[list[int]]) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 6}
    twin, chat, text = alone.twin(), alone.conversation(), list(prompts[0])
    assert bundle_in(twin).habits is bundle_in(alone).habits
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
