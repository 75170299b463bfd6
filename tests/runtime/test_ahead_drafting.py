"""Medusa's and Hydra's heads in the runtime: outputs are vanilla's whatever they propose, and what they hold of a text
follows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ahead_writers import fitted_hydra, fitted_medusa, write_hydra, write_medusa
from conftest import GOLDEN, load_trace
from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.core.cache import NoRows
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.drafting.ahead_heads import MEDUSA_CHOICES, AheadHeads, HydraHeads, MedusaHeads
from eagle_runtime.drafting.head import NEVER, Scratch
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, StaticTree
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from insides import bundle_in, sessions_of

TARGET, HEADS = GOLDEN / "target", 4
KINDS = ("medusa", "hydra")
TREES: dict[str, dict[str, Any]] = {
    "dynamic": {"method": "eagle", "tree": "dynamic"},
    "static": {"method": "eagle", "tree": "static"},
    "Medusa's choices": {"method": "eagle", "tree": StaticTree(MEDUSA_CHOICES)},
    "chain": {"method": "eagle", "tree": "chain"},
    "cost-aware": {"method": "eagle", "tree": "cost-aware"},
    "sequoia": {"method": "eagle", "tree": "sequoia"},
    "eagle+lookup": {"method": "eagle+lookup"},
}


def texts() -> list[list[int]]:
    return [row["prompt_ids"] + row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]


@pytest.fixture(scope="module")
def ahead_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the bundles are."""
    return tmp_path_factory.mktemp("ahead")


@pytest.fixture(scope="module")
def ahead_model(ahead_folder: Path) -> Any:
    """kind, precision (fp32) -> the golden target with heads that were fitted to the reference texts, loaded."""
    folder, models = ahead_folder, dict[tuple[str, str], EagleModel]()
    heads = {
        "medusa": write_medusa(folder / "medusa", fitted_medusa(TARGET, texts(), HEADS)),
        "hydra": write_hydra(folder / "hydra", fitted_hydra(TARGET, texts(), HEADS)),
    }

    def model(kind: str, precision: str = "fp32") -> EagleModel:
        if (kind, precision) not in models:
            bundle = folder / f"{kind}-{precision}"
            export(TARGET, heads[kind], bundle, Settings(precision=precision, certify=False, record=False))
            models[kind, precision] = EagleModel.load(bundle, threads=1)
        return models[kind, precision]

    yield model
    for loaded in models.values():
        loaded.close()


Models = Callable[..., EagleModel]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_vanillas(ahead_model: Models, kind: str, precision: str) -> None:
    model, most = ahead_model(kind, precision), dict.fromkeys(TREES, 1.0)
    for (index, text), temperature in itertools.product(enumerate(texts()[:2]), (0.0, 0.7, 1.0)):
        settings: dict[str, Any] = {"temperature": temperature, "seed": 5 + index, "max_new_tokens": 24}
        prompt = text[: 6 + 5 * index]
        vanilla = model.generate(prompt, method="vanilla", **settings).token_ids
        for name, tree in TREES.items():
            result = model.generate(prompt, **tree, **settings)
            assert result.token_ids == vanilla, (name, temperature, index)
            most[name] = max(most[name], result.usage.tau)
    assert min(most[name] for name in ("dynamic", "static", "chain")) > 1.2, most


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8", "int4", "int8-weight"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_vanillas_on_many_prompts(ahead_model: Models, kind: str, precision: str) -> None:
    model = ahead_model(kind, precision)
    for (index, text), temperature in itertools.product(enumerate(8 * texts()), (0.0, 0.7, 1.0, 1.4)):
        settings: dict[str, Any] = {"temperature": temperature, "seed": index, "max_new_tokens": 32}
        prompt = text[index % 8 : index % 8 + 1 + index % 40]
        vanilla = model.generate(prompt, method="vanilla", **settings).token_ids
        for name, tree in TREES.items():
            assert model.generate(prompt, **tree, **settings).token_ids == vanilla, (name, temperature, index)


