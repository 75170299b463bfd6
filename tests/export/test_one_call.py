"""The graph that drafts a tree in one call, run by ONNX Runtime: the trees are those that the host grows level by
level. In fp32, since the two graphs round fp16 differently on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import HEADS
from eagle_export.base.errors import ExportError
from eagle_export.tensorrt.draft_graph import draft_graph
from eagle_runtime.base.tree import EAGLE1_CHOICES, Float, Tree
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.head import Ranker
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker
from eagle_runtime.drafting.head import NEVER, Head
from eagle_runtime.drafting.one_call import OneCallHead
from eagle_runtime.drafting.shapes import DynamicTree, StaticTree, chain
from eagle_runtime.ort.session import OrtSession
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from studies.harness import main
from studies.one_call import OrtOneCall

CAPACITY = 600
SHAPE = DynamicTree(60, 5, 10)
PADDED = {"past": 512, "rows": 64}  # as an engine on a GPU gets them


@pytest.fixture
def heads_of(bundle_of: Callable[..., Path]) -> Callable[..., tuple[Head, OneCallHead]]:
    """Returns a function: kind, rows that past and new rows are padded to -> a head that grows trees level by level,
    and one of the one-call graph."""

    def heads(kind: str, **padding: int) -> tuple[Head, OneCallHead]:
        bundle = bundle_of(kind)
        manifest = read_manifest(bundle)
        assert manifest.head is not None
        graph, vocab = manifest.head.graph, manifest.target.vocab_size
        levels = Head(OrtSession(bundle / graph.file, graph, 1, None), CAPACITY, 100, vocab)
        return levels, OneCallHead(OrtOneCall(bundle, graph, SHAPE.depth, SHAPE.top_k, **padding), CAPACITY, vocab)

    return heads


def states(count: int, seed: int, heads: tuple[Head, ...]) -> Iterator[tuple[list[int], Float]]:
    """Yields random texts that go on from one another, with the features of their new rows; where the caches are full,
    a new text begins."""
    random, text = np.random.default_rng(seed), [0]
    for _ in range(count):
        rows = int(random.choice([1, 2, 3, 5, 6, 17, 70]))
        if len(text) + rows > CAPACITY - 100:
            text = [0]
            for head in heads:
                head.truncate(0)
        text = [*text, *random.integers(0, 256, rows).tolist()]
        features = random.normal(0, random.choice([0.5, 1.0, 3.0]), (rows, 64)).astype(np.float32)
        yield text, features


def same(first: Tree, second: Tree) -> bool:
    return np.array_equal(first.tokens, second.tokens) and np.array_equal(first.parents, second.parents)


def compare(heads: tuple[Head, OneCallHead], count: int) -> None:
    """Both heads grow the same dynamic tree in each of `count` random states."""
    for number, (text, features) in enumerate(states(count, 1, heads)):
        trees = []
        for head in heads:
            head.note(features)
            trees.append(SHAPE.grow(head, text[-1], head.catch_up(text), SHAPE.num_nodes))
        assert same(*trees), f"state {number}"
        assert heads[0].cache.length == heads[1].cache.length
        np.testing.assert_allclose(trees[1].scores, trees[0].scores, atol=1e-3)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("padding", [{}, PADDED], ids=["exact", "padded"])
def test_trees_are_those_of_the_host(
    kind: str, padding: dict[str, int], heads_of: Callable[..., tuple[Head, OneCallHead]]
) -> None:
    compare(heads_of(kind, **padding), 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_trees_of_a_thousand_states(kind: str, heads_of: Callable[..., tuple[Head, OneCallHead]]) -> None:
    compare(heads_of(kind, **PADDED), 1000)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_the_graph_ranks_as_the_host(temperature: float, heads_of: Callable[..., tuple[Head, OneCallHead]]) -> None:
    """After the root the children are those that the host's ranker puts first among all that the head proposes, given
    the same random numbers."""
    levels, one = heads_of("eagle3")
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5), [1], 256)
    ranker: Ranker = GumbelRanker(sampler) if temperature else GreedyRanker()
    agreed = compared = 0
    for text, features in states(40, 2, (levels, one)):
        for head in (levels, one):
            head.note(features)
        root, proposal = levels.catch_up(text), one.catch_up(text, ranker)
        ranked, _ = ranker.rank(root.tokens, root.log_probs, root.position)
        fed = one.feed(ranked[0, :10], proposal.hidden[np.zeros(10, np.int64)], np.full(10, -1), one.cache.length, 0)
        agreed += int((fed.log_probs[:, 0] > NEVER).sum())  # the token grew children
        compared += 10
    assert agreed >= 0.995 * compared, "but for near ties"


def test_other_trees_take_what_the_call_has_grown(heads_of: Callable[..., tuple[Head, OneCallHead]]) -> None:
    """A chain is the same tree where its tokens are among the best of each level; nodes that did not grow children have
    none."""
    heads = heads_of("eagle1")
    chains = 0
    for text, features in states(40, 3, heads):
        grown: list[list[Tree]] = []
        for head in heads:
            head.note(features)
            first = head.catch_up(text)
            grown.append([shape.grow(head, text[-1], first, 60) for shape in (chain(6), StaticTree(EAGLE1_CHOICES))])
        (line, static), (one_line, one_static) = grown
        cut = np.flatnonzero(one_line.scores <= NEVER)
        until = cut[0] if len(cut) else len(line.tokens)
        assert np.array_equal(line.tokens[:until], one_line.tokens[:until])
        chains += len(cut) == 0
        real = one_static.scores > NEVER
        assert np.array_equal(static.tokens[real], one_static.tokens[real]) and np.array_equal(
            static.parents, one_static.parents
        )
    assert chains > 20


def test_a_tree_that_no_call_can_draft_is_refused(bundle_of: Callable[..., Path]) -> None:
    source = bundle_of("eagle3") / "draft/model.onnx"
    with pytest.raises(ExportError, match="proposes 44 tokens per row; export"):
        draft_graph(source, 5, 45)
    with pytest.raises(ExportError, match="a tree of 0 levels"):
        draft_graph(source, 0, 10)


def test_the_command_compares_both_ways(bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["one_call", str(bundle_of("eagle3")), "--states", "8"]) == 0
    assert "; 0 of 28 trees differ" in capsys.readouterr().out
    assert main(["one_call", str(bundle_of("eagle3", "fp16"))]) == 2
    assert "has no head in fp32" in capsys.readouterr().err
