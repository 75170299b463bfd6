"""The tokenizer of a bundle: as AutoTokenizer encodes, and one clear error for files and prompts that are broken."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from eagle_runtime.base.errors import BundleError, RequestError
from eagle_runtime.text.tokenizer import Text
from patience import PATIENCE_S
from tokenizer_kinds import TOKENIZERS, id_of

DEMO = Path(__file__).parents[2] / "tools" / "demo_pair" / "target"
TEXTS = [
    "",
    " ",
    "the a b",
    "do n't, the dogs.",
    "héllo € 😀\n\n\tx",
    "a" * 300,
    "<s> </s> <tool> [CLS]",
    "\u2028\x00\x1b[31m",
]


def padded_and_truncated(tokenizer: Tokenizer) -> Tokenizer:
    """As saved by someone who trained with it. Truncated so, the library even gives up: the stride is too long."""
    tokenizer.enable_truncation(6, stride=2)
    tokenizer.enable_padding(length=20, pad_id=1, pad_token="b")
    return tokenizer


def with_template(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return tokenizer


SAVED: dict[str, Callable[[], Tokenizer]] = {
    **TOKENIZERS,
    "truncation and padding": lambda: padded_and_truncated(TOKENIZERS["byte-level"]()),
    "truncation and padding of Unigram": lambda: padded_and_truncated(TOKENIZERS["Unigram"]()),
    "a template": lambda: with_template(TOKENIZERS["byte fallback"]()),
    "a template and truncation": lambda: padded_and_truncated(with_template(TOKENIZERS["byte fallback"]())),
}


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def damaged(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A Unigram tokenizer's file with something else in it."""
    data = json.loads(TOKENIZERS["Unigram"]().to_str())
    change(data)
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize("name", SAVED)
def test_text_is_encoded_as_transformers_does(name: str, tmp_path: Path) -> None:
    folder = save(SAVED[name](), tmp_path)
    ours, theirs = Text(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text


@pytest.mark.parametrize("name", ["byte level", "a template"])
@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "Qwen2Tokenizer"])
@pytest.mark.parametrize("added", [None, False, True])
def test_what_is_put_around_a_text_is_what_tokenizer_json_says(
    name: str, kind: str, added: bool | None, tmp_path: Path
) -> None:
    """transformers 5 does not read add_bos_token and add_eos_token where there is a tokenizer.json."""
    tokenizer = TOKENIZERS["byte-level"]()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if name == "a template":
        ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, ids)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    folder = save(tokenizer, tmp_path)
    config: dict[str, Any] = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    if added is not None:
        config |= {"add_bos_token": added, "add_eos_token": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = "a.b"
    ids_of_text = Text(folder).encode(text)
    assert ids_of_text == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert len(ids_of_text) == len(text) + (name == "a template")


@pytest.mark.parametrize("name", ["golden", "demo"])
def test_the_tokenizers_of_the_pairs_too(name: str, golden: Path, tmp_path: Path) -> None:
    if name == "golden":
        shutil.copyfile(golden / "byte_tokenizer.json", tmp_path / "tokenizer.json")
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    folder = DEMO if name == "demo" else tmp_path
    ours, theirs = Text(folder), AutoTokenizer.from_pretrained(folder)
    rng = random.Random(0)
    for text in (*TEXTS, *("".join(rng.choices("ab \n(){}.é€😀", k=40)) for _ in range(50))):
        assert ours.encode(text) == theirs(text)["input_ids"], text


def test_a_stride_that_the_library_gives_up_at(tmp_path: Path) -> None:
    data = json.loads(padded_and_truncated(TOKENIZERS["Unigram"]()).to_str())
    data["truncation"]["stride"] = 100
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    assert len(Text(tmp_path).encode("a b c " * 10)) > 20


NO_SUCH_TOKEN = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}
GIVES_UP: dict[str, Callable[[dict[str, Any]], object]] = {
    "a normaliser of nothing": lambda data: data.update(
        normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    ),
    "pieces of length 0": lambda data: data.update(pre_tokenizer={"type": "FixedLength", "length": 0}),
    "a template without its token": lambda data: data.update(post_processor=NO_SUCH_TOKEN),
    "a merge of unknown tokens": lambda data: data.update(
        model={"type": "BPE", "vocab": {"a": 0, "b": 99}, "merges": [["a", "b"]]}
    ),
    "an unknown kind": lambda data: data.update(model={"type": "Runes"}),
    "a list": lambda data: data.update(model=[]),
}


