"""What the library computes of a draw: the numbers are NumPy's, and no token that may win is left out."""

from __future__ import annotations

import ctypes
import re
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from eagle_runtime.sampling import noise, race
from eagle_runtime.sampling.native_draws import NativeDraws, makes_the_same, native_draws
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.race import contenders
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.sampling.scores import Row

pytestmark = needs_operators
SOURCE = Path(__file__).parents[2] / "kernels/src/draws.cpp"


@pytest.fixture
def draws() -> NativeDraws:
    found = native_draws()
    assert found is not None
    return found


def numpys(seed: int, position: int, count: int) -> Row:
    generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, position], key=seed))
    return generator.standard_exponential(count)


def test_the_numbers_are_numpys(draws: NativeDraws) -> None:
    rng = np.random.default_rng(0)
    for count in (0, 1, 7, 8, 9, 503, 504, 512, 513, *[50_000] * 30):
        seed, position = int(rng.integers(0, 2**64, dtype=np.uint64)), int(rng.integers(0, 2**40))
        np.testing.assert_array_equal(draws.exponential(seed, position, count), numpys(seed, position, count))


def test_the_strips_have_one_area() -> None:
    table = re.search(r"ENDS\[256\] = \{(.*?)\}", SOURCE.read_text(), re.DOTALL)
    assert table is not None
    ends = [float.fromhex(number) for number in re.findall(r"0x[0-9a-f.]+p-?[0-9]+", table[1])]
    with localcontext(prec=50):
        area, tail = Decimal("0.00394965982258155722"), Decimal("7.69711747013104972")
        expected = [tail]
        for _ in range(254):
            expected.append(-(area / expected[-1] + (-expected[-1]).exp()).ln())
        assert ends == [float(area * tail.exp()), *(float(end) for end in reversed(expected))]
        assert abs(area / expected[-1] + (-expected[-1]).exp() - 1) < Decimal("1e-15"), "the last strip is filled"


def test_other_numbers_are_found_out(draws: NativeDraws) -> None:
    assert makes_the_same(draws)

    def nearly(seed: int, position: int, count: int, address: int) -> None:
        draws.noise(seed, position, count, address)
        numbers = (ctypes.c_double * count).from_address(address)
        numbers[count - 1] = float(np.nextafter(numbers[count - 1], 0))

    assert not makes_the_same(draws._replace(noise=nearly))


@pytest.mark.parametrize("temperature", [0.003, 0.3, 1.0, 7.0, 400.0])
def test_tokens_that_may_win_are_found(draws: NativeDraws, temperature: float) -> None:
    rng = np.random.default_rng(1)
    for count in (1, 63, 64, 65, 3000):
        for seed in range(20):
            logits = (rng.normal(0, rng.choice([0.1, 1, 4]), count) * min(temperature, 30)).astype(np.float32)
            logits[rng.random(count) < 0.1] = -np.inf
            logits[rng.integers(count)] = rng.choice([-3e38, 0.25])
            numbers = draws.exponential(seed, 3, count)
            numbers[rng.integers(count)] = np.finfo(np.float64).tiny
            values = logits.astype(np.float64) / temperature - np.log(numbers)
            least = float(rng.choice(values[np.isfinite(values)]))
            found = draws.may_win(logits, numbers, temperature, max(least, -600.0))
            assert set(np.flatnonzero(values >= max(least, -600.0))) <= set(found.tolist())
            assert (values[found] >= max(least, -600.0) - 1).all() and (np.diff(found) > 0).all()


@pytest.mark.parametrize("temperature", [1e-4, 0.05, 1.0, 3.0, 1e30])
def test_draws_are_those_of_numpy(temperature: float, monkeypatch: pytest.MonkeyPatch, draws: NativeDraws) -> None:
    rng, vocab = np.random.default_rng(2), 5000
    native = Sampler(SamplingParams(temperature=temperature, seed=8), [0], vocab)
    rows = [rng.normal(0, rng.choice([0.5, 3, 20]), vocab).astype(np.float32).round(2) for _ in range(150)]
    drawn = [native.next(row) for row in rows]
    flat, numbers = np.zeros(vocab, np.float32), draws.exponential(8, 1, vocab)
    few = contenders(flat, numbers, numbers.min(), 0, temperature)

    def nothing() -> Any:
        return None

    monkeypatch.setattr(noise, "native_draws", nothing)
    monkeypatch.setattr(race, "native_draws", nothing)
    without = Sampler(SamplingParams(temperature=temperature, seed=8), [0], vocab)
    assert [without.next(row) for row in rows] == drawn
    every = contenders(flat, numbers, numbers.min(), 0, temperature)
    assert set(few) <= set(every) == set(range(vocab))
    assert temperature != 1 or len(few) < vocab, "the library looks at the number of each token"
