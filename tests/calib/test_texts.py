"""Reading text files into windows of token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from conftest import GOLDEN
from eagle_calib.texts import BLOCK_CHARS, read_windows
from eagle_runtime.text.tokenizer import Text

VOCAB = 300
BOS = 299


@pytest.fixture
def plain(tmp_path: Path) -> Text:
    """A byte tokenizer."""
    (tmp_path / "plain").mkdir()
    tokenizer = tokenizers.Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    tokenizer.save(str(tmp_path / "plain" / "tokenizer.json"))
    return Text(tmp_path / "plain")


@pytest.fixture
def with_bos(tmp_path: Path) -> Text:
    """A byte tokenizer that puts a bos id before each text."""
    (tmp_path / "bos").mkdir()
    tokenizer = tokenizers.Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(tmp_path / "bos" / "tokenizer.json"))
    return Text(tmp_path / "bos")


def test_text_is_cut_into_windows(plain: Text, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij")
    ids = plain.encode("abcdefghij")
    assert len(ids) == 10
    assert read_windows(path, plain, VOCAB, 4, 100) == [ids[:4], ids[4:8], ids[8:]]
    assert read_windows(path, plain, VOCAB, 4, 6) == [ids[:4], ids[4:6]]
    assert read_windows(path, plain, VOCAB, 4, 4) == [ids[:4]]


def test_every_window_of_a_text_begins_with_bos(with_bos: Text, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefgh")
    bos, *ids = with_bos.encode("abcdefgh")
    assert bos == BOS and len(ids) == 8
    assert read_windows(path, with_bos, VOCAB, 4, 100) == [[bos, *ids[:3]], [bos, *ids[3:6]], [bos, *ids[6:]]]


def test_a_text_that_its_chat_template_began_has_one_bos(tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "<s>abcdef"}')
    text = Text(tmp_path)
    ids = text.encode("abcdef")[1:]
    assert read_windows(path, text, VOCAB, 4, 100) == [[bos, *ids[:3]], [bos, *ids[3:]]]


def test_every_row_begins_a_window(plain: Text, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [{"turns": ["abc", "never read"]}, {"text": "defgh"}, {"ids": [3, 1, 2]}, {"text": ""}]
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    first, second = plain.encode("abc"), plain.encode("defgh")
    assert read_windows(path, plain, VOCAB, 4, 100) == [first, second[:4], second[4:], [3, 1, 2]]


def test_rows_after_the_last_token_are_not_read(plain: Text, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\nthis is not JSON\n')
    assert read_windows(path, plain, VOCAB, 4, 3) == [plain.encode("abc")]


def test_a_long_text_is_read_in_blocks(plain: Text, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    lines = [f"{number:09}\n" for number in range(2 * BLOCK_CHARS // 10)]
    path.write_text("".join(lines))
    windows = read_windows(path, plain, VOCAB, 100, 10**9)
    assert [token for window in windows for token in window] == plain.encode("".join(lines))


def test_the_package_text_is_mixed(plain: Text) -> None:
    ids = [token for window in read_windows(None, plain, VOCAB, 256, 10**9) for token in window]
    stream = plain.stream([])
    assert stream is not None
    text = stream.feed(ids) + stream.finish()
    assert 6000 <= len(text) <= 8000
    for kind in ("def __init__(self", "144 - 108 = 36", '"Did you water', "\n1. ", "\n- ", "| city", "The ferry left"):
        assert kind in text
