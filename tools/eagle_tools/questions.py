"""Question sets: JSONL rows of {"question_id", "category", "turns"}, as the EAGLE-2 paper's six sets have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime.errors import RequestError


@dataclass(frozen=True, slots=True)
class Question:
    """turns: what the user says, one after another, each after an answer to the one before. category: "" if the set has
    none."""

    id: int | str
    turns: tuple[str, ...]
    category: str = ""


def read_questions(path: Path, count: int | None = None) -> list[Question]:
    """The first `count` questions, or all. Raises RequestError for a file that is not such a set, or is empty."""
    if count is not None and count < 1:
        raise RequestError(f"the number of questions is {count}, but must be 1 or more")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028, inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"question file {path} cannot be read as UTF-8 text ({error})") from None
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise RequestError(f"question file {path} is empty; give one JSON object with 'turns' per line")
    return questions[:count]


def _question(path: Path, number: int, line: str) -> Question:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise RequestError(f"{path}, line {number} is no JSON; give one object with 'turns' per line") from None
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(f"{path}, line {number} has no list of texts under 'turns'; correct the line")
    name, category = row.get("question_id", number), row.get("category") or ""
    if isinstance(name, bool) or not isinstance(name, int | str) or not isinstance(category, str):
        raise RequestError(
            f"{path}, line {number}: question_id must be a number or text, and category text; correct the line"
        )
    return Question(name, tuple(turns), category)
