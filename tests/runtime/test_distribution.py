"""Losslessness, measured: the law of what the speculative loop emits is the target's own.

The target and the drafters are tables (fakes.py), so the exact law of the first tokens is a product over all
V^n sequences, computed here a second time, slowly and without the runtime's sampling code. A chi-square test
compares it with samples of the real loop; then every known way of verifying wrongly is planted in place of
`accept` and must fail the same test at the same number of samples.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from eagle_runtime.base.tree import Int, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import Cycle, generate
from eagle_runtime.core.target import Features, Target, causal
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, StaticTree, TreeShape, chain
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from fakes import Blend, FakeHead, FakeTarget, Language, Table, history_of

VOCAB = 5
PROMPT = (0, 1)
CAPACITY = 32
SCRATCH = 16
FULL = CAPACITY + 1 - len(PROMPT)  # tokens emitted when the cache is full: the last one has no row
ALPHA = 1e-4
SAMPLES = 2000  # per setting; enough to catch every mutant below

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
NOTHING_NEW = np.zeros((0, 2), np.float32)  # features that Remembered does not look at

TARGET = Table(VOCAB, seed=0, spread=1.5)
KNOWING = Blend(1.0, TARGET, Table(VOCAB, seed=1, spread=0.1))  # drafts what the target likes
MIDDLING = Blend(0.4, TARGET, Table(VOCAB, seed=2, spread=1.0))
STRANGER = Table(VOCAB, seed=4, spread=1.5)
CONTRARY = Blend(-1.0, TARGET, Table(VOCAB, seed=3, spread=0.1))  # drafts what the target avoids

SHAPES: dict[str, tuple[TreeShape, Language]] = {
    "chain": (chain(2), KNOWING),
    "lopsided": (StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0))), MIDDLING),
    "covering": (DynamicTree(num_nodes=5, depth=0, top_k=4), KNOWING),
    "missing": (DynamicTree(num_nodes=5, depth=1, top_k=2), CONTRARY),
}

WARPS = {"plain": {}, "top_p": {"top_p": 0.9}, "top_k": {"top_k": 3}, "min_p": {"min_p": 0.1}}
SETTINGS: dict[str, SamplingParams] = {
    f"{name} at {temperature}": SamplingParams(temperature=temperature, **warp)  # type: ignore[arg-type]
    for temperature in (0.6, 1.0, 1.4)
    for name, warp in WARPS.items()
} | {
    "penalties at 0.6": SamplingParams(temperature=0.6, repetition_penalty=1.8, frequency_penalty=0.8),
    "repetition, top_p at 1.0": SamplingParams(temperature=1.0, repetition_penalty=1.8, top_p=0.9),
    "everything at 1.4": SamplingParams(
        1.4, top_k=4, top_p=0.9, min_p=0.05, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
}


# The exact law, slowly.


def next_law(logits: Sequence[float], tokens: Sequence[int], params: SamplingParams) -> list[float]:
    """The law [V] of the token after `tokens`, filter by filter on a dict of probabilities."""
    output = tokens[len(PROMPT) :]
    scores = {}
    for token, score in enumerate(logits):
        score = float(score)
        if token in tokens:
            score = score / params.repetition_penalty if score > 0 else score * params.repetition_penalty
        score -= params.presence_penalty * (token in output) + params.frequency_penalty * list(output).count(token)
        scores[token] = score / params.temperature
    law = normalised({token: math.exp(score) for token, score in scores.items()})
    if params.top_k:
        best = sorted(law, key=law.__getitem__)[-params.top_k :]
        law = normalised({token: law[token] for token in best})
    if params.top_p < 1:
        law = normalised({token: p for token, p in law.items() if mass_above(law, p) < params.top_p})
    if params.min_p:
        law = normalised({token: p for token, p in law.items() if p >= params.min_p * max(law.values())})
    return [law.get(token, 0.0) for token in range(VOCAB)]


def normalised(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def mass_above(law: dict[int, float], p: float) -> float:
    return sum(other for other in law.values() if other > p)


def law_of_first(count: int, params: SamplingParams) -> Law:
    """The probability of every sequence of `count` tokens after the prompt."""
    laws: Law = {(): 1.0}
    for _ in range(count):
        longer = {}
        for tokens, p in laws.items():
            prefix = [*PROMPT, *tokens]
            row = next_law(TARGET.logits(history_of(prefix)).tolist(), prefix, params)
            longer.update({(*tokens, token): p * q for token, q in enumerate(row)})
        laws = longer
    return laws


# The test.


def outside(samples: Sequence[Tokens], law: Law) -> int:
    """Samples that the law forbids."""
    return sum(law[sample] == 0 for sample in samples)


def p_value(samples: Sequence[Tokens], law: Law) -> float:
    """Chi-square of allowed samples against their law; cells with an expectation below 5 are merged."""
    seen = Counter(samples)
    observed, expected = [0], [0.0]  # the first cell collects the rare sequences
    for tokens in sorted(law, key=law.__getitem__):
        if law[tokens] > 0:
            if expected[-1] >= 5:
                observed.append(0)
                expected.append(0.0)
            observed[-1] += seen[tokens]
            expected[-1] += law[tokens] * len(samples)
    assert len(observed) > 8 and sum(observed) + outside(samples, law) == len(samples)
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [scale * cell for cell in expected]).pvalue)


def verdict(samples: Sequence[Tokens], params: SamplingParams) -> tuple[int, float]:
    """(samples outside the support, the smaller p-value of tokens 1-3 and tokens 2-4). Tokens 2-4 reach into the
    second cycle, whose target rows went through `keep`."""
    law = law_of_first(4, params)
    p_values = []
    for window in (slice(0, 3), slice(1, 4)):
        part: Law = dict.fromkeys((tokens[window] for tokens in law), 0.0)
        for tokens, p in law.items():
            part[tokens[window]] += p
        p_values.append(p_value([sample[window] for sample in samples], part))
    return outside(samples, law), min(p_values)


def is_caught(samples: Sequence[Tokens], params: SamplingParams) -> bool:
    forbidden, p = verdict(samples, params)
    return forbidden > 0 or p < ALPHA


# The loop under test.


def new_target() -> Target:
    return Target(FakeTarget(TARGET), CAPACITY)


def new_head(draft: Language) -> Head:
    return Head(FakeHead(draft, top_k=4), CAPACITY, SCRATCH)


class Remembered(Drafter):
    """An EagleDrafter that grows each tree once, from an empty cache: a tree depends on nothing but the tokens.

    test_trees_depend_on_the_tokens_alone checks that the real one, which keeps its rows, drafts the same."""

    def __init__(self, shape: TreeShape, draft: Language) -> None:
        self._shape = shape
        self._head = new_head(draft)
        self._trees: dict[Tokens, Tree] = {}

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        key = tuple(tokens)
        if key not in self._trees:
            whole = history_of(tokens[:-1]).T
            self._head.truncate(0)
            self._head.note(whole)
            self._trees[key] = EagleDrafter(self._head, self._shape).grow(tokens, max_nodes)
        return self._trees[key]

    def learn(self, step: Step) -> None:
        """Its trees depend on nothing but the tokens."""


def decode(
    target: Target, drafter: Drafter, params: SamplingParams, seed: int, least: int = 4, head: Head | None = None
) -> tuple[Tokens, list[Cycle]]:
    """At least two cycles and `least` tokens, or all that the cache has room for. head: the drafter's."""
    tokens, cycles = [], []
    sampler = Sampler(replace(params, seed=seed), PROMPT, VOCAB)
    for number, cycle in enumerate(generate(DecodingState(target, head), drafter, sampler, PROMPT)):
        tokens += cycle.step.tokens.tolist()
        if number > 0:
            cycles.append(cycle)
        if len(tokens) >= least and len(cycles) >= 2:
            break
    return tuple(tokens), cycles


