"""The rows of the bench, one per generation, and the file that keeps them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eagle_calib.text_files import text_lines
from eagle_runtime import Result
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import Manifest


class Setup(NamedTuple):
    """A compared setup: a method, and what it runs on. bundle: name of the folder."""

    method: str
    precision: str
    backend: str
    bundle: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt. id: that of the question; from the second turn on with /2, /3, ... appended. prompt_set: that of the
    question."""

    id: int | str
    category: str
    token_ids: tuple[int, ...]
    prompt_set: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One generation; times are in seconds. tok_s: tokens after the first forward pass per second after it.
    accepted_per_depth[d]: number of passes that accepted d + 1 drafted tokens or more. Depths and draft_s, verify_s,
    host_s are None if they are unknown. counters: of the GPU's work (session.counters); None where none are kept.
    prompt_set: "" if there was one set."""

    method: str
    precision: str
    backend: str
    bundle: str
    prompt_id: int | str
    category: str
    temperature: float
    prompt_tokens: int
    new_tokens: int
    target_passes: int
    prefill_s: float
    decode_s: float
    tok_s: float
    tau: float
    token_ids: tuple[int, ...]
    accepted_per_depth: tuple[int, ...] | None = None
    draft_s: float | None = None
    verify_s: float | None = None
    host_s: float | None = None
    counters: dict[str, int] | None = None
    prompt_set: str = ""

    @property
    def setup(self) -> Setup:
        return Setup(self.method, self.precision, self.backend, self.bundle, self.temperature)


def row_of(setup: Setup, asked: Asked, result: Result) -> Row:
    """Returns the row of a generation with a bundle, without counters."""
    stats = result.usage
    return Row(
        **setup._asdict(),
        prompt_id=asked.id,
        category=asked.category,
        prompt_tokens=stats.prompt_tokens,
        new_tokens=stats.new_tokens,
        target_passes=stats.target_passes,
        prefill_s=stats.prefill_s,
        decode_s=stats.decode_s,
        tok_s=stats.tokens_per_s,
        tau=stats.tau,
        accepted_per_depth=stats.accepted_per_depth,
        draft_s=stats.draft_s,
        verify_s=stats.verify_s,
        host_s=stats.host_s,
        token_ids=result.token_ids,
        prompt_set=asked.prompt_set,
    )


def foreign_row(
    setup: Setup, asked: Asked, tokens: Sequence[int], first: int, passes: int, prefill_s: float, decode_s: float
) -> Row:
    """Returns the row of a generation with another engine: its tokens, of which the first forward pass gave `first`,
    the passes after that, and the seconds of both."""
    later = len(tokens) - first
    return Row(
        **setup._asdict(),
        prompt_id=asked.id,
        category=asked.category,
        prompt_set=asked.prompt_set,
        prompt_tokens=len(asked.token_ids),
        new_tokens=len(tokens),
        target_passes=passes,
        prefill_s=prefill_s,
        decode_s=decode_s,
        tok_s=later / decode_s if passes else 0.0,
        tau=later / passes if passes else 1.0,
        token_ids=tuple(tokens),
    )


def precision_name(manifest: Manifest) -> str:
    """Returns the precision as in "int8", or if the head has another one as in "int8, head fp32"."""
    target, draft = manifest.precision["target"], manifest.precision.get("draft")
    return target if draft in (None, target) else f"{target}, head {draft}"


class RowFile:
    """A new JSONL file. Rows are appended one by one, so that a stopped run keeps them."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError if the file cannot be written, or has content, which would be mixed with this run's."""
        self._path = path
        with self._errors():
            if path.exists() and path.stat().st_size:
                raise RequestError(f"{path} holds rows already; choose another name, or remove it")
            path.touch()

    def add(self, row: Row) -> None:
        with self._errors(), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RequestError(f"rows file {self._path} cannot be written ({error.strerror})") from None


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of a file without an incomplete last line. Raises RequestError for a file without rows' form."""
    lines = (line for line in text_lines(path, RequestError) if line.endswith("\n"))
    return [_row(path, number, line) for number, line in enumerate(lines, 1)]


def _row(path: Path, number: int, line: str) -> Row:
    try:
        data = json.loads(line)
        depths = data.pop("accepted_per_depth")
        ids = tuple(data.pop("token_ids"))
        return Row(**data, accepted_per_depth=None if depths is None else tuple(depths), token_ids=ids)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RequestError(f"{path}, line {number} is not a row of eagle-bench") from None


def speeds(rows: Sequence[Row]) -> dict[int | str, float]:
    """Returns prompt_id -> tokens per second. An answer that ended with its first forward pass has none."""
    return {row.prompt_id: row.tok_s for row in rows if row.tok_s}


def by_setup(rows: Sequence[Row]) -> dict[Setup, list[Row]]:
    """Returns the rows of each setup; setups are sorted by temperature, then in the order of their first rows."""
    groups: dict[Setup, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.temperature):
        groups.setdefault(row.setup, []).append(row)
    return groups
