"""Reads question sets: JSONL rows of {"question_id", "category", "turns"}, as in the EAGLE-2 paper's six sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_runtime.errors import RequestError
from eagle_runtime.files import json_lines


@dataclass(frozen=True, slots=True)
class Question:
    """turns: the user's messages; each follows the answer to the one before. category: "" if the set has none."""

    id: int | str
    turns: tuple[str, ...]
    category: str = ""


def read_questions(path: Path, count: int | None = None) -> list[Question]:
    """Returns the first `count` questions, or all. Raises RequestError for a file that is empty or no such set."""
    if count is not None and count < 1:
        raise RequestError(f"the number of questions is {count}, but must be 1 or more")
    rows = json_lines(path, RequestError, "give one JSON object with 'turns' per line")
    questions = [_question(f"{path}, line {number}", number, row) for number, row in rows]
    if not questions:
        raise RequestError(f"question file {path} is empty; give one JSON object with 'turns' per line")
    return questions[:count]


def _question(where: str, number: int, row: dict[str, Any]) -> Question:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(f"{where} has no list of texts under 'turns'; correct the line")
    name, category = row.get("question_id", number), row.get("category") or ""
    if isinstance(name, bool) or not isinstance(name, int | str) or not isinstance(category, str):
        raise RequestError(f"{where}: question_id must be a number or text, and category text; correct the line")
    return Question(name, tuple(turns), category)
