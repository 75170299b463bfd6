"""A drafter that the caller wrote changes the speed, never the output; a wrong tree is an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_runtime import Drafter, EagleModel, RequestError, SamplingParams, Tree
from eagle_runtime.base.tree import MAX_NODES, Float
from eagle_runtime.core.accept import Step

SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 5},
]


class Replay(Drafter):
    """Proposes the continuation of a text that it was given, in two branches of which one is wrong."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)
        self.accepted = 0

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        drafted = self.text[len(tokens) : len(tokens) + 4]
        ids = [tokens[-1], *drafted, *((token + 1) % 256 for token in drafted)][:max_nodes]
        parents = [-1, *range(len(drafted)), 0, *range(len(drafted) + 1, 2 * len(drafted))][: len(ids)]
        tokens.append(0) if isinstance(tokens, list) else None  # what it does with its arguments changes nothing
        return Tree(np.array(ids), np.array(parents), np.zeros(len(ids), np.float32))

    def learn(self, step: Step) -> None:
        self.accepted += step.num_accepted


@pytest.mark.parametrize("settings", SAMPLING)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_output_is_that_of_decoding_without_drafts(
    settings: dict[str, Any], precision: str, bundle_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    with EagleModel.load(bundle_of("eagle3", precision), context=256, check_hashes=False) as model:
        for prompt in prompts[:3]:
            vanilla = model.generate(prompt, method="vanilla", max_new_tokens=24, ignore_eos=True, **settings)
            drafter: Drafter = Replay([*prompt, *vanilla.token_ids])
            result = model.generate(prompt, drafter=drafter, max_new_tokens=24, ignore_eos=True, **settings)
            assert result.token_ids == vanilla.token_ids
            assert result.usage.method == "drafter" and result.usage.tau > 3


def test_a_tree_is_never_asked_to_be_larger_than_trees_are(model_of: Callable[..., EagleModel]) -> None:
    asked: list[int] = []

    class Noting(Replay):
        def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
            asked.append(max_nodes)
            return super().grow(tokens, max_nodes)

    model = model_of("eagle1")
    model.generate([5, 6, 7], drafter=Noting([]), max_new_tokens=3, ignore_eos=True)
    assert asked and max(asked) == min(MAX_NODES, model.context - 4)


class Studious(Replay):
    """Learns from the prompt too."""

    prompt_rows = 5

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(text)
        self.parts: list[tuple[int, int]] = []  # tokens of the text, and rows of logits after its end
        self.likeliest: list[int] = []

    def learn_prompt(self, tokens: Sequence[int], logits: Float) -> None:
        self.parts.append((len(tokens), len(logits)))
        self.likeliest = logits.argmax(1).tolist()


def test_a_drafter_may_learn_from_the_prompt(model_of: Callable[..., EagleModel], prompts: list[list[int]]) -> None:
    model, prompt = model_of("eagle1"), prompts[0]
    text = [*prompt, *model.generate(prompt, method="vanilla", max_new_tokens=20, ignore_eos=True).token_ids]
    drafter = Studious(text)
    result = model.generate(prompt, drafter=drafter, max_new_tokens=20, ignore_eos=True)
    assert drafter.accepted == sum(result.usage.accepted_per_depth) > 0
    assert drafter.parts == [(len(prompt), 5)] and drafter.likeliest[-1] == text[len(prompt)]
    drafter.prompt_rows = 0
    with pytest.raises(RequestError, match="prompt_rows is 0"):
        model.generate(prompt, drafter=drafter)


class Fixed(Drafter):
    """Always returns the tree that it was given."""

    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self.tree = Tree(np.array(tokens), np.array(parents), np.zeros(len(tokens), np.float32))

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        root = np.where(self.tree.tokens == -7, tokens[-1], self.tree.tokens)
        return Tree(root, self.tree.parents, self.tree.scores)

    def learn(self, step: Step) -> None:
        pass


@pytest.mark.parametrize(
    ("tokens", "parents", "problem"),
    [
        ([999], [-1], "the root of the drafter's tree is 999"),
        ([-7, 256], [-1, 0], "an id outside the vocabulary of 256"),
        ([-7, -1], [-1, 0], "an id outside the vocabulary of 256"),
        ([-7, 5, 6], [-1, 2, 0], "has no parent before it"),
        ([-7, 5], [-1, -1], "has no parent before it"),
        ([-7, 5], [-1], "the drafter's tree has 2 nodes"),
        ([], [], "the drafter's tree has 0 nodes"),
        ([-7, *[5] * 300], [-1, *range(300)], "must have 1 to"),
        ([-7, *[5] * 70], [-1, *range(70)], "levels deep"),
    ],
)
def test_a_wrong_tree_is_an_error(
    tokens: list[int], parents: list[int], problem: str, bundle_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    with (
        EagleModel.load(bundle_of("eagle1"), context=256, check_hashes=False) as model,
        pytest.raises(RequestError, match=problem),
    ):
        model.generate(prompts[0], drafter=Fixed(tokens, parents))


def test_what_does_not_go_with_a_drafter(model_of: Callable[..., EagleModel]) -> None:
    model, drafter = model_of("eagle1"), Replay([])
    clashes: list[dict[str, Any]] = [
        {"method": "eagle"}, {"tree": "chain"}, {"total_token": 5}, {"depth": 2}, {"draft_top_k": 2}
    ]  # fmt: skip
    for settings in clashes:
        with pytest.raises(RequestError, match="a drafter of your own takes no method"):
            model.stream([5, 6], drafter=drafter, **settings)
    wrong: Any = "eagle"
    with pytest.raises(RequestError, match="drafter is 'eagle', but must be an object with the methods"):
        model.stream([5, 6], drafter=wrong)


# Sampling as an object


def test_sampling_as_an_object_is_the_same_as_keywords(
    model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    model, prompt = model_of("eagle1"), prompts[0]
    keywords = model.generate(prompt, max_new_tokens=20, temperature=0.9, top_k=20, seed=7)
    params = SamplingParams(temperature=0.9, top_k=20, seed=7)
    assert model.generate(prompt, max_new_tokens=20, sampling=params).token_ids == keywords.token_ids
    mixed = model.generate(prompt, max_new_tokens=20, sampling=SamplingParams(temperature=0.9, seed=7), top_k=20)
    assert mixed.token_ids == keywords.token_ids and mixed.usage.seed == 7
    assert model.generate(prompt, max_new_tokens=2, sampling=SamplingParams(temperature=0.9)).usage.seed == 0


@pytest.mark.parametrize("name", ["temperature", "seed"])
def test_a_setting_may_be_given_once(name: str, model_of: Callable[..., EagleModel]) -> None:
    params = SamplingParams(temperature=0.5, seed=7)
    keyword: dict[str, Any] = {name: 1}
    with pytest.raises(RequestError, match=rf"^{name} is set twice, as a keyword and in sampling; leave one of them"):
        model_of("eagle1").stream([5, 6], sampling=params, **keyword)
    wrong: Any = {"temperature": 1.0}
    with pytest.raises(RequestError, match=r"sampling is .*, but must be a SamplingParams"):
        model_of("eagle1").stream([5, 6], sampling=wrong)


def test_twins_share_costs_in_memory(
    bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a cache folder that cannot be written, nothing could be shared through files."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "file" / "cache"))
    with EagleModel.load(bundle_of("eagle3"), context=256, check_hashes=False) as model:
        twin, before = model.twin(), model.costs()
        twin.generate([5, 6, 7], max_new_tokens=24, ignore_eos=True)
        assert model.costs() == twin.costs() != before
        assert model.twin().costs() == model.costs()
