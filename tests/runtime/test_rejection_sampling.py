"""How this runtime verifies a tree, and multi-round speculative sampling (EAGLE, arXiv 2401.15077, Algorithm 1): one
draws the target's token and looks whether it was drafted; the other accepts or rejects one child after the other.

Both emit the target's distribution. If Algorithm 1's children are given (drafted with certainty, as the k likeliest
are), and it decides by the same random numbers, it even emits the same tokens, which are those of decoding without
drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from scipy.stats import chisquare

from eagle_runtime.base.tree import Tree
from eagle_runtime.core.accept import accept
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from fakes import Table, history_of

VOCAB = 6
TARGET, DRAFT = Table(VOCAB, seed=0, spread=1.5), Table(VOCAB, seed=1, spread=1.0)
PROMPT = [0, 1]
SAMPLES = 4000
Law = npt.NDArray[np.float64]


def law_after(language: Table, tokens: Sequence[int]) -> Law:
    weights: Law = np.exp(language.logits(history_of(tokens)).astype(np.float64))
    law: Law = weights / weights.sum()
    return law


def residual(law: Law, drafted: Law) -> Law:
    """norm(max(0, p - q)): what is left of the target's law when a child drawn from `drafted` was rejected."""
    left: Law = np.maximum(law - drafted, 0)
    left /= left.sum()
    return left


def one_of(token: int) -> Law:
    """The law of a token that is drafted with certainty."""
    law: Law = np.eye(VOCAB)[token]
    return law


def exact_law(law: Law, rounds: Sequence[Law]) -> Law:
    """The law of the token that Algorithm 1 emits at a node whose children are drawn from `rounds`, one after the
    other."""
    if not rounds:
        return law
    accepted = np.minimum(law, rounds[0])
    rejected = 1 - accepted.sum()
    return accepted if rejected < 1e-12 else accepted + rejected * exact_law(residual(law, rounds[0]), rounds[1:])


def algorithm_1(rng: np.random.Generator, tokens: list[int], children: int, depth: int) -> list[int]:
    """Tokens that one verification emits of a tree whose nodes have so many children, drawn from the draft's law."""
    emitted: list[int] = []
    for _ in range(depth):
        law = law_after(TARGET, [*tokens, *emitted])
        drafted = law_after(DRAFT, [*tokens, *emitted])
        for child in rng.choice(VOCAB, children, p=drafted):
            if rng.random() < law[child] / drafted[child]:
                emitted.append(int(child))
                break
            law = residual(law, drafted)
        else:
            return [*emitted, int(rng.choice(VOCAB, p=law))]
    return [*emitted, int(rng.choice(VOCAB, p=law_after(TARGET, [*tokens, *emitted])))]


def drafted_tree(tokens: list[int], children: int, depth: int) -> tuple[Tree, list[list[int]]]:
    """The draft's likeliest `children` of each node, and the text down to each node."""
    texts, parents = [tokens], [-1]
    level = [0]
    for _ in range(depth):
        below = []
        for node in level:
            for child in np.argsort(-law_after(DRAFT, texts[node]), kind="stable")[:children]:
                below.append(len(texts))
                texts.append([*texts[node], int(child)])
                parents.append(node)
        level = below
    ids = np.array([text[-1] for text in texts])
    return Tree(ids, np.array(parents), np.zeros(len(ids), np.float32)), texts


def coupled(tree: Tree, texts: list[list[int]], numbers: Callable[[int], Law], power: float) -> list[int]:
    """Algorithm 1 over given children, deciding by the numbers e of each position: a child is accepted if it wins the
    race p / e among all tokens that were not rejected, which has the chance that the algorithm asks for."""
    node, emitted = 0, []
    while True:
        law, clock = law_after(TARGET, texts[node]), numbers(len(texts[node])) ** power
        for child in np.flatnonzero(tree.parents == node):
            token = int(tree.tokens[child])
            if (law / clock).argmax() == token:
                node = int(child)
                emitted.append(token)
                break
            law = residual(law, law[token] * one_of(token)) if law[token] < 1 else law
        else:
            return [*emitted, int((law / clock).argmax())]


def test_rejection_emits_the_law_of_the_target() -> None:
    law, drafted = law_after(TARGET, PROMPT), law_after(DRAFT, PROMPT)
    for rounds in ([drafted], [drafted] * 3, [one_of(2)], [one_of(1), one_of(4), one_of(0)]):
        np.testing.assert_allclose(exact_law(law, rounds), law, atol=1e-12)


def pairs(samples: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.bincount([VOCAB * one + two for one, two, *_ in samples], minlength=VOCAB**2)


def test_both_ways_emit_the_law_of_the_target_over_a_tree() -> None:
    """The first two tokens, of one verification or two, against the product of the target's laws."""
    law = np.concatenate([law_after(TARGET, PROMPT)[one] * law_after(TARGET, [*PROMPT, one]) for one in range(VOCAB)])
    rng = np.random.default_rng(5)
    rejecting: list[list[int]] = []
    ours: list[list[int]] = []
    for seed in range(SAMPLES):
        first = algorithm_1(rng, PROMPT, 2, 2)
        rejecting.append([*first, *(algorithm_1(rng, [*PROMPT, *first], 2, 2) if len(first) < 2 else [])])
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), PROMPT, VOCAB)
        emitted: list[int] = []
        while len(emitted) < 2:
            tree, texts = drafted_tree([*PROMPT, *emitted], 2, 2)
            rows = np.array([TARGET.logits(history_of(text)) for text in texts])
            emitted += accept(tree, rows, sampler).tokens.tolist()
        ours.append(emitted)
    for samples in (rejecting, ours):
        assert chisquare(pairs(samples), SAMPLES * law).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_deciding_by_the_numbers_of_the_seed_both_emit_the_tokens_of_decoding_without_drafts(
    temperature: float,
) -> None:
    accepted = 0
    for seed in range(60):
        params = SamplingParams(temperature=temperature, seed=seed)
        sampler, again = Sampler(params, PROMPT, VOCAB), Sampler(params, PROMPT, VOCAB)
        vanilla = list(PROMPT)
        while len(vanilla) < 12:
            vanilla.append(again.next(TARGET.logits(history_of(vanilla))))
        text = list(PROMPT)
        while len(text) < 9:
            tree, texts = drafted_tree(text, 2, 2)
            rows = np.array([TARGET.logits(history_of(one)) for one in texts])
            # The race of p^(1/T) / e has the winner of p / e^T.
            by_rejection = coupled(tree, texts, again.exponential_noise, temperature)
            step = accept(tree, rows, sampler)
            assert step.tokens.tolist() == by_rejection
            accepted += step.num_accepted
            text += by_rejection
        assert text == vanilla[: len(text)]
    assert accepted > 60
