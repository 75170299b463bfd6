"""What layers with a state and no keys (Qwen3.5's, Granite 4's) hold of a text.

A layer's state is that of the text before the last forward pass, since it cannot be taken back to fewer tokens, and a
tree's rows are not all kept. The rows of the last pass that were kept lie beside it. The next pass computes the state
after them, in other memory, before it computes its own rows.

    pass over a tree of 3    reads the state of 100 tokens;          writes rows 100, 101, 102
    keep 2 of them
    pass over a tree of 4    reads that state, and rows 100, 101;    writes the state of 102 tokens, rows 102 ... 105
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int
from eagle_runtime.core.cache import Cache, Kind, aligned_empty

Array = npt.NDArray[np.generic]
MARKS = 2  # places that are remembered, chosen: the ends of the last two prompts
NOWHERE = 1 << 62  # the tokens of a state that is being moved


@dataclass(frozen=True, slots=True)
class Mark:
    """A place to go back to: the state of `base` tokens, and rows [layers, held + n, row] of the n after them."""

    base: int
    state: Array
    rows: Array

    def end(self, held: int) -> int:
        """Tokens at most to which it leads back."""
        return self.base + int(self.rows.shape[1]) - held


class StateCache(Cache):
    """States in host memory. base: tokens that they are of. rows [layers, allocated, row]: the `held` rows before
    these, zeros where the text begins, and all rows after."""

    def __init__(self, layers: int, capacity: int, held: int, row: int, shape: tuple[int, ...]) -> None:
        """held: rows that a pass reads of those that the state has. row: numbers of one; shape: of a layer's state."""
        super().__init__(capacity)
        self.held = held
        self._sizes = layers, row, shape
        self._marks: list[Mark] = []
        self._forget()

    def _forget(self) -> None:
        """Hold no text and no memory."""
        layers, row, shape = self._sizes
        self.base = 0
        self._next: int | None = None  # tokens of the other states, where a pass has computed them
        self.rows: Array = aligned_empty((layers, 0, row), np.float32)
        self._states: list[Array] = [aligned_empty((0, *shape), np.float32)] * 2
        self._marks.clear()

    @property
    def nbytes(self) -> int:
        marks = sum(mark.state.nbytes + mark.rows.nbytes for mark in self._marks)
        return self.rows.nbytes + sum(state.nbytes for state in self._states) + marks

    @property
    def state_bytes(self) -> int:
        """Bytes from the state of a layer to that of the next."""
        return self._states[0].strides[0]

    @property
    def count(self) -> int:
        """Rows that the next pass reads."""
        return self.held + self.length - self.base

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Where of each layer the rows begin, the state, and that which the next pass computes."""
        arrays = [(one.ctypes.data, one.strides[0]) for one in (self.rows, *self._states)]
        (rows, next_rows), (old, next_old), (new, next_new) = arrays
        return [(rows + n * next_rows, old + n * next_old, new + n * next_new) for n in range(len(self.rows))]

    def make_room(self, rows: int) -> None:
        """Be ready for a pass of `rows` rows."""
        self._settle(self.length)
        self._next = None
        self._allocate(self.count + rows)

    def _allocate(self, rows: int) -> None:
        """Have memory for states and so many rows."""
        layers, row, shape = self._sizes
        if not len(self._states[0]):
            self._before_growth(2 * layers * math.prod(shape) * 4)
            self._states = [aligned_empty((layers, *shape), np.float32) for _ in self._states]
            self._states[0][:] = 0
        before = self.rows.shape[1]
        if before < rows:
            self._before_growth(layers * row * 4 * (rows - before))
            grown = aligned_empty((layers, rows, row), np.float32)
            grown[:, :before] = self.rows
            grown[:, before:] = 0
            self.rows = grown

    def computed(self) -> None:
        """A pass has computed the other states: those of all committed tokens."""
        self._next = self.length

    def _settle(self, most: int) -> None:
        """Go on from the states that the last pass has computed, if they are of no more than `most` tokens."""
        done, base = self._next, self.base
        if done is None or done > most:
            return
        self._next = None
        if done == base:
            return
        self.base = NOWHERE  # an interrupt leaves no text
        kept = self.held + self.length - done
        self.rows[:, :kept] = self.rows[:, done - base : done - base + kept]
        self._states.reverse()
        self.base = done

    def mark(self) -> None:
        self._settle(self.length)
        if self._marks and self._marks[-1].end(self.held) == self.length:
            return
        new = Mark(self.base, self._states[0].copy(), self.rows[:, : self.count].copy())
        self._marks = [*self._marks[1 - MARKS :], new]

    def _within(self, length: int) -> list[Mark]:
        """What is remembered of the text's first `length` tokens."""
        ends = ((one, self.held + length - one.base) for one in self._marks if one.base <= length)
        return [replace(one, rows=one.rows[:, :end]) for one, end in ends]

    def _start(self) -> Mark:
        """The beginning of a text."""
        layers, row, shape = self._sizes
        return Mark(0, np.zeros((layers, *shape), np.float32), np.zeros((layers, self.held, row), np.float32))

    def reach(self, length: int) -> int:
        if self.base <= length:
            return length
        marks = self._within(length)
        return marks[-1].end(self.held) if marks else 0

    def truncate(self, length: int) -> None:
        assert self.reach(length) == length
        marks = self._within(length)
        if self.base > length:
            self._take(marks[-1] if marks else self._start())
        self._marks, self.length = marks, length
        if self._next is not None and self._next > length:
            self._next = None

    def _take(self, mark: Mark) -> None:
        self.base, self._next = NOWHERE, None
        self._allocate(mark.rows.shape[1])
        self._states[0][:] = mark.state
        self.rows[:, : mark.rows.shape[1]] = mark.rows
        self.base = mark.base

    def gather(self, path: Int) -> None:
        if path[-1] != len(path) - 1:
            first = self.count
            self.rows[:, first : first + len(path)] = self.rows[:, first + path]

    def shrink(self) -> None:
        super().shrink()
        self._forget()

    def pretend(self, length: int) -> None:
        self.truncate(0)
        self._marks.clear()
        super().pretend(length)
        self.base = length

    @property
    def kinds(self) -> list[Kind]:
        layers, row, shape = self._sizes
        single = np.dtype(np.float32)
        return [((layers, row), single), ((layers, *shape), single), ((1,), np.dtype(np.int64))] * 2

    def read(self, most: int | None = None) -> list[npt.NDArray[np.generic]]:
        """Returns rows, states and their tokens [1], and the same of the last mark. most: a number that `reach`
        gives."""
        count = self.length if most is None else min(most, self.length)
        self._settle(count)
        marks = self._within(count) or [self._start()]
        now = marks[-1]
        if self.base <= count:
            now = Mark(self.base, self._states[0], self.rows[:, : self.held + count - self.base])
        return [each for one in (now, marks[-1]) for each in (one.rows.copy(), one.state.copy(), np.array([one.base]))]

    def rows_in(self, arrays: Sequence[npt.NDArray[np.generic]]) -> int:
        given = [(one.shape[::2] if one.ndim == 3 else one.shape, one.dtype) for one in arrays]
        if given != self.kinds:
            raise ValueError(f"states of shapes and types {given} do not fit a cache of {self.kinds}")
        ends: list[int] = []
        for first, _, base in (arrays[:3], arrays[3:]):
            ends.append(int(base[0]) + int(first.shape[1]) - self.held)
            if not 0 <= base[0] <= ends[-1] <= min(ends[0], self.capacity):
                raise ValueError(
                    f"states of {base[0]} tokens and {ends[-1]} rows do not fit a cache of {self.capacity}"
                )
        return ends[0]

    def write(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        length = self.rows_in(arrays)
        now, mark = (Mark(int(base[0]), state, rows) for rows, state, base in (arrays[:3], arrays[3:]))
        self._take(now)
        self._marks, self.length = [mark], length
