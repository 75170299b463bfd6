"""Trees: ranking, reranking, fixed choices, and growth against slow growers that feed every path on its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import (
    EAGLE1_CHOICES,
    Tree,
    additive_mask,
    best_first,
    choice_parents,
    hiding,
    node_depths,
    rerank,
    root_only,
)
from eagle_runtime.core.head import WINDOW, Proposal
from eagle_runtime.core.target import PREFILL_CHUNK, Target
from eagle_runtime.drafting.head import Head, Scratch
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, StaticTree, TreeShape, chain
from eagle_runtime.drafting.vanilla import NoDraft
from fakes import FakeHead, FakeTarget, Language, Table, history_of, observed

ROOT = 77
VOCAB = 6


def check_tree(tree: Tree) -> None:
    """What every draft must be: connected, parents before children, level by level, no two siblings alike."""
    parents = tree.parents.tolist()
    assert len(parents) == len(tree.tokens) == len(tree.scores) == tree.num_nodes
    assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node > 0)
    assert np.all(np.diff(node_depths(tree.parents)) >= 0)
    family = list(zip(parents, tree.tokens.tolist(), strict=True))
    assert len(set(family)) == len(family)
    assert np.all(tree.scores[1:] <= tree.scores[tree.parents[1:]])
    assert tree.tokens.dtype == tree.parents.dtype == np.dtype(np.int64) and tree.scores.dtype == np.dtype(np.float32)


# Ranking.


@given(st.lists(st.sampled_from([0.0, -0.5, -1.0, -math.inf, math.nan]), max_size=30), st.integers(0, 40))
@settings(deadline=None)
def test_best_first_ranks_by_score_then_index(scores: list[float], count: int) -> None:
    numbers = [index for index, score in enumerate(scores) if not math.isnan(score)]
    ranked = sorted(numbers, key=lambda index: (-scores[index], index))
    ranked += [index for index, score in enumerate(scores) if math.isnan(score)]
    assert best_first(np.array(scores, np.float32), count).tolist() == ranked[:count]


def test_best_first_gives_ties_to_the_lower_index() -> None:
    scores = np.array([-1, 0, -1, 0, 0], np.float32)
    assert best_first(scores, 4).tolist() == [1, 3, 4, 0]


@dataclass(frozen=True)
class Pool:
    """A pool as a growing tree leaves it: parents [M] point back, a score is the parent's plus a log-probability."""

    parents: list[int]
    log_probs: list[float]

    @property
    def scores(self) -> list[float]:
        scores: list[float] = []
        for parent, log_prob in zip(self.parents, self.log_probs, strict=True):
            above = np.float32(scores[parent] if parent >= 0 else 0)
            scores.append(float(above + np.float32(log_prob)))
        return scores


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Log-probabilities from so few values that sums tie all the time; 0.0 ties a child with its parent."""
    size = draw(st.integers(1, 40))
    parents = sorted(draw(st.integers(-1, entry - 1)) for entry in range(size))  # sorting keeps parent < entry
    values = draw(st.sampled_from([[0.0], [0.0, -1.0], [0.0, -0.5, -1.0], [-0.1, -0.7, 0.0, -math.inf]]))
    return Pool(parents, [draw(st.sampled_from(values)) for _ in range(size)])


@given(pools(), st.integers(2, 45))
@example(Pool([-1, 0, 1], [0.0, 0.0, 0.0]), 3)  # the chain of certainties that disconnects the reference's tree
@example(Pool([-1, -1, 0, 0, 1, 1], [0.0, 0.0, 0.0, -1.0, 0.0, 0.0]), 4)
@settings(deadline=None, max_examples=300)
def test_rerank_keeps_the_best_and_stays_connected(pool: Pool, num_nodes: int) -> None:
    scores = pool.scores
    tokens = np.arange(len(scores)) + 100
    tree = rerank(ROOT, tokens, np.array(pool.parents), np.array(scores, np.float32), num_nodes)

    kept = sorted(sorted(range(len(scores)), key=lambda entry: (-scores[entry], entry))[: num_nodes - 1])
    assert tree.tokens.tolist() == [ROOT, *(100 + entry for entry in kept)]
    assert tree.scores.tolist() == [0.0, *np.array(scores, np.float32)[kept].tolist()]
    for node, entry in enumerate(kept, start=1):
        parent = pool.parents[entry]
        assert tree.tokens[tree.parents[node]] == (ROOT if parent < 0 else 100 + parent)
    check_tree(tree)


# Fixed choices.


def test_choices_of_eagle1() -> None:
    parents = choice_parents(EAGLE1_CHOICES)
    assert len(EAGLE1_CHOICES) == 25 and len(parents) == 26
    assert node_depths(parents).max() == 5
    leaves = set(range(26)) - set(parents.tolist())
    assert len(leaves) == 15
    assert StaticTree(EAGLE1_CHOICES).children == 4
    assert StaticTree(EAGLE1_CHOICES).scratch == len(set(parents.tolist()) - {-1, 0})


@pytest.mark.parametrize(
    "choices",
    [[(0, 0)], [(0,), (1, 0)], [(0, 0), (0,)], [(0,), (0,)], [()]],
    ids=["no parent", "another's child", "child first", "twice", "the root itself"],
)
def test_choices_without_a_tree_are_refused(choices: list[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="parent"):
        choice_parents(choices)


def test_root_only_and_plain_draft_nothing() -> None:
    tree = NoDraft().grow([3, ROOT], 60)
    check_tree(tree)
    assert tree.tokens.tolist() == root_only(ROOT).tokens.tolist() == [ROOT]


def test_additive_mask_hides_with_a_finite_value_of_its_type() -> None:
    visible = np.array([[True, False], [True, True]])
    for dtype in (np.float32, np.float16):
        mask = additive_mask(visible, dtype)
        assert mask.shape == (2, 2) and mask.dtype == dtype
        assert mask.tolist() == [[0.0, hiding(dtype)], [0.0, 0.0]]


def test_two_masks_and_a_score_are_finite_in_fp16() -> None:
    """And still hide: the share of a hidden key is 0."""
    mask = additive_mask(np.array([[True, False], [False, False]]), np.float16)
    scores = np.array([[-5e3, 5e3], [-5e3, 5e3]], np.float16)
    total = mask + mask + scores
    assert np.isfinite(total).all() and total.dtype == np.float16
    shares = np.exp(total[0].astype(np.float64) - total[0].max())
    assert shares.tolist() == [1.0, 0.0]
    lowest = np.full(2, np.finfo(np.float16).min)  # control: the lowest finite value does not bear being added
    with np.errstate(over="ignore"):
        assert np.isinf(lowest + lowest).all()


# Growth.


def likeliest(draft: Language, tokens: Sequence[int], count: int) -> list[tuple[int, np.float32]]:
    """The `count` best next tokens and their log-probabilities, lower ids first among equals."""
    logits = draft.logits(history_of(tokens)).astype(np.float64)
    log_probs = (logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())).astype(np.float32)
    ranked = sorted(range(len(log_probs)), key=lambda token: (-logits[token], token))
    return [(token, log_probs[token]) for token in ranked[:count]]


Node = tuple[int, ...]  # the tokens from below the root down


def slow_dynamic(draft: Language, tokens: Sequence[int], shape: DynamicTree, max_nodes: int) -> dict[Node, np.float32]:
    """EAGLE-2 with paths for nodes, in the order of the tree: path -> score."""
    pool: list[tuple[Node, np.float32]] = []
    frontier: list[tuple[Node, np.float32]] = [((), np.float32(0))]
    for _ in range(shape.depth + 1):
        level = [
            ((*path, token), np.float32(score + log_prob))
            for path, score in frontier
            for token, log_prob in likeliest(draft, [*tokens, *path], shape.top_k)
        ]
        pool += level
        frontier = sorted(level, key=lambda entry: -entry[1])[: shape.top_k]  # a stable sort
    best = dict(sorted(pool, key=lambda entry: -entry[1])[: min(shape.num_nodes, max_nodes) - 1])
    return {path: score for path, score in pool if path in best}


def slow_static(draft: Language, tokens: Sequence[int], shape: StaticTree, max_nodes: int) -> dict[Node, np.float32]:
    """EAGLE-1: every choice walked from the root."""
    nodes: dict[Node, np.float32] = {}
    for choice in shape.choices[: max_nodes - 1]:
        path: Node = ()
        score = np.float32(0)
        for rank in choice:
            token, log_prob = likeliest(draft, [*tokens, *path], rank + 1)[rank]
            path, score = (*path, token), np.float32(score + log_prob)
        nodes[path] = score
    return nodes


def nodes_of(tree: Tree) -> dict[Node, np.float32]:
    """Path -> score, the root left out, in the tree's order."""
    paths: list[Node] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[tree.parents[node]], int(tree.tokens[node])))
    return dict(zip(paths[1:], tree.scores[1:], strict=True))