@pytest.fixture(scope="module")
def drafters() -> dict[str, Remembered]:
    return {name: Remembered(shape, draft) for name, (shape, draft) in SHAPES.items()}


def sample_loop(drafters: dict[str, Remembered], params: SamplingParams, count: int) -> list[Tokens]:
    """Samples of the real loop, the drafters taking turns."""
    target = new_target()
    turns = itertools.cycle(drafters.values())
    return [decode(target, next(turns), params, seed)[0][:4] for seed in range(count)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_law_is_the_targets(setting: str, drafters: dict[str, Remembered]) -> None:
    params = SETTINGS[setting]
    forbidden, p = verdict(sample_loop(drafters, params, SAMPLES), params)
    assert forbidden == 0
    assert p > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_law_is_the_targets_at_length(setting: str, drafters: dict[str, Remembered]) -> None:
    params = SETTINGS[setting]
    forbidden, p = verdict(sample_loop(drafters, params, 30 * SAMPLES), params)
    assert forbidden == 0
    assert p > ALPHA


def test_children_cover_much_and_little() -> None:
    """The trees named so hold more than 95 % and less than 20 % of the target's mass at their root."""
    contexts = [[*PROMPT, *tokens] for tokens in itertools.product(range(VOCAB), repeat=2)]
    for name, bounds in {"covering": (0.95, 1.0), "missing": (0.0, 0.2)}.items():
        drafter = Remembered(*SHAPES[name])
        covered = []
        for tokens in contexts:
            tree = drafter.grow(tokens, CAPACITY)
            law = next_law(TARGET.logits(history_of(tokens)).tolist(), tokens, SamplingParams(temperature=1.0))
            covered.append(sum(law[token] for token in tree.tokens[tree.parents == 0]))
        assert bounds[0] < np.mean(covered) < bounds[1]


# Token for token.


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("setting", ["plain at 0.6", "top_p at 1.0", "everything at 1.4"])
def test_output_equals_plain_decoding(name: str, setting: str) -> None:
    """With real drafters, whose rows live on from cycle to cycle, until the cache is full and trees shrink."""
    params = SETTINGS[setting]
    shape, draft = SHAPES[name]
    target, head = new_target(), new_head(draft)
    accepted = 0
    for seed in range(15):
        plain, _ = decode(target, NoDraft(), params, seed, least=CAPACITY)
        tokens, cycles = decode(target, EagleDrafter(head, shape), params, seed, CAPACITY, head)
        assert tokens == plain
        assert len(tokens) == FULL
        accepted += sum(cycle.step.num_accepted for cycle in cycles)
    assert accepted > 0


@pytest.mark.parametrize("name", SHAPES)
def test_trees_depend_on_the_tokens_alone(name: str, drafters: dict[str, Remembered]) -> None:
    """A drafter that has been through several cycles drafts what a new one does: nothing stale is in its rows."""
    shape, draft = SHAPES[name]
    target, head = new_target(), new_head(draft)
    for seed in range(50):
        emitted, cycles = decode(target, EagleDrafter(head, shape), SamplingParams(temperature=1.0), seed, head=head)
        tokens = [*PROMPT, emitted[0]]
        for cycle in cycles:
            fresh = drafters[name].grow(tokens, CAPACITY - len(tokens) + 1)
            np.testing.assert_array_equal(cycle.tree.tokens, fresh.tokens)
            np.testing.assert_array_equal(cycle.tree.parents, fresh.parents)
            np.testing.assert_array_equal(cycle.tree.scores, fresh.scores)
            tokens += cycle.step.tokens.tolist()


class Noting(Head):
    """A head that keeps what it is told."""

    def __init__(self, session: FakeHead, capacity: int, scratch: int) -> None:
        super().__init__(session, capacity, scratch)
        self.noted: list[Features] = []

    def note(self, features: Features) -> None:
        self.noted.append(np.array(features))
        super().note(features)


class Inspecting(Drafter):
    """A drafter that checks what it is asked and what its head was told, and passes it on."""

    def __init__(self, drafter: Drafter, head: Noting) -> None:
        self._drafter = drafter
        self._head = head

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        whole = history_of(tokens[:-1]).T
        np.testing.assert_array_equal(np.concatenate(self._head.noted), whole)
        assert max_nodes == CAPACITY - len(whole) >= 2
        return self._drafter.grow(tokens, max_nodes)

    def learn(self, step: Step) -> None:
        self._drafter.learn(step)


@pytest.mark.parametrize("name", SHAPES)
def test_drafters_are_asked_as_promised(name: str) -> None:
    """Features come once for every verified position, and never less room than a root and a child take."""
    shape, draft = SHAPES[name]
    for seed in range(20):
        head = Noting(FakeHead(draft, top_k=4), CAPACITY, SCRATCH)
        drafter = Inspecting(EagleDrafter(head, shape), head)
        tokens, _ = decode(new_target(), drafter, SamplingParams(temperature=1.0), seed, CAPACITY, head)
        assert len(tokens) == FULL


def test_a_head_that_knows_the_target_is_always_right() -> None:
    """At temperature 0 every token of a chain is accepted, which takes the right rows, positions and features."""
    head = new_head(TARGET)
    tokens, cycles = decode(new_target(), EagleDrafter(head, chain(3)), SamplingParams(), 0, CAPACITY, head)
    assert len(tokens) == FULL
    assert len(cycles) == math.ceil((FULL - 1) / 4)
    assert all(cycle.step.num_accepted == cycle.tree.num_nodes - 1 for cycle in cycles)


def forget_to_gather(cache: KVCache, path: Int) -> None:
    cache.advance(len(path))


def keep_one_row_less(cache: KVCache, path: Int) -> None:
    cache.advance(len(path) - 1)


PLANTED_IN_THE_LOOP: dict[str, tuple[str, object]] = {
    "siblings see each other": ("eagle_runtime.core.target.ancestor_mask", lambda parents: causal(len(parents))),
    "positions count nodes": ("eagle_runtime.core.target.node_depths", lambda parents: np.arange(len(parents))),
    "rows are not gathered": ("eagle_runtime.core.cache.KVCache.keep", forget_to_gather),
    "the last row is lost": ("eagle_runtime.core.cache.KVCache.keep", keep_one_row_less),
}


@pytest.mark.parametrize("bug", PLANTED_IN_THE_LOOP)
def test_fakes_notice_a_wrong_pass(bug: str, drafters: dict[str, Remembered], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong mask, position or row changes what the fake target answers, and so the law."""
    monkeypatch.setattr(*PLANTED_IN_THE_LOOP[bug])
    params = SETTINGS["plain at 0.6"]
    assert is_caught(sample_loop({"lopsided": drafters["lopsided"]}, params, SAMPLES // 2), params)


# Verification by rejection: two right ways, and every known way to get them wrong.

Row = npt.NDArray[np.float64]
Uniform = Callable[[], float]


class Rejection:
    """Multi-round rejection sampling over children that are a function of the tokens alone: the proposal of each
    is a point mass, so it is accepted with p(x) and struck out of p if not. Lossless."""

    def __init__(self, params: SamplingParams, draft: Language, rng: np.random.Generator) -> None:
        self.params = params
        self.draft = draft
        self.rng = rng
        self.tokens: list[int] = []  # up to the root of the last tree

    def restart(self) -> None:
        self.tokens = list(PROMPT)

    def __call__(self, tree: Tree, logits: npt.NDArray[np.float32], _: Sampler) -> Step:
        self.tokens.append(int(tree.tokens[0]))
        path: list[int] = [0]
        emitted: list[int] = []
        while (child := self.step(tree, path[-1], logits[path[-1]], emitted)) is not None:
            path.append(child)
        self.tokens += emitted[:-1]  # the last one roots the next tree
        return Step(np.array(path, np.int64), np.array(emitted, np.int64))

    def step(self, tree: Tree, node: int, row: npt.NDArray[np.float32], emitted: list[int]) -> int | None:
        """Emit one token at a node; returns the child that it is, or None."""
        uniform = self.uniforms()
        children = np.flatnonzero(tree.parents == node).tolist()
        p = self.law(row, emitted) if children else self.bonus_law(row, emitted)
        for child, q in self.proposals(tree, children, self.draft_law(emitted)):
            token = int(tree.tokens[child])
            if uniform() * q[token] < p[token]:
                emitted.append(token)
                return child
            p = self.residual(p, q, row)
        emitted.append(int(np.searchsorted(np.cumsum(p), uniform() * p.sum(), side="right")))
        return None

    def uniforms(self) -> Uniform:
        return self.rng.random

    def law(self, row: npt.NDArray[np.float32], emitted: list[int]) -> Row:
        return np.array(next_law(row.tolist(), self.tokens + emitted, self.params))

    def bonus_law(self, row: npt.NDArray[np.float32], emitted: list[int]) -> Row:
        return self.law(row, emitted)

    def draft_law(self, emitted: list[int]) -> Row:
        return softmax(self.draft.logits(history_of(self.tokens + emitted)))

    def proposals(self, tree: Tree, children: list[int], q: Row) -> Iterator[tuple[int, Row]]:
        """Children in the order of testing, each with the law it was drawn from."""
        for child in children:
            yield child, np.eye(VOCAB)[tree.tokens[child]]

    def residual(self, p: Row, q: Row, row: npt.NDArray[np.float32]) -> Row:
        """p after a rejection; of all zeros (p == q up to rounding) nothing can be drawn, so p stays."""
        rest = np.maximum(p - q, 0)
        return rest / rest.sum() if rest.sum() > 1e-12 else p


def softmax(logits: npt.NDArray[np.float32]) -> Row:
    weights: Row = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


class WithoutReplacement(Rejection):
    """The same over children drawn from q without replacement, as SampledDrafter draws them."""

    def proposals(self, tree: Tree, children: list[int], q: Row) -> Iterator[tuple[int, Row]]:
        for child in children:
            yield child, q
            q = q.copy()
            q[tree.tokens[child]] = 0
            q /= q.sum()


class RunningSum(Rejection):
    """One uniform per node against the running sum of the children's p: lossless if siblings differ."""

    def step(self, tree: Tree, node: int, row: npt.NDArray[np.float32], emitted: list[int]) -> int | None:
        p = self.law(row, emitted)
        point, total = self.rng.random(), 0.0
        rest = p.copy()
        for child in self.tested(tree, np.flatnonzero(tree.parents == node).tolist()):
            token = int(tree.tokens[child])
            total += p[token]
            if point < total:
                emitted.append(token)
                return child
            rest[token] = 0
        rest = rest if rest.sum() > 1e-12 else p
        emitted.append(int(self.rng.choice(VOCAB, p=rest / rest.sum())))
        return None

    def tested(self, tree: Tree, children: list[int]) -> list[int]:
        first = {int(tree.tokens[child]): child for child in reversed(children)}
        return sorted(first.values())


class BonusWithoutWarp(Rejection):
    def bonus_law(self, row: npt.NDArray[np.float32], emitted: list[int]) -> Row:
        return softmax(row)


class DraftProbabilityOfPointMass(Rejection):
    """min(1, p/q) with the head's q, though the children were not drawn from it."""

    def proposals(self, tree: Tree, children: list[int], q: Row) -> Iterator[tuple[int, Row]]:
        for child in children:
            yield child, q


class ResidualNotZeroed(Rejection):
    def residual(self, p: Row, q: Row, row: npt.NDArray[np.float32]) -> Row:
        return p


class SameUniformTwice(Rejection):
    def uniforms(self) -> Uniform:
        value = self.rng.random()
        return lambda: value


class ResidualWithoutWarp(Rejection):
    def residual(self, p: Row, q: Row, row: npt.NDArray[np.float32]) -> Row:
        return super().residual(softmax(row), q, row)


class HistoryOfTheRoot(Rejection):
    def law(self, row: npt.NDArray[np.float32], emitted: list[int]) -> Row:
        return super().law(row, [])


class NotRenormalised(WithoutReplacement):
    def proposals(self, tree: Tree, children: list[int], q: Row) -> Iterator[tuple[int, Row]]:
        for child in children:
            yield child, q
            q = q.copy()
            q[tree.tokens[child]] = 0


class DuplicateTestedTwice(RunningSum):
    def tested(self, tree: Tree, children: list[int]) -> list[int]:
        return children


class SampledDrafter(Drafter):
    """Three children of the root and one of each, drawn from the draft law without replacement."""

    def __init__(self, draft: Language, rng: np.random.Generator) -> None:
        self._draft = draft
        self._rng = rng

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        first = self._draw(tokens, 3)
        second = [self._draw([*tokens, token], 1)[0] for token in first]
        return bare_tree([tokens[-1], *first, *second], [-1, 0, 0, 0, 1, 2, 3])

    def learn(self, step: Step) -> None:
        """Its trees depend on nothing but the tokens."""

    def _draw(self, tokens: Sequence[int], count: int) -> list[int]:
        # The order of arrival of exponential clocks with rates q is a draw from q without replacement.
        arrival_times = self._rng.exponential(size=VOCAB) / softmax(self._draft.logits(history_of(tokens)))
        drawn: list[int] = np.argsort(arrival_times)[:count].tolist()
        return drawn


class DoublingDrafter(Drafter):
    """Another drafter's tree with a twin of every child of the root."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        tree = self._drafter.grow(tokens, max_nodes)
        twins = tree.tokens[tree.parents == 0].tolist()
        return bare_tree(tree.tokens.tolist() + twins, tree.parents.tolist() + [0] * len(twins))

    def learn(self, step: Step) -> None:
        self._drafter.learn(step)


def bare_tree(tokens: list[int], parents: list[int]) -> Tree:
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64), np.zeros(len(tokens), np.float32))


def sample_verifier(
    kind: type[Rejection], params: SamplingParams, drafters: dict[str, Remembered], monkeypatch: pytest.MonkeyPatch
) -> list[Tokens]:
    """Samples of the loop with another verifier, on the drafts that it is made for."""
    rng = np.random.default_rng(0)
    turns: list[tuple[Drafter, Language]] = [(drafters[name], draft) for name, (_, draft) in SHAPES.items()]
    if issubclass(kind, WithoutReplacement):
        turns = [(SampledDrafter(STRANGER, rng), STRANGER)]
    if issubclass(kind, RunningSum):
        turns = [(DoublingDrafter(drafter), draft) for drafter, draft in turns]
    target = new_target()
    samples = []
    for seed, (drafter, draft) in zip(range(SAMPLES), itertools.cycle(turns), strict=False):
        verifier = kind(params, draft, rng)
        verifier.restart()
        monkeypatch.setattr("eagle_runtime.core.generate.accept", verifier)
        samples.append(decode(target, drafter, params, seed)[0][:4])
    return samples


@pytest.mark.parametrize("kind", [Rejection, WithoutReplacement, RunningSum])
@pytest.mark.parametrize("setting", ["top_k at 0.6", "penalties at 0.6"])
def test_right_rejection_passes(
    kind: type[Rejection], setting: str, drafters: dict[str, Remembered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what fails below fails for its planted mistake, not for being another algorithm."""
    forbidden, p = verdict(sample_verifier(kind, SETTINGS[setting], drafters, monkeypatch), SETTINGS[setting])
    assert forbidden == 0
    assert p > ALPHA


@pytest.mark.parametrize(
    ("mutant", "setting"),
    [
        (BonusWithoutWarp, "plain at 0.6"),
        (BonusWithoutWarp, "top_k at 1.0"),
        (DraftProbabilityOfPointMass, "plain at 1.0"),
        (ResidualNotZeroed, "plain at 1.0"),
        (NotRenormalised, "plain at 1.0"),
        (SameUniformTwice, "plain at 1.0"),
        (DuplicateTestedTwice, "plain at 1.0"),
        (ResidualWithoutWarp, "plain at 0.6"),
        (ResidualWithoutWarp, "min_p at 1.0"),
        (HistoryOfTheRoot, "penalties at 0.6"),
    ],
)
def test_wrong_rejection_is_caught(
    mutant: type[Rejection], setting: str, drafters: dict[str, Remembered], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_caught(sample_verifier(mutant, SETTINGS[setting], drafters, monkeypatch), SETTINGS[setting])
