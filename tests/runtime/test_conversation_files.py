"""Files of conversations: a loaded one goes on as if it had never been closed; damage is an error and nothing else."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators, put_listed, put_tokenizer
from eagle_runtime import Conversation, ConversationFileError, EagleModel, RequestError
from eagle_runtime.app import conversation_file as module
from eagle_runtime.base.backend_names import NATIVE
from eagle_runtime.bundle.manifest import read_manifest

TEMPLATE = b"{% for m in messages %}{{ m.role[0] | upper }}:{{ m.content }}{{ eos_token }}{% endfor %}A:"
SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def bundles(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Precision -> a bundle of the golden pair that takes text and messages."""
    base = tmp_path_factory.mktemp("bundles")

    def bundle(precision: str) -> Path:
        folder = base / precision
        if not folder.exists():
            shutil.copytree(bundle_of("eagle1", precision), folder)
            put_tokenizer(folder)
            put_listed(folder, "chat_template.jinja", TEMPLATE)
            put_listed(folder, "tokenizer_config.json", b'{"eos_token": "</s>"}')
        return folder

    return bundle


@pytest.fixture(scope="module")
def model(bundles: Callable[[str], Path]) -> Iterator[EagleModel]:
    with EagleModel.load(bundles("int8"), threads=1, check_hashes=False) as loaded:
        yield loaded


@pytest.fixture
def chat(model: EagleModel) -> Conversation:
    chat = model.conversation([{"role": "system", "content": "brief €"}])
    for text in ("what is a tree", "def f(x):"):
        list(chat.send(text, **SETTINGS))
    return chat


def answer(chat: Conversation, text: str) -> tuple[int, ...]:
    result = list(chat.send(text, **SETTINGS))[-1].result
    assert result is not None
    return result.token_ids