def check_growth(
    draft: Language,
    shape: TreeShape,
    pieces: list[list[int]],
    max_nodes: int,
    nodes: Callable[..., dict[Node, np.float32]],
) -> None:
    """Verify the tokens piece by piece, as cycles do, growing a tree after each."""
    head = Head(FakeHead(draft, top_k=VOCAB), capacity=64, scratch=shape.scratch)
    drafter = EagleDrafter(head, shape)
    known: list[int] = [5]
    for piece in pieces:
        fresh = history_of([*known, *piece]).T[len(known) - 1 : -1]
        known += piece
        head.note(fresh)
        tree = drafter.grow(known, max_nodes)
        assert head.cache.length == len(known) - 1
        assert tree.num_nodes <= max_nodes and tree.tokens[0] == known[-1]
        check_tree(tree)
        expected = nodes(draft, known, shape, max_nodes)
        assert list(nodes_of(tree)) == list(expected)
        assert list(nodes_of(tree).values()) == list(expected.values())


# At spread 0 all proposals tie; at 1000 the best is certain, and a child ties with its parent.
drafts = st.builds(Table, st.just(VOCAB), st.integers(0, 1000), st.sampled_from([0.0, 1.0, 1000.0]))
verified = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=4)


@given(
    drafts,
    st.builds(DynamicTree, st.integers(2, 30), st.integers(0, 4), st.integers(1, 4)),
    verified,
    st.integers(2, 30),
)
@settings(deadline=None, max_examples=80)
def test_dynamic_tree_equals_the_slow_one(
    draft: Table, shape: DynamicTree, pieces: list[list[int]], max_nodes: int
) -> None:
    check_growth(draft, shape, pieces, max_nodes, slow_dynamic)


