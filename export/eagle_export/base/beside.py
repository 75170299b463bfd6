"""Work that two processes do beside each other: values of a graph, in the order in which they are written, and other
work whose results are files.

Rounding a weight is thousands of short steps, for each of which threads of one interpreter wait for each other: two
take as long as one. A copy of the process (a fork, as torch's own loaders of data make) has all that its values are
made of, and computes those of some layers on one thread; the files that it writes are read in turn. Each process takes
the next layer when it has finished one, so that both have as much to do. Where there is no fork, or the copy ends
early, this process computes all of them.
"""

from __future__ import annotations

import gc
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

from eagle_export.base.memory import only_new_objects
from eagle_export.base.parted import PartedTensor

LEAST = 1 << 24  # bytes of values that are computed for which a second process is started
MOST = 1 << 26  # bytes of a layer's largest value: what larger ones are made of takes too much memory to be there twice
LAYER = re.compile(r"(.*\.layers\.\d+)\.")
PAUSE = 0.01  # seconds between looks at a file that is not there yet

Content = Callable[[ir.TensorProtocol], memoryview]


def worth_it(values: Sequence[ir.Value], cores: int) -> bool:
    """Whether values are computed by two processes: those that are only read are written as fast by one."""
    tensors = [value.const_value for value in values]
    computed = [each for each in tensors if isinstance(each, ir.LazyTensor) and not isinstance(each, PartedTensor)]
    total = sum(tensor.nbytes for tensor in computed)
    layers = [tensor.nbytes for tensor in computed if LAYER.match(str(tensor.name))]
    return total >= LEAST and fit_twice(max(layers, default=MOST + 1), cores)


def fit_twice(largest: int, cores: int) -> bool:
    """Whether two processes compute layers whose largest value has so many bytes."""
    return sys.platform == "linux" and cores > 1 and largest <= MOST


def groups(values: Sequence[ir.Value]) -> list[tuple[int, int]]:
    """Returns ranges of values that one process computes: those of a layer, whose weights share what is recorded."""
    starts, last = [0], layer_of(str(values[0].name)) if values else ""
    for index, value in enumerate(values):
        if (name := layer_of(str(value.name))) != last:
            starts.append(index)
            last = name
    return list(zip(starts, [*starts[1:], len(values)], strict=True))


def layer_of(name: str) -> str:
    """Returns the decoder layer that a weight belongs to, or what comes before its last word."""
    layer = LAYER.match(name)
    return layer[1] if layer else name.rsplit(".", 1)[0]


class Claims:
    """Which process computes which group of values: the one that first makes the group's file. ahead: groups between
    the first that nobody has and the copy's next one, so that this process, which needs them in their order, does not
    wait for a group that the copy has just begun."""

    ahead = 2

    def __init__(self, ranges: Sequence[tuple[int, int]], sizes: Sequence[int], place: Path) -> None:
        """sizes: bytes of each group."""
        self._place, self._ranges = place, ranges
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        self._first = [largest] if largest >= self.ahead else []  # at the end one process would wait for it

    def take(self, group: int) -> bool:
        """Returns whether this process is the one that computes a group."""
        try:
            self._file(group).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def of_the_copy(self) -> Iterator[int]:
        """Yields the values that the copy computes."""
        while left := [group for group in range(len(self._ranges)) if not self._file(group).exists()]:
            wanted = self._first.pop() if self._first else left[min(self.ahead, len(left) - 1)]
            if self.take(wanted):
                yield from range(*self._ranges[wanted])

    def _file(self, group: int) -> Path:
        return self._place / f"group {group}"


