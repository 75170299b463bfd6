"""What one generation showed: a row of the output file, and the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from eagle_runtime import Result
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.errors import RequestError


class Setup(NamedTuple):
    """What is compared: a method, with what it runs on. bundle: name of the folder."""

    method: str
    precision: str
    backend: str
    bundle: str
    temperature: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt. id: of the question, from the second turn on followed by /2, /3, ..."""

    id: int | str
    category: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One generation. Seconds; tok_s: tokens after the first pass per second after it. accepted_per_depth[d]: passes
    that accepted d + 1 drafted tokens or more. The three parts and the depths are None where they are not told."""

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
    accepted_per_depth: tuple[int, ...] | None
    draft_s: float | None
    verify_s: float | None
    host_s: float | None
    token_ids: tuple[int, ...]

    @property
    def setup(self) -> Setup:
        return Setup(self.method, self.precision, self.backend, self.bundle, self.temperature)


def row_of(setup: Setup, asked: Asked, result: Result) -> Row:
    """The row of a generation with a bundle."""
    stats = result.stats
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
    )


def precision_name(manifest: Manifest) -> str:
    """int8, or where the head has another: int8, head fp32."""
    target, draft = manifest.precision["target"], manifest.precision.get("draft")
    return target if draft in (None, target) else f"{target}, head {draft}"


class RowFile:
    """A new JSONL file that the rows of a prompt are in as soon as all have answered it, so that a run that is stopped
    keeps them."""

    def __init__(self, path: Path) -> None:
        """Raises RequestError if the file has content, which would be lost or mixed with another run's, or cannot be
        written."""
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
    """The rows of a file; a last line that was cut off is left out. Raises RequestError for what is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"rows file {path} cannot be read ({error})") from None
    return [_row(path, number, line) for number, line in enumerate(text.split("\n")[:-1], 1)]


def _row(path: Path, number: int, line: str) -> Row:
    try:
        data = json.loads(line)
        depths = data.pop("accepted_per_depth")
        ids = tuple(data.pop("token_ids"))
        return Row(**data, accepted_per_depth=None if depths is None else tuple(depths), token_ids=ids)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RequestError(f"{path}, line {number} is no row of eagle-bench --output") from None


def by_setup(rows: Sequence[Row]) -> dict[Setup, list[Row]]:
    """Rows grouped, in the order in which their setups first appear when sorted by temperature."""
    groups: dict[Setup, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.temperature):
        groups.setdefault(row.setup, []).append(row)
    return groups
