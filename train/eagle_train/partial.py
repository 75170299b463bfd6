"""A JSONL file that appears complete or not at all, and next to it the rows of it that are finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from eagle_calib.text_files import json_lines
from eagle_train.errors import TrainError

ADVICE = "delete it to begin anew"


class PartialFile:
    """NAME.partial.jsonl next to an output: rows in the order in which they were finished, each with its number and its
    run."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self.path = output.with_name(f"{output.stem}.partial.jsonl")
        self._file: BinaryIO | None = None
        self._run = ""

    @contextmanager
    def opened(self, run: str, resume: bool) -> Iterator[set[int]]:
        """Opens the file to add rows. Yields the numbers of those that it has. If none was added, a new file is
        removed.

        run: what decides the rows. Raises TrainError for a file of another run, or for any if resume is False."""
        self._run, done = run, set[int]()
        if self.path.is_file():
            if not resume:
                raise TrainError(
                    f"{self.path} holds what an interrupted run has written; give --resume to go on, or {ADVICE}"
                )
            _drop_torn(self.path)
            for row in self._rows():
                if row["run"] != run:
                    raise TrainError(
                        f"{self.path} is of a run with other prompts, target or settings; give those, or {ADVICE}"
                    )
                done.add(row["number"])
        try:
            with self.path.open("ab") as self._file:
                yield done
        finally:
            if self.path.is_file() and not self.path.stat().st_size:
                self.path.unlink()

    def add(self, number: int, row: dict[str, Any]) -> None:
        """Write a row, at once."""
        assert self._file is not None
        line = json.dumps({**row, "number": number, "run": self._run}, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def complete(self, work: Path, total: int) -> None:
        """Write the output: all rows by their numbers, without these.

        work: a folder to make, on the same file system."""
        starts: dict[int, int] = {}
        with self.path.open("rb") as file:
            start = 0
            for line in file:
                starts[json.loads(line)["number"]] = start
                start += len(line)
            work.mkdir()
            with (work / self._output.name).open("w", encoding="utf-8") as new:
                for number in range(total):
                    file.seek(starts[number])
                    row = json.loads(file.readline())
                    kept = {name: value for name, value in row.items() if name not in ("number", "run")}
                    new.write(json.dumps(kept, ensure_ascii=False) + "\n")
        (work / self._output.name).replace(self._output)
        self.path.unlink()

    def _rows(self) -> Iterator[dict[str, Any]]:
        for number, row in json_lines(self.path, TrainError, ADVICE):
            if type(row.get("number")) is not int or "run" not in row:
                raise TrainError(f"{self.path}, line {number} is not a row of an interrupted run; {ADVICE}")
            yield row


def _drop_torn(path: Path) -> None:
    """Cut off a last line without an end: the process was killed while it wrote it."""
    with path.open("rb+") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))