class Broken:
    """A session whose proposals are replaced."""

    def __init__(self, session: Any, change: Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
        self._session, self._change = session, change
        self.inputs, self.outputs = session.inputs, session.outputs

    def run(self, feeds: Mapping[str, Any], cache: NoRows) -> dict[str, Any]:
        return {name: self._change(name, value) for name, value in self._session.run(feeds, cache).items()}


RANDOM = np.random.default_rng(3)
BROKEN: dict[str, Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "NaN": lambda name, value: value if value.dtype == np.int64 else np.full_like(value, np.nan),
    "constant": lambda name, value: np.zeros_like(value),
    "random": lambda name, value: (
        RANDOM.integers(-9, 999, value.shape)
        if value.dtype == np.int64
        else RANDOM.normal(0, 40, value.shape).astype(np.float32)
    ),
}


@pytest.mark.filterwarnings("ignore:the draft head computes what it should not")
@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.parametrize("kind", KINDS)
def test_broken_heads_change_no_token(ahead_model: Models, kind: str, fault: str) -> None:
    model, prompt = ahead_model(kind), texts()[0][:9]
    head = model.head
    assert isinstance(head, AheadHeads)
    sound = head._session
    head._session = Broken(sound, BROKEN[fault])  # type: ignore[assignment]
    try:
        for temperature, seed in ((0.0, 1), (0.7, 2), (1.0, 3)):
            settings: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_new_tokens": 16}
            vanilla = model.generate(prompt, method="vanilla", **settings).token_ids
            for tree in TREES.values():
                assert model.generate(prompt, **tree, **settings).token_ids == vanilla
    finally:
        head._session = sound


@pytest.mark.parametrize("kind", KINDS)
def test_short_texts_and_contexts(ahead_model: Models, ahead_folder: Path, kind: str) -> None:
    """A prompt of one token, and a context that ends within a tree."""
    ahead_model(kind)
    with EagleModel.load(ahead_folder / f"{kind}-fp32", context=12, threads=1) as small:
        for tree in TREES.values():
            one = small.generate([7], **tree, max_new_tokens=30)
            assert one.token_ids == small.generate([7], method="vanilla", max_new_tokens=30).token_ids


def feature_rows(count: int, width: int, start: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    rng = np.random.default_rng(start)
    return rng.normal(size=(count, width)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_follows_the_text(ahead_model: Models, kind: str) -> None:
    """What is read in pieces, forgotten and remembered proposes what the newest feature alone would."""
    model = ahead_model(kind)
    width = model.manifest.target.hidden_size
    session = sessions_of(model)[1]
    make = {"medusa": MedusaHeads, "hydra": HydraHeads}[kind]
    tokens, features = [5, 9, 4, 3, 8, 2], feature_rows(5, width)
    whole, parts = make(session, 64, 32), make(session, 64, 32)
    whole.note(features)
    wanted = whole.catch_up(tokens)
    assert whole.unread == 0 and whole.cache.length == 5

    for piece in (features[:2], features[2:3], features[3:]):
        parts.note(piece)
    assert parts.unread == 1
    same_proposal(parts.catch_up(tokens), wanted)

    parts.note(feature_rows(3, width, 1))
    parts.truncate(5)  # the features of positions 5 to 7 do not belong to the text any more
    assert parts.unread == 0
    parts.truncate(4)
    parts.note(features[4:])
    same_proposal(parts.catch_up(tokens), wanted)

    restored = make(session, 64, 32)
    restored.restore(whole.snapshot())
    same_proposal(restored.catch_up(tokens), wanted)
    with pytest.raises(ValueError, match="do not fit a cache without rows"):
        restored.cache.write([features])


def same_proposal(one: Any, other: Any) -> None:
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-6)
    assert one.position == other.position


@pytest.mark.parametrize("kind", KINDS)
def test_levels_are_those_of_the_heads(ahead_model: Models, kind: str) -> None:
    """Medusa's candidates depend on the depth alone, Hydra's on the path; beyond the last head nothing comes."""
    model = ahead_model(kind)
    head = model.head
    text = texts()[0][:20]
    state = DecodingState(bundle_in(model).target, head)
    list(state.read(text))
    first = head.catch_up([*text, 65])
    assert first.position == 21
    with Scratch(head) as scratch:
        proposal, hidden = first, first.hidden[np.zeros(2, np.int64)]
        for depth in range(1, HEADS + 2):
            proposal = scratch.feed(np.array([65, 70]), hidden, np.full(2, -1))
            hidden = proposal.hidden
            assert proposal.position == 21 + depth
            if depth >= HEADS:
                assert (proposal.log_probs == NEVER).all()
            elif kind == "medusa":
                np.testing.assert_array_equal(proposal.tokens[0], proposal.tokens[1])
            else:
                assert not np.array_equal(proposal.log_probs[0], proposal.log_probs[1])
    assert head.cache.length == 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ahead", [[65], [65, 70]])
def test_what_is_read_ahead_counts_as_drafted(ahead_model: Models, kind: str, ahead: list[int]) -> None:
    """The proposal after tokens that follow the root, and those below it, are the same whether these tokens were fed as
    a chain or read ahead."""
    head = ahead_model(kind).head
    text = texts()[0][:20]
    list(DecodingState(bundle_in(ahead_model(kind)).target, head).read(text))
    proposal = head.catch_up([*text, 64])
    children: list[Any] = []
    with Scratch(head) as scratch:
        for number, token in enumerate([*ahead, 75]):
            children.append(scratch.feed(np.array([token]), proposal.hidden[:1], np.array([number - 1])))
            proposal = children[-1]
    assert len(ahead) <= head.most_ahead and not head.keeps_ahead
    read = head.read_ahead([*text, 64], ahead)
    same_proposal(read, children[-2])
    with Scratch(head) as scratch:
        same_proposal(scratch.feed(np.array([75]), read.hidden[:1], np.array([-1])), children[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_answer_drafts_from_the_state_of_the_first(ahead_model: Models, kind: str) -> None:
    model, text = ahead_model(kind), texts()[1]
    state = DecodingState(bundle_in(model).target, model.head)

    def answer(prompt: Sequence[int]) -> list[int]:
        sampler = Sampler(SamplingParams(), prompt, model.manifest.target.vocab_size)
        tokens: list[int] = []
        for cycle in generate(state, EagleDrafter(model.head, DynamicTree(12, 2, 4)), sampler, list(prompt)):
            tokens += cycle.step.tokens.tolist()
            if len(tokens) >= 16:
                return tokens[:16]
        return tokens

    first = answer(text[:10])
    snapshot = state.snapshot()
    second = answer([*text[:10], *first[:8], 40])
    assert second == list(model.generate([*text[:10], *first[:8], 40], method="vanilla", max_new_tokens=16).token_ids)
    state.restore(snapshot)
    assert answer([*text[:10], *first[:8], 40]) == second


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_keeps_its_rows(ahead_model: Models, kind: str) -> None:
    model = ahead_model(kind)
    twin = model.twin()
    assert isinstance(twin.head, AheadHeads) and twin.head is not model.head
    prompt = texts()[2][:12]
    assert twin.generate(prompt, tree="chain", max_new_tokens=12).token_ids == (
        model.generate(prompt, method="vanilla", max_new_tokens=12).token_ids
    )