@pytest.mark.parametrize("name", GIVES_UP)
def test_a_tokenizer_that_the_library_gives_up_at(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of these end in a panic, whose own words and stack never show."""
    with pytest.raises(BundleError, match=r"tokenizer\.json is not a tokenizer that 'tokenizers' reads"):
        Text(damaged(tmp_path, GIVES_UP[name]))
    # On Windows the library writes to the console itself, not to a descriptor that can be led elsewhere.
    assert os.name == "nt" or capfd.readouterr() == ("", "")


def test_what_others_write_on_stderr_meanwhile_is_kept(tmp_path: Path) -> None:
    """By a thread, all the time, in a process of its own."""
    save(TOKENIZERS["Unigram"](), tmp_path)
    code = """
import os, sys, threading
from pathlib import Path
from eagle_runtime.text.tokenizer import Text
done = threading.Event()
count = 0
def write():
    global count
    while not done.is_set():
        count += os.write(2, b"x")
thread = threading.Thread(target=write)
thread.start()
for _ in range(50):
    Text(Path(sys.argv[1]))
done.set()
thread.join()
print(count)
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert ran.returncode == 0 and len(ran.stderr) == int(ran.stdout) > 0


def test_a_text_that_the_tokenizer_has_no_token_for(tmp_path: Path) -> None:
    text = Text(damaged(tmp_path, lambda data: data["model"].update(unk_id=None)))
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot encode"):
        text.encode("xyz")


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("x\ud800y", r"half a character .* at position 1"),
        ("\udcff", "half a character"),
        (b"abc", "must be text, a list of token ids, or a list of chat messages"),
        ({"role": "user", "content": "x"}, "must be text, a list of token ids, or a list of chat messages"),
        (5, "must be text"),
        (None, "must be text"),
        ([1, 2.5], r"the prompt holds 2\.5 at position 1, which is not a token id"),
        (["7"], "the prompt holds '7' at position 0"),
        ([True], "the prompt holds True at position 0"),
        ([1, None], "the prompt holds None at position 1"),
        ([[1, 2]], r"the prompt holds \[1, 2\] at position 0"),
        (np.array([1.0, 2.0]), "the prompt holds"),
        (np.array([[1, 2]]), "the prompt holds"),
        ([{"role": "user"}, 5], "mixes chat messages and ids"),
        (["x" * 10**7], r"holds 'xx.{1,100}xx' at"),
    ],
)
def test_prompts_of_the_wrong_kind(prompt: Any, says: str, golden: Path, tmp_path: Path) -> None:
    shutil.copyfile(golden / "byte_tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(RequestError, match=says) as refused:
        Text(tmp_path).encode(prompt)
    assert len(str(refused.value)) < 300


def test_numpy_ids_are_ids(tmp_path: Path) -> None:
    for ids in (np.array([5, 7]), np.array([5, 7], np.uint8), [np.int32(5), 7], (5, 7), range(5, 8, 2)):
        encoded = Text(tmp_path).encode(ids)  # type: ignore[arg-type]
        assert encoded == [5, 7] and all(type(item) is int for item in encoded)


def test_special_tokens_stay_out_of_the_text(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["byte-level"]()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.add_tokens([AddedToken("<|im|>", special=True), "<tool>"])
    text = Text(save(tokenizer, tmp_path))
    stream = text.stream([])
    assert stream is not None
    ids = [id_of(tokenizer, token) for token in ("a", "<|im|>", "<tool>", "<|end|>", "b")]
    assert stream.feed(ids) == "a<tool>b" and text.encode("ab<tool>") == tokenizer.encode("ab<tool>").ids


@pytest.mark.parametrize("kind", ["lstrip", "rstrip", "single_word", "normalized"])
def test_what_follows_a_text_has_the_ids_that_it_has_alone(kind: str, tmp_path: Path) -> None:
    """Or none are known: a special token may take white space from the text before it, or want some there."""
    tokenizer = TOKENIZERS["byte-level"]()
    tokenizer.add_special_tokens([AddedToken("<|im|>", normalized=False), AddedToken("<a>", **{kind: True})])
    text = Text(save(tokenizer, tmp_path))
    for before in ("b", "b ", "<|im|>", "<a> ", "<a>"):
        for rest in ("<|im|>b", "<a>", "<a> b"):
            ids = text.encode_after(rest)
            assert ids in (None, text.encode_rendered(before + rest)[len(text.encode_rendered(before)) :])
    assert text.encode_after("<|im|>b") and not text.encode_after("b")


def test_the_models_alone_are_tokenizers(tmp_path: Path) -> None:
    """Without decoder, normaliser or anything else."""
    text = Text(save(Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")), tmp_path))
    assert text.encode("b") == [1]


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_become_text_as_in_transformers(kind: str, tmp_path: Path) -> None:
    text, theirs = Text(save(TOKENIZERS[kind](), tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for sentence in TEXTS:
        ids = text.encode(sentence)
        for skipped in (True, False):
            wanted = theirs.decode(ids, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)
            assert text.decode(ids, skip_special_tokens=skipped) == wanted


@pytest.mark.parametrize("ids", [[10**6], [-1], [2**40], ["a"], 3])
def test_ids_that_do_not_exist_have_no_text(ids: Any, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="token_ids"):
        Text(save(TOKENIZERS["byte-level"](), tmp_path)).decode(ids)
