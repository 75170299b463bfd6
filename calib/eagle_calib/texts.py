"""Calibration text: reads a file, or the text in the package, into windows of token ids."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any

from eagle_calib.errors import CalibrationError
from eagle_calib.text_files import json_lines, text_lines
from eagle_runtime.text.tokenizer import Text

BLOCK_CHARS = 1 << 16  # characters of plain text that are tokenised at a time


def read_windows(path: Path | None, text: Text, vocab_size: int, window: int, max_tokens: int) -> list[list[int]]:
    """Returns the first max_tokens tokens of a file (None: of the package's text) in windows of at most `window`
    tokens.

    A file is plain text in UTF-8, or JSONL with "turns" (the first is read), "text" or "ids" in each row; each row
    starts a window. Later windows of a text begin with the tokenizer's prefix (bos) too. Raises CalibrationError."""
    name = "the calibration text" if path is None else str(path)
    prefix = _prefix(text) if text.available else []
    step = max(1, window - len(prefix))
    windows: list[list[int]] = []
    room = max_tokens
    for where, content in _contents(path):
        ids = _encoded(where, content, text, vocab_size, prefix)
        start = 0
        while start < len(ids) and room > 0:
            piece = ids[:window] if start == 0 else [*prefix, *ids[start : start + step]]
            start += window if start == 0 else step
            windows.append(piece[:room])
            room -= len(windows[-1])
        if room <= 0:
            break
    if all(len(one) < 2 for one in windows):  # a head reads a token and the one after it
        raise CalibrationError(f"{name} holds no text of two tokens; give some to calibrate on")
    return windows


def _prefix(text: Text) -> list[int]:
    """Returns the ids that the tokenizer puts before every text."""
    pairs = zip(text.encode(""), text.encode("a"), strict=False)
    return [one for one, other in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _contents(path: Path | None) -> Iterator[tuple[str, str | list[Any]]]:
    """Yields (where, text or ids) of each row or block."""
    if path is None:
        yield "the calibration text", (resources.files("eagle_calib") / "text.txt").read_text(encoding="utf-8")
    elif path.suffix == ".jsonl":
        for number, row in json_lines(path, CalibrationError, "give 'turns', 'text' or 'ids' in each line"):
            where = f"{path}, line {number}"
            yield where, _row(where, row)
    else:
        for block in joined(text_lines(path, CalibrationError, newline=None), BLOCK_CHARS):
            yield str(path), block


def _row(where: str, row: dict[str, Any]) -> str | list[Any]:
    turns, text, ids = row.get("turns"), row.get("text"), row.get("ids")
    if isinstance(ids, list):
        return ids
    if isinstance(text, str):
        return text
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return str(turns[0])
    raise CalibrationError(f"{where} has no 'turns', 'text' or 'ids' to calibrate on; correct the line")


def _encoded(where: str, content: str | list[Any], text: Text, vocab_size: int, prefix: list[int]) -> list[int]:
    """Returns the ids of a text or as given. A text that has the prefix itself, as a chat template writes it, gets it
    once. Raises CalibrationError."""
    if isinstance(content, str):
        if not text.available:
            raise CalibrationError(f"{where} is text, but the bundle has no tokenizer.json; give rows of 'ids' as data")
        content = text.encode(content) if content else []
        if prefix and content[: 2 * len(prefix)] == 2 * prefix:
            content = content[len(prefix) :]
    if wrong := [item for item in content if type(item) is not int or not 0 <= item < vocab_size]:
        raise CalibrationError(
            f"{where}: {wrong[0]!r} is not an id of the vocabulary of {vocab_size}; correct the text"
        )
    return content


def joined(lines: Iterable[str], chars: int) -> Iterator[str]:
    """Yields blocks of whole lines, each as short as possible with at least `chars` characters; the last may be
    shorter."""
    block: list[str] = []
    size = 0
    for line in lines:
        block.append(line)
        size += len(line)
        if size >= chars:
            yield "".join(block)
            block, size = [], 0
    if block:
        yield "".join(block)
