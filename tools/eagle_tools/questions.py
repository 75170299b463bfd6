"""Reads question sets: JSONL rows of {"question_id", "category", "turns"}, as in the EAGLE-2 paper's six sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle_calib.text_files import json_lines
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError


@dataclass(frozen=True, slots=True)
class Question:
    """turns: the user's messages; each follows the answer to the one before. category: "" if the set has none.
    prompt_set: name of the set, where several are read."""

    id: int | str
    turns: tuple[str, ...]
    category: str = ""
    prompt_set: str = ""


def read_questions(path: Path, count: int | None = None) -> list[Question]:
    """Returns the first `count` questions, or all. Raises RequestError for a file that is empty or no such set."""
    if count is not None and count < 1:
        raise RequestError(f"the number of questions is {count}, but must be 1 or more")
    rows = json_lines(path, RequestError, "give one JSON object with 'turns' per line")
    questions = [_question(f"{path}, line {number}", number, row) for number, row in rows]
    if not questions:
        raise RequestError(f"question file {path} is empty; give one JSON object with 'turns' per line")
    return questions[:count]


def read_sets(paths: Sequence[Path], count: int | None = None) -> list[Question]:
    """Returns the first `count` questions, or all, of each of several sets. A folder stands for its JSONL files.

    With more than one file, a question's set is the file's name without its ending, and its id "SET/ID". Raises
    RequestError, as `read_questions` does."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise RequestError(f"folder {path} has no .jsonl file; give question files, or a folder of them")
        files += inside
    if len(files) == 1:
        return read_questions(files[0], count)
    names = [file.stem for file in files]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise RequestError(f"two question files are named {repeated[0]!r}; rename one")
    return [
        replace(question, id=f"{name}/{question.id}", prompt_set=name)
        for name, file in zip(names, files, strict=True)
        for question in read_questions(file, count)
    ]


def prompt_ids(model: EagleModel, text: str) -> list[int]:
    """Returns the ids of a user's text, through the chat template of a bundle that has one."""
    return model.text.encode([{"role": "user", "content": text}] if model.text.chat else text)


def _question(where: str, number: int, row: dict[str, Any]) -> Question:
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise RequestError(f"{where} has no list of texts under 'turns'; correct the line")
    name, category = row.get("question_id", number), row.get("category") or ""
    if isinstance(name, bool) or not isinstance(name, int | str) or not isinstance(category, str):
        raise RequestError(f"{where}: question_id must be a number or text, and category text; correct the line")
    return Question(name, tuple(turns), category)
