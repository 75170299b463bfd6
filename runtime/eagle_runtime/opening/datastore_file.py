"""Reading a datastore: a user's own text, tokenised with the bundle's tokenizer and indexed (drafting.datastore)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import RequestError, why
from eagle_runtime.drafting.datastore import Datastore
from eagle_runtime.opening.opened import OpenBundle

PIECE = 1 << 16  # characters that are tokenised at once, up to the end of a line
LAYOUT = 'a line of a JSONL datastore is a string, or an object with "text" (a string) or "turns" (strings)'


def with_datastore(
    bundle: OpenBundle, path: str | Path | None, on_progress: Callable[[str, int, int], None] | None = None
) -> OpenBundle:
    """Returns the bundle with the index of a file; the bundle itself for None. on_progress: called with "index", what
    is done of it, and all of it.

    Raises RequestError for a file that cannot be read or holds nothing, and for a bundle without a tokenizer, which is
    closed then."""
    if path is None:
        return bundle
    report = on_progress or (lambda stage, done, total: None)
    try:
        return dataclasses.replace(bundle, datastore=_indexed(bundle, Path(path), lambda *part: report("index", *part)))
    except BaseException:
        bundle.engines.close()
        raise


def _indexed(bundle: OpenBundle, path: Path, report: Callable[[int, int], None]) -> Datastore:
    if not bundle.text.available:
        raise RequestError(f"the datastore {path} is text, but the bundle has no tokenizer; export it with one")
    texts = list(_texts(path))
    total = sum(map(len, texts)) or 1
    documents, done = [], 0
    vocab = bundle.manifest.target.vocab_size  # the tokenizer may have tokens beyond it, which are never drawn
    for text in texts:
        ids: list[int] = []
        for piece in _pieces(text):
            ids += [token for token in bundle.text.encode_rendered(piece) if token < vocab]
            done += len(piece)
            report(done // 2, total)  # the other half is the sorting
        documents.append(ids)
    if not any(documents):
        raise RequestError(f"the datastore {path} holds no text; give a file with some, or leave it out")
    return Datastore(documents, lambda part, parts: report(total // 2 + (total - total // 2) * part // parts, total))


def _texts(path: Path) -> Iterator[str]:
    """The documents of a file. Raises RequestError."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the datastore {path} cannot be read as UTF-8 text ({why(error)}); give another file"
        ) from None
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield from _documents(json.loads(line))
            except (ValueError, RecursionError):
                raise RequestError(f"line {number} of {path} cannot be used: {LAYOUT}") from None


def _documents(value: Any) -> list[str]:
    """The documents of a JSONL line. Raises ValueError."""
    if isinstance(value, dict):
        value = value.get("text", value.get("turns"))
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return texts


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end