def test_a_loaded_conversation_goes_on(model: EagleModel, chat: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "chat.safetensors"
    size = chat.save(path, notes={"title": "trees €"})
    assert path.stat().st_size == size and os.listdir(tmp_path) == [path.name]
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    loaded = model.load_conversation(path)
    assert loaded.kv_status == "resident" and loaded.kv_rows == chat.kv_rows
    assert (loaded.messages, loaded.token_ids, loaded.turns) == (chat.messages, chat.token_ids, chat.turns)
    assert loaded.notes == {"title": "trees €"}
    usages = []
    for one in (chat, loaded):
        result = list(one.send("and then", tree="dynamic", **SETTINGS))[-1].result
        assert result is not None
        usages.append((result.token_ids, result.usage.prefilled_tokens, result.usage.target_passes))
    assert usages[0] == usages[1] and usages[0][1] < 30
    text_alone = tmp_path / "text.safetensors"
    assert chat.save(text_alone, kv=False) < size // 4
    again = model.load_conversation(text_alone)
    assert again.kv_rows == 0 and again.kv_status == "nothing was read yet"
    assert answer(again, "more") == answer(chat, "more")


@pytest.mark.parametrize(
    ("precision", "backend"),
    [
        ("fp32", "cpu"),
        ("int8+int8 cache", "cpu"),
        pytest.param("int8", "native", marks=needs_operators),
        pytest.param("int8+int8 cache", "native", marks=needs_operators),
    ],
)
def test_rows_of_every_layout_are_the_same_after_loading(
    precision: str, backend: str, bundles: Callable[[str], Path], tmp_path: Path
) -> None:
    """Row by row in fp32; by head, with bytes and scales, in an int8 cache; natively in fp16 and in rows of bytes."""
    with EagleModel.load(bundles(precision), backend=backend, threads=1, check_hashes=False) as model:
        chat = model.conversation()
        answer(chat, "what is a tree of words")
        chat.save(tmp_path / "chat")
        loaded = model.load_conversation(tmp_path / "chat")
        pairs = zip(chat._slot.state.caches, loaded._slot.state.caches, strict=True)
        for saved, taken in pairs:
            rows = zip(saved.read(), taken.read(), strict=True)
            assert saved.length == taken.length > 10
            assert all(np.array_equal(one, other) and one.dtype == other.dtype for one, other in rows)
        assert answer(loaded, "more") == answer(chat, "more")


def test_pending_features_survive(model: EagleModel, tmp_path: Path) -> None:
    """A head that has not read the end of a text reads it from the file."""
    chat = model.conversation()
    list(chat.send("what is a tree of words", method="vanilla", **SETTINGS))
    assert chat._slot.state.head is not None and chat._slot.state.head.unread > 16
    chat.save(tmp_path / "chat")
    loaded = model.load_conversation(tmp_path / "chat")
    head = loaded._slot.state.head
    assert head is not None and head.unread == chat._slot.state.head.unread
    results = [list(one.send("and", tree="dynamic", **SETTINGS))[-1].result for one in (chat, loaded)]
    assert results[0] is not None and results[1] is not None
    assert results[0].usage.target_passes == results[1].usage.target_passes
    assert results[0].token_ids == results[1].token_ids


def test_flipped_bits_and_cuts_are_noticed(model: EagleModel, chat: Conversation, tmp_path: Path) -> None:
    count = 1000
    path, rng = tmp_path / "chat", random.Random(count)
    chat.save(path)
    content = path.read_bytes()
    damaged = tmp_path / "damaged"
    for number in range(count):
        changed = bytearray(content)
        # Half of the bits are of the header, which is small.
        place = rng.randrange(len(content) if number % 2 else 4000)
        changed[place] ^= 1 << rng.randrange(8)
        damaged.write_bytes(changed)
        with pytest.raises(ConversationFileError, match="damaged"):
            model.load_conversation(damaged)
    for _ in range(count // 10):
        damaged.write_bytes(content[: rng.randrange(len(content))])
        with pytest.raises(ConversationFileError, match="damaged"):
            model.load_conversation(damaged)
    assert model.load_conversation(path).messages == chat.messages


def test_rows_of_another_engine_or_processor_are_left(bundles: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "chat"
    with EagleModel.load(bundles("int8"), threads=1, check_hashes=False, backend="cpu") as model:
        chat = model.conversation()
        list(chat.send("what is a tree", **SETTINGS))
        chat.save(path)
        wanted = answer(chat.fork(), "more")
        for name, changed in (("processor_name", "another"), ("library_version", "onnxruntime 0.1")):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, name, lambda *_, changed=changed: changed)
                loaded = model.load_conversation(path)
            which = "processor" if name == "processor_name" else "engine"
            assert loaded.kv_rows == 0 and loaded.kv_status == f"made with another {which}"
            assert loaded.messages == chat.messages and answer(loaded, "more") == wanted
            assert loaded.kv_status == "resident"


@needs_operators
def test_rows_of_native_operators_travel_between_processors(
    model: EagleModel, chat: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    monkeypatch.setattr(module, "processor_name", lambda: "another")
    monkeypatch.setattr(module, "processor_features", lambda: ("others",))
    loaded = model.load_conversation(path)
    assert loaded.kv_status == "resident" and loaded.kv_rows == chat.kv_rows
    assert answer(loaded, "more") == answer(chat, "more")


@pytest.mark.parametrize("change", [{"used": ("ExactTreeAttention", "ai.onnx.MatMul")}, {"operators": "8"}])
def test_what_onnxruntime_rounds_ties_rows_to_their_processor(
    change: dict[str, Any], bundles: Callable[[str], Path]
) -> None:
    """A layer in fp32, as of a router, and in older bundles the sines of rotations."""
    manifest = read_manifest(bundles("int8"))
    native = manifest.target.graph.native
    assert native is not None
    graph = dataclasses.replace(manifest.target.graph, native=dataclasses.replace(native, **change))
    other = dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, graph=graph))
    assert [module.processor_of(NATIVE, one) for one in (manifest, other)] == [
        "every processor",
        module.processor_of("cpu", manifest),
    ]


def test_another_precision_keeps_the_text_and_another_tokenizer_nothing(
    model: EagleModel, chat: Conversation, bundles: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    with EagleModel.load(bundles("fp32"), threads=1, check_hashes=False) as other:
        loaded = other.load_conversation(path)
        assert loaded.kv_status == "made with another bundle" and loaded.messages == chat.messages
        fresh = other.conversation(chat.messages)
        assert answer(loaded, "more") == answer(fresh, "more")
    changed = shutil.copytree(bundles("int8"), tmp_path / "bundle")
    tokenizer = (changed / "tokenizer.json").read_bytes()
    put_listed(changed, "tokenizer.json", tokenizer + b"\n")
    with (
        EagleModel.load(changed, threads=1, check_hashes=False) as other,
        pytest.raises(ConversationFileError, match="of a model with another tokenizer"),
    ):
        other.load_conversation(path)


def test_what_cannot_be_saved_or_read_is_named(model: EagleModel, chat: Conversation, tmp_path: Path) -> None:
    path = tmp_path / "chat"
    chat.save(path)
    before = path.read_bytes()
    size = len(before)
    with pytest.raises(RequestError, match=f"the file would have {size} bytes, but max_bytes is 100"):
        chat.save(path, max_bytes=100)
    with pytest.raises(RequestError, match="notes have more than 65536 characters"):
        chat.save(path, notes={"x": "y" * 70000})
    chat.notes = {}
    with pytest.raises(RequestError, match="notes must map strings to strings"):
        chat.save(path, notes={"x": 3})  # type: ignore[dict-item]
    odd = model.conversation([{"role": "user", "content": object()}])
    with pytest.raises(RequestError, match="a message cannot be saved as JSON"):
        odd.save(path)
    assert path.read_bytes() == before
    with pytest.raises(ConversationFileError, match="cannot be written"):
        chat.save(tmp_path / "no folder" / "chat")
    with pytest.raises(ConversationFileError, match="cannot be written"):
        chat.save("nul\0")
    for folder in (".", "/", tmp_path):
        with pytest.raises(ConversationFileError, match="is not a regular file"):
            chat.save(folder)
    for name, content in (("empty", b""), ("text", b"hello " * 100), ("folder", None)):
        wrong = tmp_path / name
        wrong.mkdir() if content is None else wrong.write_bytes(content)
        with pytest.raises(ConversationFileError):
            model.load_conversation(wrong)
    with pytest.raises(ConversationFileError, match="cannot be read"):
        model.load_conversation(tmp_path / "none")


SAVER = """
import sys
from eagle_runtime import EagleModel
with EagleModel.load(sys.argv[1], threads=1, check_hashes=False) as model:
    chat = model.load_conversation(sys.argv[2])
    print("ready", flush=True)
    while True:
        chat.save(sys.argv[2])
"""


@pytest.mark.skipif(os.name != "posix", reason="kills by signal")
@pytest.mark.parametrize("count", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_a_kill_leaves_the_old_file_or_the_new_one(
    count: int, model: EagleModel, chat: Conversation, bundles: Callable[[str], Path], tmp_path: Path
) -> None:
    path, rng = tmp_path / "chat", random.Random(1)
    chat.save(path)
    for _ in range(count):
        saver = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(bundles("int8")), str(path)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None and saver.stdout.readline() == "ready\n"
        time.sleep(rng.random() * 0.05)
        saver.send_signal(signal.SIGKILL)
        saver.communicate()
        assert model.load_conversation(path).messages == chat.messages


@pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")
def test_a_link_is_followed_and_a_pipe_is_left_alone(chat: Conversation, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConversationFileError, match="is not a regular file"):
        chat.save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):  # a link to nothing yet, and to a file
        chat.save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_size > 100
        (tmp_path / "real").write_bytes(b"old")
