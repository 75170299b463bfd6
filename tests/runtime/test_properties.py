"""Properties of one pass on the golden pair: a tree is nothing but its paths, a kept path nothing but its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_runtime.base.tree import EAGLE1_CHOICES, Int, Tree, ancestor_mask, node_depths, root_only
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import Proposal
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.head import Head, Scratch
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, StaticTree, TreeShape, chain
from eagle_runtime.ort.session import OrtSession
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from fakes import observed, rows_of

CAPACITY = 128
SCRATCH = 64

SHAPES: dict[str, TreeShape] = {
    "dynamic": DynamicTree(num_nodes=24, depth=4, top_k=4),
    "static": StaticTree(EAGLE1_CHOICES),
    "chain": chain(5),
}


def assert_close(actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    np.testing.assert_allclose(np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=0, atol=1e-4)


class Pair:
    """A bundle's two sessions; every cache made from them is its own."""

    def __init__(self, folder: Path) -> None:
        self.manifest: Manifest = read_manifest(folder)
        target, head = (model.graph for model in self.manifest.models.values())
        self._target = OrtSession(folder / target.file, target, threads=1)
        self._head = OrtSession(folder / head.file, head, threads=1)

    def target(self) -> Target:
        return Target(self._target, CAPACITY)

    def head(self) -> Head:
        return Head(self._head, CAPACITY, SCRATCH)

    def close(self) -> None:
        self._target.close()
        self._head.close()


@pytest.fixture(scope="module", params=["eagle1", "eagle3"])
def pair(request: pytest.FixtureRequest, bundle_of: Callable[..., Path]) -> Iterator[Pair]:
    loaded = Pair(bundle_of(request.param))
    yield loaded
    loaded.close()


tokens_of_the_pair = st.integers(3, 255)
sequences = st.lists(tokens_of_the_pair, min_size=1, max_size=12)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree, parents before children, in no other order; siblings may even be alike."""
    size = draw(st.integers(1, 16))
    parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
    tokens = [draw(tokens_of_the_pair) for _ in range(size)]
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64), np.zeros(size, np.float32))


def path_to(node: int, parents: Int) -> list[int]:
    """Node indices from the root down, from walking up."""
    path = [node]
    while path[0] != 0:
        path.insert(0, int(parents[path[0]]))
    return path


@given(trees())
@settings(deadline=None)
def test_mask_and_depths_equal_walked_parents(tree: Tree) -> None:
    mask, depths = ancestor_mask(tree.parents), node_depths(tree.parents)
    for node in range(tree.num_nodes):
        path = path_to(node, tree.parents)
        assert np.flatnonzero(mask[node]).tolist() == path
        assert depths[node] == len(path) - 1


@given(prompt=sequences, tree=trees())
@settings(deadline=None, max_examples=25)
def test_every_node_is_the_end_of_a_plain_sequence(pair: Pair, prompt: list[int], tree: Tree) -> None:
    """Logits and features of one tree pass equal those of each node's own path, read as a prompt."""
    whole, single = pair.target(), pair.target()
    whole.prefill(prompt)
    logits, features = (np.array(rows) for rows in whole.verify(tree))
    assert whole.cache.length == len(prompt)
    for node in range(tree.num_nodes):
        own = tree.tokens[path_to(node, tree.parents)].tolist()
        own_logits, own_features = single.prefill(prompt + own)
        assert_close(logits[node], own_logits)
        assert_close(features[node], np.asarray(own_features)[-1])


@given(prompt=sequences, drafts=st.lists(trees(), min_size=1, max_size=4), data=st.data())
@settings(deadline=None, max_examples=40)
def test_keep_equals_a_fresh_prefill(pair: Pair, prompt: list[int], drafts: list[Tree], data: st.DataObject) -> None:
    """After any paths of any trees, rows and next logits are those of the same tokens read as a prompt."""
    target, fresh = pair.target(), pair.target()
    target.prefill(prompt)
    tokens = list(prompt)
    for tree in drafts:
        target.verify(tree)
        path = path_to(data.draw(st.integers(0, tree.num_nodes - 1)), tree.parents)
        target.cache.keep(np.array(path))
        tokens += tree.tokens[path].tolist()
    assert target.cache.length == len(tokens)
    last = data.draw(tokens_of_the_pair)
    logits, _ = target.verify(root_only(last))
    kept = rows_of(target.cache)[:, : len(tokens) + 1].copy()
    expected, _ = fresh.prefill([*tokens, last])
    assert_close(logits[0], expected)
    assert_close(kept, rows_of(fresh.cache)[:, : len(tokens) + 1])


# The head.


@pytest.mark.parametrize("shape", SHAPES)
@given(prompt=sequences, max_nodes=st.integers(2, 30))
@settings(deadline=None, max_examples=15)
def test_scores_are_those_of_each_path_alone(pair: Pair, shape: str, prompt: list[int], max_nodes: int) -> None:
    """A tree grown level by level scores every node as a chain of its ancestors would, and leaves no row in the
    cache."""
    _, features = pair.target().prefill(prompt)
    tokens = [*prompt, 65]
    head = pair.head()
    head.note(features)
    tree = EagleDrafter(head, SHAPES[shape]).grow(tokens, max_nodes)
    assert head.cache.length == len(prompt)
    assert 2 <= tree.num_nodes <= max_nodes
    assert np.all(np.diff(node_depths(tree.parents)) >= 0)
    siblings = list(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))
    assert len(set(siblings)) == len(siblings)

    alone = pair.head()
    first = observed(alone, tokens[1:], features)
    for node in range(1, tree.num_nodes):
        own = tree.tokens[path_to(node, tree.parents)[1:]].tolist()
        assert_close(tree.scores[node], score_of_path(alone, first, own))


def score_of_path(head: Head, proposal: Proposal, tokens: list[int]) -> float:
    """The sum of the log-probabilities of a path's tokens, fed one by one."""
    score = 0.0
    with Scratch(head) as scratch:
        for step, token in enumerate(tokens):
            (rank,) = np.flatnonzero(proposal.tokens[0] == token)
            score += float(proposal.log_probs[0, rank])
            if step < len(tokens) - 1:
                proposal = scratch.feed(np.array([token]), proposal.hidden, np.array([step - 1]))
    return score


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_head_rows_hold_verified_tokens_only(
    pair: Pair, shape: str, temperature: float, prompts: list[list[int]]
) -> None:
    """After several cycles the head's rows are those of one reading of the same tokens with the target's features."""
    prompt = prompts[0][:40]
    head = pair.head()
    drafter = EagleDrafter(head, SHAPES[shape])
    sampler = Sampler(SamplingParams(temperature=temperature), prompt, pair.manifest.target.vocab_size)
    events = list(islice(generate(DecodingState(pair.target(), head), drafter, sampler, prompt), 8))
    cycles = events[1:]
    assert sum(cycle.step.num_accepted for cycle in cycles) > 0

    tokens = [*prompt, *events[0].step.tokens.tolist()]
    for cycle in cycles[:-1]:  # the last one's tokens were not drafted upon
        tokens += cycle.step.tokens.tolist()
    fresh = pair.head()
    _, features = pair.target().prefill(tokens[:-1])
    observed(fresh, tokens[1:], features)
    assert head.cache.length == fresh.cache.length == len(tokens) - 1
    committed = slice(0, len(tokens) - 1)
    assert_close(rows_of(head.cache)[:, committed], rows_of(fresh.cache)[:, committed])