@st.composite
def choice_sets(draw: st.DrawFn) -> tuple[tuple[int, ...], ...]:
    """Choices with all their ancestors, sorted as StaticTree wants them; ranks may skip."""
    ends = draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=6))
    closed = {tuple(end[:length]) for end in ends for length in range(1, len(end) + 1)}
    return tuple(sorted(closed, key=lambda choice: (len(choice), choice)))


@given(drafts, st.builds(StaticTree, choice_sets()), verified, st.integers(2, 30))
@example(Table(VOCAB, 0, 1.0), StaticTree(EAGLE1_CHOICES), [[1, 2], [3]], 60)
@settings(deadline=None, max_examples=80)
def test_static_tree_equals_the_slow_one(
    draft: Table, shape: StaticTree, pieces: list[list[int]], max_nodes: int
) -> None:
    check_growth(draft, shape, pieces, max_nodes, slow_static)


@given(drafts, st.integers(1, 5), verified, st.integers(2, 8))
@settings(deadline=None, max_examples=40)
def test_chain_is_both_a_static_and_a_dynamic_tree(
    draft: Table, num_drafted: int, pieces: list[list[int]], max_nodes: int
) -> None:
    check_growth(draft, chain(num_drafted), pieces, max_nodes, slow_static)
    dynamic = DynamicTree(num_nodes=num_drafted + 1, depth=num_drafted - 1, top_k=1)
    tokens = [5, *(token for piece in pieces for token in piece)]
    assert slow_dynamic(draft, tokens, dynamic, max_nodes) == slow_static(draft, tokens, chain(num_drafted), max_nodes)


