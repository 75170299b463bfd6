"""Work that two processes do beside each other: values of a graph, in the order in which they are written, and other
work whose results are files.

Rounding a weight is thousands of short steps, for each of which threads of one interpreter wait for each other: two
take as long as one. A copy of the process (a fork, as torch's own loaders of data make) has all that its values are
made of, and computes those of every other layer on one thread; the files that it writes are read in turn. Where there
is no fork, or the copy ends early, this process computes all of them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from eagle_export.base.parted import PartedTensor

LEAST = 1 << 24  # bytes of values that are computed for which a second process is started
MOST = 1 << 24  # bytes of a layer's largest value: what larger ones are made of takes too much memory to be there twice
LAYER = re.compile(r"(.*\.layers\.\d+)\.")
PAUSE = 0.01  # seconds between looks at a file that is not there yet

Content = Callable[[ir.TensorProtocol], memoryview]


def worth_it(values: Sequence[ir.Value], cores: int) -> bool:
    """Whether values are computed by two processes: those that are only read are written as fast by one."""
    computed = [value.const_value for value in values if _is_computed(value.const_value)]
    sizes = [tensor.nbytes for tensor in computed if tensor is not None]
    layers = [tensor.nbytes for tensor in computed if tensor is not None and LAYER.match(str(tensor.name))]
    return sys.platform == "linux" and cores > 1 and sum(sizes) >= LEAST and max(layers, default=MOST + 1) <= MOST


def _is_computed(tensor: ir.TensorProtocol | None) -> bool:
    return isinstance(tensor, ir.LazyTensor) and not isinstance(tensor, PartedTensor)


def groups(values: Sequence[ir.Value]) -> list[tuple[int, int]]:
    """Returns ranges of values that one process computes: those of a layer, whose weights share what is recorded."""
    starts, last = [0], _group(values[0]) if values else ""
    for index, value in enumerate(values):
        if (name := _group(value)) != last:
            starts.append(index)
            last = name
    return list(zip(starts, [*starts[1:], len(values)], strict=True))


def _group(value: ir.Value) -> str:
    name = str(value.name)
    layer = LAYER.match(name)
    return layer[1] if layer else name.rsplit(".", 1)[0]


def shared_out(values: Sequence[ir.Value]) -> list[bool]:
    """Returns for each value whether the copy computes it: the largest group, and so many of the others, evenly spread,
    that both have as much to do."""
    ranges = groups(values)
    sizes = [
        sum(value.const_value.nbytes for value in values[start:stop] if value.const_value) for start, stop in ranges
    ]
    total, largest = sum(sizes), sizes.index(max(sizes))
    share = max(0.0, total / 2 - sizes[largest]) / max(1, total - sizes[largest])
    seen = theirs = 0
    result = []
    for index, (start, stop) in enumerate(ranges):
        to_copy = index == largest or theirs < share * seen
        if index != largest:
            seen, theirs = seen + sizes[index], theirs + sizes[index] * to_copy
        result += [to_copy] * (stop - start)
    return result


@contextmanager
def in_two(values: Sequence[ir.Value], content: Content, folder: Path) -> Iterator[Content]:
    """Yields what returns the content of each value, asked for in their order, some of which a copy of the process
    computes. content: computes it. folder: for the copy's files, which are gone at the end. Each process has half of
    the cores meanwhile."""
    given = {id(value.const_value): index for index, value in enumerate(values)}
    theirs = shared_out(values)
    every = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=folder) as made:
        place = Path(made)
        process = _fork()
        if process == 0:
            os.sched_setaffinity(0, every[len(every) // 2 :])
            _compute([(index, value) for index, value in enumerate(values) if theirs[index]], content, place)
        copy = _Copy(process)

        def either(tensor: ir.TensorProtocol) -> memoryview:
            index = given[id(tensor)]
            made = copy.read(place / str(index)) if theirs[index] else None
            return content(tensor) if made is None else made

        try:
            os.sched_setaffinity(0, every[: len(every) // 2])
            yield either
        finally:
            os.sched_setaffinity(0, every)
            copy.end()


@contextmanager
def meanwhile(work: Callable[[Path], None], folder: Path) -> Iterator[Running]:
    """Yields a copy of the process that does some work on one thread. work: called with an empty folder for what it
    makes, which is gone at the end. folder: where that is made."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        process = _fork()
        if process == 0:
            _end_after(lambda: work(Path(made)))
        copy = _Copy(process)
        try:
            yield Running(copy, Path(made))
        finally:
            copy.end()


class Running:
    """A copy of the process, at work."""

    def __init__(self, copy: _Copy, made: Path) -> None:
        self._copy, self._made = copy, made

    @property
    def ended(self) -> bool:
        """Whether the copy has ended."""
        return self._copy.ended()

    def result(self) -> Path | None:
        """Waits for the end of the work. Returns the folder with what it made, None if it failed."""
        return self._made if self._copy.wait() else None


def _fork() -> int:
    with warnings.catch_warnings():  # Python warns of forks of processes with threads: the copy uses none of them
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _compute(values: Sequence[tuple[int, ir.Value]], content: Content, place: Path) -> None:
    """Writes the copy's share and ends it. An error is met again by the process that waits, which then computes what is
    missing."""
    parent = os.getppid()

    def write() -> None:
        for index, value in values:
            if os.getppid() != parent:
                break
            assert value.const_value is not None
            new = place / f"{index}.new"
            new.write_bytes(content(value.const_value))
            new.rename(place / str(index))

    _end_after(write)


def _end_after(work: Callable[[], None]) -> None:
    """Does the work of a copy, on one thread, and ends it: with status 0 unless the work raised an error."""
    import torch

    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:
        pass
    finally:
        os._exit(status)


class _Copy:
    """The other process."""

    def __init__(self, process: int) -> None:
        self._process: int | None = process
        self._status = 0

    def read(self, path: Path) -> memoryview | None:
        """Waits for a file, and returns its content; None if the copy has ended without it."""
        while not path.exists():
            if self.ended() and not path.exists():
                return None
            time.sleep(PAUSE)
        content = path.read_bytes()
        path.unlink()
        return memoryview(content)

    def end(self) -> None:
        """Ends it, if it goes on."""
        if self._process is not None:
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)
            self._process = None

    def wait(self) -> bool:
        """Waits for its end. Returns whether it did all of its work."""
        if self._process is not None:
            self._status = os.waitpid(self._process, 0)[1]
            self._process = None
        return self._status == 0

    def ended(self) -> bool:
        """Whether it has ended."""
        if self._process is not None:
            process, status = os.waitpid(self._process, os.WNOHANG)
            if process:
                self._process, self._status = None, status
        return self._process is None
