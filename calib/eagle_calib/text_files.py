"""Files of text and of JSON lines that a user gives, read line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import EagleError
from eagle_runtime.base.files import parse_json

SURROGATE = re.compile("[\ud800-\udfff]")


def text_lines(path: Path, error: type[EagleError], newline: str | None = "\n") -> Iterator[str]:
    """Yields the lines of a text file in UTF-8, each with its end, without the mark that Windows' programs put before
    the first. Raises `error` for what is not text.

    newline: as of `open`; by default "\\n" alone ends a line, not the other line ends that a text may contain."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            for line in file:
                if "\0" in line:
                    raise error(f"{path} is not text (it holds zero bytes); give UTF-8 text")
                yield line
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text (byte {problem.start}); save it as UTF-8") from None
    except OSError as problem:
        raise error(f"{path} cannot be read ({problem.strerror}); give a file of text") from None


def json_lines(
    path: Path, error: type[EagleError], advice: str, leave_out: Callable[[str], None] | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (number, object) for each line of a JSONL file that is not blank. Raises `error`, naming "FILE,
    line N", for lines that hold no JSON object, or a surrogate (half a character, which no tokenizer reads).

    leave_out: called with the reason for each such line instead, which is passed over."""
    for number, line in enumerate(text_lines(path, error), 1):
        if not line.strip():
            continue
        try:
            yield number, _row(line, f"{path}, line {number}", error, advice)
        except error as reason:
            if leave_out is None:
                raise
            leave_out(str(reason))


def _row(line: str, where: str, error: type[EagleError], advice: str) -> dict[str, Any]:
    row = parse_json(line, where, error, advice)
    if "\\u" in line and SURROGATE.search(json.dumps(row, ensure_ascii=False)):
        raise error(f"{where} holds half a character (a surrogate); {advice}")
    return row
