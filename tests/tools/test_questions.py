"""Question sets: what is read, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_runtime.base.errors import RequestError
from eagle_tools.questions import Question, read_questions


def test_reads_turns_in_order_and_the_first_few(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question_id": 7, "turns": ["a", "b"], "category": "x"}\n\n{"turns": ["c"]}\n', encoding="utf-8")
    assert read_questions(path) == [Question(7, ("a", "b"), "x"), Question(3, ("c",))]
    assert read_questions(path, 1) == [Question(7, ("a", "b"), "x")]


def test_a_line_ends_at_its_end_alone(tmp_path: Path) -> None:
    """Not at characters that some take for line ends, which JSON lets stand in a text."""
    text = "a\u2028b\u2029c\x85d"
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"turns": [text]}, ensure_ascii=False) + "\r\n" + '{"turns": ["e"]}', encoding="utf-8")
    assert [question.turns for question in read_questions(path)] == [(text,), ("e",)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\xff\xfe", "UTF-8"),
        (b"not json", "line 1 is not readable JSON"),
        (b"[1]", "line 1 does not hold a JSON object"),
        (b'{"turns": ["a"]}\n{"turns": []}', "line 2 has no list of texts"),
        (b'{"turns": "abc"}', "line 1 has no list of texts"),
        (b'{"turns": [""]}', "line 1 has no list of texts"),
        (b'{"turns": [["a"]]}', "line 1 has no list of texts"),
        (b"[" * 100_000, "line 1 is not readable JSON"),
        (b'{"turns": ["a"], "question_id": [1]}', "line 1: question_id must be"),
        (b'{"turns": ["a"], "question_id": true}', "line 1: question_id must be"),
        (b'{"turns": ["a"], "category": ["x"]}', "line 1: question_id must be .*, and category text"),
    ],
)
def test_refuses_what_is_no_question_set(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_bytes(content)
    with pytest.raises(RequestError, match=words):
        read_questions(path)


def test_refuses_a_missing_file_and_a_count_below_one(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        read_questions(tmp_path / "none.jsonl")
    with pytest.raises(RequestError, match="must be 1 or more"):
        read_questions(tmp_path / "none.jsonl", 0)