def fail_while_growing(head: Head, proposal: Proposal) -> None:
    with Scratch(head) as scratch:
        scratch.feed(proposal.tokens[0], proposal.hidden[np.zeros(2, np.int64)], np.array([-1, -1]))
        assert head.cache.length == 4
        raise KeyError


def test_scratch_rows_are_gone_even_after_an_error() -> None:
    head = Head(FakeHead(Table(VOCAB, 0, 1.0), top_k=2), capacity=8, scratch=4)
    proposal = observed(head, [1, 2], history_of([5, 1]).T)
    with pytest.raises(KeyError):
        fail_while_growing(head, proposal)
    assert head.cache.length == 2


def test_proposals_outlive_the_next_pass() -> None:
    """Sessions reuse their buffers, so what the head hands out must be its own."""
    head = Head(FakeHead(Table(VOCAB, 0, 1.0), top_k=2), capacity=8, scratch=4)
    first = observed(head, [1, 2], history_of([5, 1]).T)
    again = observed(Head(FakeHead(Table(VOCAB, 0, 1.0), top_k=2), capacity=8, scratch=4), [1, 2], history_of([5, 1]).T)
    with Scratch(head) as scratch:
        scratch.feed(first.tokens[0], first.hidden[np.zeros(2, np.int64)], np.array([-1, -1]))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    np.testing.assert_array_equal(first.log_probs, again.log_probs)
    np.testing.assert_array_equal(first.hidden, again.hidden)


def test_long_prompts_are_read_in_pieces() -> None:
    """A prompt of more than one chunk gives what the same rows give in one."""
    prompt = (np.arange(PREFILL_CHUNK + 90) % VOCAB).tolist()
    language = Table(VOCAB, 0, 1.0)
    logits, features = Target(FakeTarget(language), 1024).prefill(prompt)
    np.testing.assert_array_equal(logits, language.logits(history_of(prompt)))
    np.testing.assert_array_equal(features, history_of(prompt).T)


@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("count", [1, WINDOW, WINDOW + 1, 2 * WINDOW + 90])
def test_the_head_reads_the_end_of_what_is_long(first: int, count: int) -> None:
    """Into an empty cache, or after `first` rows: what more than a window holds makes it forget what was before."""
    draft = Table(VOCAB, 1, 1.0)
    text = (np.arange(first + count + 1) % VOCAB).tolist()
    features = history_of(text[:-1]).T
    head = Head(FakeHead(draft, top_k=3), 1024, 0)
    if first:
        observed(head, text[1 : first + 1], features[:first])
    proposal = observed(head, text[first + 1 :], features[first:])
    read = text if count <= WINDOW else text[-WINDOW - 1 :]
    assert proposal.tokens[0].tolist() == [token for token, _ in likeliest(draft, read, 3)]
    assert head.cache.length == len(read) - 1


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: DynamicTree(num_nodes=1), "total_token"),
        (lambda: DynamicTree(depth=-1), "depth"),
        (lambda: DynamicTree(top_k=0), "draft_top_k"),
        (lambda: chain(0), "chain"),
        (lambda: EagleDrafter(small_head(), DynamicTree(8, 1, 4)), "lower draft_top_k"),
        (lambda: EagleDrafter(small_head(), StaticTree(((0,), (3,)))), "lower draft_top_k"),
        (lambda: EagleDrafter(small_head(), DynamicTree(8, 3, 2)), "lower depth"),
        (lambda: EagleDrafter(small_head(), chain(6)), "lower depth"),
    ],
)
def test_impossible_shapes_are_refused(make: Callable[[], object], word: str) -> None:
    with pytest.raises(RequestError, match=word):
        make()


def small_head() -> Head:
    return Head(FakeHead(Table(VOCAB, 0, 1.0), top_k=3), capacity=8, scratch=4)