@contextmanager
def in_two(values: Sequence[ir.Value], content: Content, folder: Path) -> Iterator[Content]:
    """Yields what returns the content of each value, asked for in their order, some of which a copy of the process
    computes. content: computes it. folder: for the copy's files, which are gone at the end. Each process has half of
    the cores meanwhile."""
    given = {id(value.const_value): index for index, value in enumerate(values)}
    ranges = groups(values)
    sizes = [sum(value.const_value.nbytes for value in values[slice(*each)] if value.const_value) for each in ranges]
    group_of = [group for group, each in enumerate(ranges) for _ in range(*each)]
    mine: dict[int, bool] = {}  # group -> whether this process computes it
    with tempfile.TemporaryDirectory(dir=folder) as made:
        place = Path(made)
        claims = Claims(ranges, sizes, place)

        def either(tensor: ir.TensorProtocol) -> memoryview:
            index = given[id(tensor)]
            group = group_of[index]
            if group not in mine:
                mine[group] = claims.take(group)
            made = None if mine[group] else copy.read(str(index))
            return content(tensor) if made is None else made

        with _copied(lambda: _compute(values, claims, content, place), place, halved=True) as copy:
            yield either


@contextmanager
def meanwhile(work: Callable[[Path], None], folder: Path | None = None, *, halved: bool = False) -> Iterator[Copy]:
    """Yields a copy of the process that does some work on one thread. work: called with an empty folder for what it
    makes, which is gone at the end. folder: where that is made; None for the system's place. halved: whether each
    process has half of the cores meanwhile."""
    with tempfile.TemporaryDirectory(dir=folder) as made, _copied(lambda: work(Path(made)), Path(made), halved) as copy:
        yield copy


@contextmanager
def _copied(work: Callable[[], None], made: Path, halved: bool) -> Iterator[Copy]:
    """Yields a copy of the process that does some work; it ends with the context. halved: as of `meanwhile`."""
    every = sorted(os.sched_getaffinity(0))
    half = len(every) // 2
    own, others = (every[:half], every[half:]) if halved else (every, every)
    # Looking for garbage writes into each object, so that process and copy would soon have pages of their own. Those of
    # an export of SmolLM2-135M in int4 take 1.59 GB together, and 1.49 so.
    gc.collect()
    with only_new_objects():
        with warnings.catch_warnings():  # Python warns of forks of processes with threads: the copy uses none of them
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            _end_after(work, others)
        copy = Copy(process, made)
        try:
            os.sched_setaffinity(0, own)
            yield copy
        finally:
            os.sched_setaffinity(0, every)
            copy.end()


def _compute(values: Sequence[ir.Value], claims: Claims, content: Content, place: Path) -> None:
    """Writes the copy's values. An error is met again by the process that waits, which computes what is missing."""
    parent = os.getppid()
    for index in claims.of_the_copy():
        if os.getppid() != parent:
            break
        tensor = values[index].const_value
        assert tensor is not None
        new = place / f"{index}.new"
        new.write_bytes(content(tensor))
        new.rename(place / str(index))


def _end_after(work: Callable[[], None], cores: Sequence[int]) -> None:
    """Does the work of a copy, on one thread and these cores, and ends it: with status 0 unless the work raised an
    error."""
    import torch

    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)
        os.sched_setaffinity(0, cores)
        work()
        status = 0
    except BaseException:
        pass
    finally:
        os._exit(status)


class Copy:
    """A copy of the process, at work. made: the folder with its files."""

    def __init__(self, process: int, made: Path) -> None:
        self._process: int | None = process
        self._status, self._made = 0, made

    def result(self) -> Path | None:
        """Waits for the end of the work. Returns the folder with what it made, None if it failed."""
        self._wait()
        return self._made if self._status == 0 else None

    def read(self, name: str) -> memoryview | None:
        """Waits for a file, and returns its content; None if the copy has ended without it."""
        path = self._made / name
        while not path.exists():
            self._wait(os.WNOHANG)
            if self._process is None and not path.exists():
                return None
            time.sleep(PAUSE)
        content = path.read_bytes()
        path.unlink()
        return memoryview(content)

    def end(self) -> None:
        """Ends it, if it goes on."""
        if self._process is not None:
            os.kill(self._process, signal.SIGKILL)
            self._wait()

    def _wait(self, options: int = 0) -> None:
        """Notes the status if it has ended."""
        if self._process is not None:
            process, status = os.waitpid(self._process, options)
            if process:
                self._process, self._status = None, status
