"""A small language model as drafter: what it reads and proposes, and that it changes no token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import GOLDEN, put_tokenizer
from eagle_runtime import Constraint, EagleModel, RequestError
from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.bundle.manifest import TreeDefaults
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.choose import Sizes, choose_drafter
from eagle_runtime.drafting.draft_model import DraftModelHead, likeliest
from eagle_runtime.drafting.head import NEVER, Scratch
from eagle_runtime.drafting.method import Loaded
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter
from fakes import FakeTarget, Table, history_of
from insides import bundle_in, turns_of

VOCAB = 9
LANGUAGE = Table(VOCAB, seed=5, spread=2.0)
TREES: list[str | None] = [None, "cost-aware", "dynamic", "static", "chain"]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": temperature, "seed": seed} for temperature in (0.0, 0.7, 1.0) for seed in (1, 2)
]


def log_probs_after(tokens: list[int]) -> np.ndarray:
    logits = LANGUAGE.logits(history_of(tokens)).astype(np.float64)
    return np.asarray(logits - np.log(np.exp(logits).sum()))


def test_proposals_of_a_growing_tree_are_those_of_the_text_down_to_each_node() -> None:
    head = DraftModelHead(Target(FakeTarget(LANGUAGE), 40, chunk=4))
    text = [1, 2, 3, 4, 5, 6]
    for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 8, 8]):  # it grows, then it is another one
        first = head.catch_up(text)
        assert head.cache.length == len(text) and first.position == len(text)
        with Scratch(head) as scratch:
            children = first.tokens[0, :2]
            second = scratch.feed(children, first.hidden[:1], np.array([-1, -1]))
            below = second.tokens[[1, 0], 0]
            third = scratch.feed(below, second.hidden[:2], np.array([1, 0]))
        paths = [text, *([*text, child] for child in children), *([*text, children[1 - n], below[n]] for n in (0, 1))]
        rows = [(first, 0), (second, 0), (second, 1), (third, 0), (third, 1)]
        for path, (proposal, row) in zip(paths, rows, strict=True):
            expected = log_probs_after([int(token) for token in path])
            assert proposal.tokens[row].tolist() == np.argsort(-expected, kind="stable").tolist()
            np.testing.assert_allclose(proposal.log_probs[row], np.sort(expected)[::-1], atol=1e-5)
        assert third.position == len(text) + 2 and head.cache.length == len(text)


def test_what_is_read_ahead_is_read_once() -> None:
    model = FakeTarget(LANGUAGE)
    head = DraftModelHead(Target(model, 40))
    read = head.read_ahead([1, 2, 3], [4, 5])
    assert read.position == 5 and head.cache.length == 5
    assert read.tokens[0].tolist() == np.argsort(-log_probs_after([1, 2, 3, 4, 5]), kind="stable").tolist()
    head.note(np.zeros((4, 2), np.float32))  # the root was 3: the large model has verified 1 to 4
    assert head.unread == 1
    head.catch_up([1, 2, 3, 4, 5])
    assert head.cache.length == 5


def test_what_it_has_not_read_is_counted_and_forgotten_with_the_text() -> None:
    head = DraftModelHead(Target(FakeTarget(LANGUAGE), 40))
    head.note(np.zeros((4, 2), np.float32))  # five tokens, of which the last is the root
    assert head.unread == 5
    head.catch_up([1, 2, 3, 4, 5])
    head.note(np.zeros((2, 2), np.float32))
    assert head.unread == 2
    head.truncate(3)
    assert head.cache.length == 3 and head.unread == 1
    head.truncate(30)  # rows that another state has read
    assert head.cache.length == 3 and head.unread == 28


@pytest.mark.parametrize("capacity", [5, 6, 9])
def test_beyond_its_context_it_proposes_nothing(capacity: int) -> None:
    head = DraftModelHead(Target(FakeTarget(LANGUAGE), capacity))
    drafter = EagleDrafter(head, DynamicTree(8, 3, 2))
    for length in range(2, 12):
        tree = drafter.grow(list(range(length - 1)) + [3], 8)
        assert tree.num_nodes == (1 if length > capacity else tree.num_nodes) and tree.tokens[0] == 3
        assert np.isfinite(tree.scores).all() and head.cache.length <= capacity
    assert (head.catch_up([1] * 20).log_probs == NEVER).all()


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_broken_logits_cost_drafts_and_nothing_else(broken: float) -> None:
    class Broken(Table):
        def logits(self, history: Any) -> Any:
            return np.full(VOCAB, broken, np.float32)

    head = DraftModelHead(Target(FakeTarget(Broken(VOCAB, 0, 1.0)), 40))
    with pytest.warns(EagleWarning, match="draft head computes what it should not"):
        proposal = head.catch_up([1, 2, 3])
    assert (proposal.log_probs == NEVER).all() and set(proposal.tokens[0].tolist()) <= set(range(VOCAB))


def test_the_likeliest_tokens() -> None:
    logits = np.array([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, -1.0, -2.0]], np.float32)
    tokens, log_probs = likeliest(logits, 2)
    assert tokens[0].tolist() == [1, 3] and set(tokens[1].tolist()) == {0, 1}
    np.testing.assert_allclose(log_probs[0], np.array([3, 2]) - np.log(np.exp([0, 1, 2, 3]).sum()), atol=1e-6)


def random_bundle(folder: Path, vocab_size: int = 256) -> Path:
    """A bundle of a tiny model with random weights and a context of 96."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    config = json.loads((GOLDEN / "target" / "config.json").read_text())
    torch.manual_seed(3)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "max_position_embeddings": 96}
    model = LlamaForCausalLM(LlamaConfig(**{**config, **small, "head_dim": 8, "vocab_size": vocab_size}))
    model.save_pretrained(folder / "model", safe_serialization=True)
    export(folder / "model", None, folder / "bundle", Settings(certify=False))
    return folder / "bundle"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of random weights with the golden pair's vocabulary."""
    return random_bundle(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module", params=["fp32", "int8"])
def drafted(request: pytest.FixtureRequest, bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    """The golden target in each precision, drafted for by itself in the other one."""
    draft = bundle_of("alone", {"fp32": "int8", "int8": "fp32"}[request.param])
    with EagleModel.load(
        bundle_of("eagle1", request.param), draft_bundle=draft, threads=1, context=256, check_hashes=False
    ) as model:
        yield model


@pytest.mark.parametrize("tree", TREES)
def test_the_output_is_that_of_decoding_without_drafts(
    tree: Any, drafted: EagleModel, prompts: list[list[int]]
) -> None:
    assert drafted.default_method == "draft-model"
    for number, sampling in enumerate(SAMPLING):
        settings = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
        vanilla = drafted.generate(prompts[number], method="vanilla", **settings)
        result = drafted.generate(prompts[number], method="draft-model", tree=tree, **settings)
        assert result.token_ids == vanilla.token_ids
        if tree in ("dynamic", "static", "chain"):  # the others depend on the clock
            assert result.usage.tau > (3 if sampling["temperature"] == 0 else 1.5)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_model_with_random_weights_and_a_short_context_changes_nothing(
    precision: str, stranger: Path, bundle_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    with EagleModel.load(
        bundle_of("alone", precision), draft_bundle=stranger, threads=1, context=256, check_hashes=False
    ) as model:
        for tree in TREES:
            for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 4}):
                settings: dict[str, Any] = {"max_new_tokens": 120, "ignore_eos": True, **sampling}  # beyond its context
                vanilla = model.generate(prompts[0], method="vanilla", **settings)
                result = model.generate(prompts[0], method="draft-model", tree=tree, **settings)
                assert result.token_ids == vanilla.token_ids and len(result.token_ids) == 120
        one = model.generate([5], method="draft-model", tree="chain", max_new_tokens=3, ignore_eos=True)
        assert one.token_ids == model.generate([5], method="vanilla", max_new_tokens=3, ignore_eos=True).token_ids


def test_conversations_twins_and_snapshots(drafted: EagleModel, prompts: list[list[int]]) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 6}
    chats = [drafted.conversation() for _ in range(2)]
    twin = drafted.twin()
    text = list(prompts[0])
    for _ in range(2):
        turns = [chat.complete(text, method="draft-model", tree="chain", **settings) for chat in chats]
        for pieces in zip(*turns, strict=True):  # step by step in turns
            assert pieces[0].token_ids == pieces[1].token_ids
        vanilla = drafted.generate(text, method="vanilla", **settings)
        assert all(turn.result is not None and turn.result.token_ids == vanilla.token_ids for turn in turns)
        assert twin.generate(text, method="draft-model", tree="chain", **settings).token_ids == vanilla.token_ids
        text += [*vanilla.token_ids, 7, 8]
    fork = chats[0].fork()
    answer = fork.complete(text, method="draft-model", tree="dynamic", **settings)
    tokens = [token for piece in answer for token in piece.token_ids]
    assert tuple(tokens) == drafted.generate(text, method="vanilla", **settings).token_ids
    assert fork.kv_bytes > 0
    for chat in (*chats, fork):
        chat.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constraints_hold(
    temperature: float, bundle_of: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    bundle = shutil.copytree(bundle_of("alone"), tmp_path / "bundle")
    put_tokenizer(bundle)
    constraint = Constraint.json_schema(
        {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 2, "maxItems": 4}
    )
    with EagleModel.load(bundle, draft_bundle=bundle, threads=1, context=256) as model:
        turns_of(model).engines.rounds.others = 3  # the costs of a draft know who shares a pass, as the model's do
        assert [one.costs.others for one in (bundle_in(model), *bundle_in(model).drafts)] == [3, 3]
        turns_of(model).engines.rounds.others = 0
        settings: dict[str, Any] = {"constraint": constraint, "temperature": temperature, "seed": 3}
        vanilla = model.generate(prompts[0], method="vanilla", **settings)
        for tree in TREES:
            result = model.generate(prompts[0], method="draft-model", tree=tree, **settings)
            assert result.token_ids == vanilla.token_ids
        assert 2 <= len(json.loads(vanilla.text or "")) <= 4


def test_what_does_not_fit_is_refused_and_leaves_nothing_open(
    bundle_of: Callable[..., Path], text_bundle: Path, tmp_path: Path
) -> None:
    own = shutil.copytree(bundle_of("alone"), tmp_path / "own")
    put_tokenizer(own)
    with pytest.raises(RequestError, match=r"has another tokenizer: the token '.*' has the id (None|\d+), but"):
        EagleModel.load(text_bundle, draft_bundle=own, threads=1)
    with pytest.raises(RequestError, match=r"has a vocabulary of 200 tokens, but .* has one of 256"):
        EagleModel.load(own, draft_bundle=random_bundle(tmp_path, 200), threads=1)
    with (
        EagleModel.load(own, threads=1) as model,
        pytest.raises(RequestError, match="takes a draft model; load the bundle with draft_bundle"),
    ):
        model.generate([1, 2], method="draft-model")
    with pytest.raises(RequestError, match="computes 16; lower draft_top_k"):
        choose_drafter("draft-model", "dynamic", Sizes(draft_top_k=20), Loaded(TreeDefaults(), {"draft model": 16}))
