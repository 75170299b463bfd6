"""Random numbers that are made ahead, kept and forgotten."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from eagle_runtime.sampling.noise import (
    KEPT_DRAWN,
    KEPT_POSITIONS,
    Noise,
    Numbers,
    Stream,
    exponential_noise,
    lowest,
    workers,
)
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.sampling.scores import Row
from patience import PATIENCE_S


@pytest.mark.parametrize(("size", "count"), [(1, 1), (10, 3), (10, 10), (10, 20), (3000, 1), (3000, 64), (3000, 2999)])
def test_the_lowest_numbers(size: int, count: int) -> None:
    for seed in range(50):
        numbers = exponential_noise(seed, 0, size)
        assert np.array_equal(lowest(numbers, count), np.argsort(numbers)[:count])
    crowded = np.full(size, 9.0)  # fewer small ones than exponential numbers have
    assert len(set(lowest(crowded, count).tolist())) == min(size, count)


def plainly(seed: int, position: int, count: int) -> Row:
    """The numbers of a generator that is made for the position."""
    generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, position], key=seed))
    return np.maximum(generator.standard_exponential(count), np.finfo(np.float64).tiny)


@pytest.mark.parametrize("seed", [0, 3, 2**63 + 5, 2**64 - 1])
def test_a_stream_makes_the_numbers_of_any_position(seed: int) -> None:
    stream = Stream(seed)
    for position, count in ((7, 3000), (0, 1), (7, 3000), (2**40, 7), (8, 70000), (1, 0)):
        numbers, least = stream.at(position, count)
        assert np.array_equal(numbers, plainly(seed, position, count))
        assert least == numbers.min(initial=np.inf)
        assert np.array_equal(numbers, exponential_noise(seed, position, count))


class Made:
    """Counts the positions whose numbers are made."""

    def __init__(self) -> None:
        self.positions: list[int] = []


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    counter, make = Made(), Stream.at

    def counted(stream: Stream, position: int, count: int) -> Numbers:
        counter.positions.append(position)
        return make(stream, position, count)

    monkeypatch.setattr(Stream, "at", counted)
    return counter


def test_numbers_are_made_once_wherever_they_are_made(made: Made) -> None:
    numbers = Noise(3, 1000)
    numbers.prepare(range(5, 9))
    for position in (7, 8, 9, 5, 6, 5, 7):
        assert np.array_equal(numbers.at(position), plainly(3, position, 1000))
        assert numbers.least(position) == plainly(3, position, 1000).min()
    numbers.prepare(range(5, 9))
    assert np.array_equal(numbers.lowest(8, 4), np.argsort(numbers.at(8))[:4])
    assert sorted(made.positions) == [5, 6, 7, 8, 9]


def test_numbers_are_ready_before_they_are_asked_for(made: Made) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), [0] * 10, 1000)
    sampler.on_device.watched(np.array([10, 11, 11, 12]), 4)
    both_idle = threading.Barrier(3)
    for _ in range(2):
        workers().submit(both_idle.wait)
    both_idle.wait(PATIENCE_S)
    assert sorted(made.positions) == [10, 11, 12, 13, 14, 15]


def test_numbers_of_drawn_positions_are_forgotten(made: Made) -> None:
    """Before those that are to be drawn."""
    numbers = Noise(3, 4)
    for position in range(2 * KEPT_DRAWN):
        numbers.at(position)
    numbers.forget(2 * KEPT_DRAWN - 2)
    for position in (2 * KEPT_DRAWN - 1, KEPT_DRAWN, KEPT_DRAWN - 1):
        numbers.at(position)
    assert made.positions == [*range(2 * KEPT_DRAWN), KEPT_DRAWN - 1]
    numbers.forget(5)
    numbers.at(KEPT_DRAWN)
    assert made.positions == [*range(2 * KEPT_DRAWN), KEPT_DRAWN - 1], "nothing that is to be drawn is dropped"


def test_a_sampler_keeps_few(made: Made) -> None:
    sampler = Sampler(SamplingParams(temperature=1.0), [0] * 4, 100)
    for _ in range(KEPT_DRAWN + 1):
        sampler.next(np.zeros(100, np.float32))
    sampler.exponential_noise(5)
    assert made.positions.count(5) == 1
    sampler.exponential_noise(4)
    assert made.positions.count(4) == 2


def test_of_a_large_vocabulary_fewer_are_kept() -> None:
    numbers = Noise(3, 1 << 20)
    for position in range(6):
        numbers.at(position)
    numbers.forget(6)
    assert list(numbers._kept) == [2, 3, 4, 5]


def test_draws_go_on_where_no_thread_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a thread that outlives the main one: the interpreter has closed its pools."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr("eagle_runtime.sampling.noise.workers", lambda: pool)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), [0], 100)
    drawn = [sampler.next(np.zeros(100, np.float32)) for _ in range(5)]
    monkeypatch.undo()
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), [0], 100)
    assert [sampler.next(np.zeros(100, np.float32)) for _ in range(5)] == drawn


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no system that copies processes")
def test_a_copy_of_the_process_has_threads_of_its_own() -> None:
    workers().submit(int).result(PATIENCE_S)
    if (child := os.fork()) == 0:
        os._exit(workers.cache_info().currsize)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_more_is_kept_than_a_tree_needs(made: Made) -> None:
    numbers = Noise(3, 4)
    for position in (*range(KEPT_POSITIONS + 1), 0, KEPT_POSITIONS):
        numbers.at(position)
    assert made.positions == [*range(KEPT_POSITIONS + 1), 0], "the one that was read first was dropped"
