"""Layers with a state in the place of keys (Qwen3.5): a text that goes on, goes back or is copied is a new one's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators, put_listed, put_tokenizer
from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.app.conversation import Conversation
from eagle_runtime.base.errors import BundleError
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from eagle_runtime.core.state_cache import StateCache
from insides import shared_passes
from tiny_families import ROWS, Row, save_source

TEMPLATE = b"{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }}|{% endfor %}A:"
SETTINGS: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, "temperature": 0.8, "seed": 3}
LONG = "a tree of words, " * 9  # more than two chunks of a prompt


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("states")
    row = Row("qwen3_5_text", ROWS["Qwen3.5"].config | {"vocab_size": 512, "max_position_embeddings": 1024})
    save_source(row, base / "source")
    export(base / "source", None, base / "bundle", Settings(precision="int8", certify=False))
    put_tokenizer(base / "bundle")
    put_listed(base / "bundle", "chat_template.jinja", TEMPLATE)
    return base / "bundle"


@pytest.fixture(scope="module", params=["cpu", pytest.param("native", marks=needs_operators)])
def model(request: pytest.FixtureRequest, bundle: Path) -> Iterator[EagleModel]:
    with EagleModel.load(bundle, backend=request.param, threads=1, check_hashes=False) as loaded:
        yield loaded


def answer(chat: Conversation, text: str, **settings: Any) -> tuple[tuple[int, ...], int]:
    """The tokens, and how many tokens of the prompt were read."""
    result = list(chat.send(text, **{**SETTINGS, **settings}))[-1].result
    assert result is not None
    return result.token_ids, result.usage.prefilled_tokens


def states_of(chat: Conversation) -> StateCache:
    *_, states = chat._slot.state.target.cache.each()
    assert isinstance(states, StateCache)
    return states


def test_a_text_that_goes_back_is_that_of_a_new_one(model: EagleModel) -> None:
    """The state after an answer cannot be taken back to fewer tokens: that at the end of its prompt was kept. Drafts
    change nothing, though a pass keeps some of a tree's rows."""
    with model.conversation() as chat, model.conversation() as new:
        first, whole = answer(chat, LONG)
        again = list(chat.regenerate(method="lookup", **SETTINGS))[-1].result
        assert again is not None and again.token_ids == first and again.usage.prefilled_tokens == 1
        goes_on, read = answer(chat, "and?")
        assert read < 30 < whole
        chat.edit(1, "no")
        assert states_of(chat).length > whole
        other, read = answer(chat, "why?")
        assert read < 30  # from the end of the first prompt on
        for text, expected in ((LONG, first), ("and?", goes_on)):
            assert answer(new, text)[0] == expected
        new.edit(1, "no")
        new.drop_kv()
        assert answer(new, "why?") == (other, whole + read - 1)
        chat.edit(0, "a" + LONG)  # nothing of it is as it was
        new.edit(0, "a" + LONG)
        new.drop_kv()
        assert answer(chat, "what?") == answer(new, "what?")


def test_copies_and_files_have_the_state(model: EagleModel, tmp_path: Path) -> None:
    with model.conversation() as chat:
        answer(chat, LONG)
        chat.save(tmp_path / "chat")
        fork, late, loaded = chat.fork(), chat.fork(), model.load_conversation(tmp_path / "chat")
        assert loaded.kv_status == "resident"
        expected = answer(fork, "and?")
        assert answer(chat, "and?") == answer(loaded, "and?") == expected
        assert answer(late, "and?") == (expected[0], 1)  # of what the other has gone on to
        part = model.conversation()  # of the first prompt, as far as a state is there
        part.share_rows(chat, states_of(chat).reach(len(LONG)))
        with model.conversation() as new:
            assert answer(part, LONG)[0] == answer(new, LONG)[0]
        for one in (fork, late, loaded, part):
            one.close()


def test_texts_take_turns_or_share_passes(model: EagleModel, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = shared_passes(monkeypatch)
    prompts = [LONG[:n] for n in (40, 90, 40, 3)]
    texts: dict[int, tuple[int, ...]] = {}
    for number, piece in model.batch(prompts, width=3, method="lookup", **SETTINGS):
        if piece.result is not None:
            texts[number] = piece.result.token_ids
    assert (model.backend == "native") == any(len(rows) == 3 for rows in shared)
    assert [texts[n] for n in range(4)] == [model.generate(one, **SETTINGS).token_ids for one in prompts]


def test_a_model_with_states_drafts(bundle: Path, model: EagleModel) -> None:
    expected = model.generate(LONG, method="vanilla", **SETTINGS).token_ids
    with EagleModel.load(bundle, draft_bundle=bundle, backend=model.backend, threads=1, check_hashes=False) as pair:
        for _ in range(2):
            result = pair.generate(LONG, method="draft-model", **SETTINGS)
            assert result.token_ids == expected
        assert result.usage.target_passes < 24


def test_states_of_other_models_are_refused(model: EagleModel) -> None:
    with model.conversation() as chat:
        answer(chat, LONG)
        states = states_of(chat)
        arrays = states.read()
        rows, state, base = arrays[:3]
        ends: list[list[Any]] = [
            [rows[:, :, :-1], state, base],
            [rows.astype("float64"), state, base],
            [rows[:, :2], state, base],
            [rows, state[:, :1], base],
            [rows, state, base - 1000],
            [rows, state, base + states.capacity],
            [rows, state],
        ]
        before = states.read()
        for wrong in [*([*one, *arrays[3:]] for one in ends), [*arrays[:3], *ends[2]], [*arrays[:3], *ends[5]]]:
            with pytest.raises(ValueError, match="do not fit a cache"):
                states.write(wrong)
        assert all(np.array_equal(one, other) for one, other in zip(before, states.read(), strict=True))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("past_states.1.rows", [1, "W+3", 103]),
        ("past_states.0.rows", [1, "W", 104]),
        ("past_states.0.state", [4, 0, 8]),
        ("present_states.2.state", [4, 16, 16]),
    ],
)
def test_a_manifest_with_other_states_is_refused(name: str, shape: list[Any], bundle: Path, tmp_path: Path) -> None:
    data = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    side = "inputs" if name.startswith("past") else "outputs"
    data["target"]["graph"][side][name]["shape"] = shape
    shutil.copytree(bundle, tmp_path / "bundle")
    (tmp_path / "bundle" / MANIFEST_NAME).write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(BundleError, match=r"target: graph: (in|out)puts: '(past|present)_states"):
        read_manifest(tmp_path / "bundle")
