"""What eagle-edge-kernels computes of a draw on the host, where it is installed: the same as noise.py and race.py do
with NumPy, in less time."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.machine.kernels import installed_kernels

Row = npt.NDArray[np.float64]
TRIED = 1 << 15  # numbers that are compared with NumPy's


class NativeDraws(NamedTuple):
    """Functions of the shared library."""

    noise: Any
    contenders: Any

    def exponential(self, seed: int, position: int, count: int) -> Row:
        """Returns what Generator(Philox(counter=[0, 0, 0, position], key=seed)).standard_exponential(count) does."""
        numbers = np.empty(count)
        self.noise(seed, position, count, numbers.ctypes.data)
        return numbers

    def may_win(self, logits: Float, numbers: Row, temperature: float, least: float) -> Int:
        """Returns, in ascending order, the tokens with logit / temperature - log(number) >= least, and some that are
        below it by less than one. logits, numbers [V]: scores are below 1000, numbers above 0."""
        logits = np.ascontiguousarray(logits, np.float32)
        tokens = np.empty(len(logits), np.int64)
        addresses = logits.ctypes.data, numbers.ctypes.data, tokens.ctypes.data
        count = self.contenders(*addresses[:2], len(logits), 1 / temperature, least, addresses[2])
        return tokens[:count]


@functools.cache
def native_draws() -> NativeDraws | None:
    """Returns the functions of the installed library, tried once per process; None where there is none that has them,
    or where they make other numbers than NumPy here, as another library of mathematics would."""
    if (installed := installed_kernels()) is None or installed.damaged:
        return None
    try:
        library = ctypes.CDLL(str(installed.library))
        draws = NativeDraws(library.eagle_exponential_noise, library.eagle_contenders)
    except (OSError, AttributeError):
        return None
    word, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float
    draws.noise.argtypes, draws.noise.restype = [ctypes.c_uint64, ctypes.c_uint64, word, pointer], None
    draws.contenders.argtypes, draws.contenders.restype = [pointer, pointer, word, real, real, pointer], word
    return draws if makes_the_same(draws) else None


def makes_the_same(draws: NativeDraws) -> bool:
    """Whether the numbers are NumPy's."""
    seed, position = 2**63 + 1, 5
    numpys = np.random.Generator(np.random.Philox(counter=[0, 0, 0, position], key=seed)).standard_exponential(TRIED)
    return bool(np.array_equal(draws.exponential(seed, position, TRIED), numpys))
