"""Reads held-out text as windows of ids. A file is plain UTF-8 text, or JSONL with a {"text"} or {"ids"} per row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import json_lines, text_lines

WINDOW = 512  # default maximum tokens of a window
TOKEN_CHARS = 16  # assumed maximum mean length of a token in characters; limits how much of a long file is encoded


def read_windows(path: Path, model: EagleModel, longest: int, limit: int) -> list[list[int]]:
    """Returns windows of 2 to `longest` ids, at most `limit` ids in all, encoded by the model's tokenizer. No window
    crosses the end of a text. Raises RequestError for a file that cannot be used."""
    if limit < 2:
        raise RequestError(f"the number of tokens is {limit}, but must be 2 or more")
    windows: list[list[int]] = []
    left = limit
    for ids in _texts(path, model, limit * TOKEN_CHARS):
        for start in range(0, min(len(ids), left), longest):
            window = ids[start : min(start + longest, left)]
            if len(window) > 1:
                windows.append(window)
        left -= min(len(ids), left)
        if left < 2:
            break
    if not windows:
        raise RequestError(f"{path} holds no text of two tokens or more; give held-out text")
    return windows


def _texts(path: Path, model: EagleModel, chars: int) -> Iterator[list[int]]:
    if path.suffix != ".jsonl":
        yield model.text.encode("".join(text_lines(path, RequestError, newline=None))[:chars])
        return
    for number, row in json_lines(path, RequestError, "give one object with 'text' or 'ids' per line"):
        yield _row(f"{path}, line {number}", row, model)


def _row(where: str, row: dict[str, Any], model: EagleModel) -> list[int]:
    if isinstance(row.get("text"), str):
        return model.text.encode(row["text"])
    vocab = model.manifest.target.vocab_size
    ids = row.get("ids")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab for i in ids):
        raise RequestError(f"{where} has neither a 'text' nor 'ids' below {vocab}; correct the line")
    return ids
