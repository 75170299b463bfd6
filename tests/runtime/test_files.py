"""File access: JSON objects, JSON lines, and writes that replace a file whole."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path

import pytest

from eagle_calib.text_files import json_lines, text_lines
from eagle_runtime.base.errors import EagleError, RequestError
from eagle_runtime.base.files import parse_json, read_json, replacing


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not readable JSON"),
        (b"{", "is not readable JSON"),
        (b"\xff\xfe", "is not readable JSON"),
        (b"[" * 100_000, "is not readable JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not readable JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b"null", "does not hold a JSON object"),
    ],
)
def test_what_is_no_json_object_is_one_sentence(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=rf"^{re.escape(str(path))} {problem}.*; write it again$") as caught:
        read_json(path, 1 << 20, RequestError, "write it again")
    assert "\n" not in str(caught.value)
    with pytest.raises(RequestError, match=rf"^the text {problem}"):
        parse_json(content, "the text", RequestError, "write it again")


def test_a_json_file_is_read_within_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(RequestError, match=rf"^{re.escape(str(path))} is missing; give a folder$"):
        read_json(path, 100, RequestError, "write it again", missing="give a folder")
    words = "No such file or directory" if os.name == "posix" else ".*"
    with pytest.raises(RequestError, match=rf"cannot be read \({words}\); see that this user may"):
        read_json(path, 100, RequestError, "write it again")
    with pytest.raises(RequestError, match="is not a regular file"):
        read_json(tmp_path, 100, RequestError, "write it again")
    path.write_text(json.dumps({"a": "ä" * 10}))
    assert read_json(path, 100, RequestError, "write it again") == {"a": "ä" * 10}
    with pytest.raises(RequestError, match="is larger than"):
        read_json(path, 20, RequestError, "write it again")


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first, second = {"text": "a\u2028b\x85c"}, {"text": "d"}
    path.write_text(json.dumps(first, ensure_ascii=False) + "\r\n\n \n" + json.dumps(second) + "\r", encoding="utf-8")
    assert list(json_lines(path, RequestError, "correct the line")) == [
        (1, first),
        (4, second),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "line 2 is not readable JSON"),
        (b"[" * 100_000, "line 2 is not readable JSON"),
        (b'{"a":' * 100_000, "line 2 is not readable JSON"),
        (b"[1]", "line 2 does not hold a JSON object"),
        (rb'{"a": ["b\ud800"]}', "line 2 holds half a character"),
        (rb'{"\udfff": 1}', "line 2 holds half a character"),
        (b"\xff", r"is not UTF-8 text \(byte \d+\)"),
        (b"\0", "is not text"),
    ],
)
def test_a_line_that_holds_no_object_is_named(line: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "\\ud83d\\ude00"}\n' + line + b"\n")
    with pytest.raises(RequestError, match=problem) as caught:
        list(json_lines(path, RequestError, "correct the line"))
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(EagleError, match=rf"^{re.escape(str(path))} cannot be read \("):
            list(text_lines(path, EagleError))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as new:
        new.write_text("old")
        assert not path.exists()

    def interrupted() -> None:
        with replacing(path) as new:
            new.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_threads_may_replace_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"

    def write(letter: str) -> None:
        for _ in range(50):
            with replacing(path) as new:
                new.write_text(letter * 10_000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(path.read_text())) == 1 and list(tmp_path.iterdir()) == [path]
