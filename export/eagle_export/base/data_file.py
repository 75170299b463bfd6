"""The weights of a graph in a file next to it, written tensor by tensor, so that an export that was stopped goes on.

A journal lists the finished tensors, one line of JSON each, with the SHA-256 of the file up to its end. A later run
reads them again and goes on after the last whose hash is right: after a power cut the journal may list more than the
disk holds.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir

from eagle_export.base.beside import in_two, worth_it
from eagle_runtime.base.files import replacing
from eagle_runtime.machine.host import cores, threads_allowed

INLINE = 256  # bytes; tensors that are no larger are in the graph's own file
PIECE = 1 << 26  # bytes that are written or read at a time

Report = Callable[[str, int], None]  # name of the tensor whose turn it is, bytes of those before it


@dataclass(frozen=True, slots=True)
class Entry:
    """A finished tensor. sha256: of the file up to its end."""

    name: str
    length: int
    sha256: str


def external(model: ir.Model) -> list[ir.Value]:
    """The initializers whose values are in the file of weights, in its order."""
    values = model.graph.initializers.values()
    return [value for value in values if value.const_value is not None and value.const_value.nbytes > INLINE]


def write(values: Sequence[ir.Value], path: Path, journal: Path, report: Report) -> str:
    """Writes the values one after the other, but for those that an earlier run finished. Returns the SHA-256 of the
    file. Raises OSError, and what the values raise when they are computed."""
    entries = _entries(journal)
    with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
        hashed, count = _finished(values, entries, file, report)
        done = sum(entry.length for entry in entries[:count])
        file.truncate(done)
        file.seek(done)
        with replacing(journal, journal.with_suffix(".new")) as new:
            new.write_text("".join(map(_line, entries[:count])), encoding="utf-8")
        left = values[count:]
        way = (
            in_two(left, _content, path.parent)
            if worth_it(left, threads_allowed() or cores())
            else nullcontext(_content)
        )
        with journal.open("a", encoding="utf-8") as lines, way as content_of:
            for value in left:
                assert value.const_value is not None
                report(str(value.name), done)
                content = content_of(value.const_value)
                _write(file, content)
                hashed.update(content)
                done += content.nbytes
                lines.write(_line(Entry(str(value.name), content.nbytes, hashed.hexdigest())))
                lines.flush()
                del content  # else it stays in memory while the next one is computed
    return str(hashed.hexdigest())


@contextmanager
def pointing_to(values: Sequence[ir.Value], path: Path) -> Iterator[None]:
    """Lets the values refer to the file that `write` wrote, until the end."""
    tensors, start = [value.const_value for value in values], 0
    try:
        for value, tensor in zip(values, tensors, strict=True):
            assert tensor is not None
            shape, name = ir.Shape(tensor.shape.numpy()), str(value.name)
            value.const_value = ir.ExternalTensor(
                path.name, start, tensor.nbytes, tensor.dtype, shape=shape, name=name, base_dir=path.parent
            )
            start += tensor.nbytes
        yield
    finally:
        for value, tensor in zip(values, tensors, strict=True):
            value.const_value = tensor


def _entries(journal: Path) -> list[Entry]:
    """The journal's lines up to the first that is not an entry, such as one that was cut short."""
    entries: list[Entry] = []
    try:
        for line in journal.read_text(encoding="utf-8").splitlines():
            entries.append(Entry(**json.loads(line)))
    except (OSError, ValueError, TypeError):
        pass
    return entries


def _finished(values: Sequence[ir.Value], entries: Sequence[Entry], file: BinaryIO, report: Report) -> tuple[Any, int]:
    """Returns the hash of the tensors in the file that are whole and in their places, and their number."""
    hashed, done = hashlib.sha256(), 0
    for count, (value, entry) in enumerate(zip(values, entries, strict=False)):
        assert value.const_value is not None
        if (entry.name, entry.length) != (value.name, value.const_value.nbytes):
            return hashed, count
        report(entry.name, done)
        longer, left = hashed.copy(), entry.length
        while left and (piece := file.read(min(left, PIECE))):
            longer.update(piece)
            left -= len(piece)
        if longer.hexdigest() != entry.sha256:
            return hashed, count
        hashed, done = longer, done + entry.length
    return hashed, min(len(values), len(entries))


def _line(entry: Entry) -> str:
    return json.dumps(asdict(entry)) + "\n"


def _content(tensor: ir.TensorProtocol) -> memoryview:
    """Returns a tensor's bytes, as the file holds them."""
    if tensor.dtype.bitwidth < 8 or sys.byteorder != "little":
        return memoryview(tensor.tobytes())
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _write(file: BinaryIO, content: memoryview) -> None:
    done = 0
    while done < content.nbytes:  # the system may write less than it is given, before a full disk or above 2 GB
        done += file.write(content[done : done + PIECE])
