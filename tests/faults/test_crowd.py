"""Eight threads on a model and its twins, while models are closed under them and streams are dropped half-way: whatever
ends, ends as it would have alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from eagle_runtime import BusyError, ClosedError, EagleModel
from faults.tally import Tally, scaled
from patience import PATIENCE_S
from thread_calls import TREE, Thread, cases

THREADS = 8
ROUND = 25  # generations that a model lives, about


class Crowd:
    """A model with two twins that is closed now and then, and loaded anew by whoever comes next."""

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._lock = threading.Lock()
        self._models: list[EagleModel] = []

    def model(self, number: int) -> EagleModel:
        """The model or one of its twins."""
        with self._lock:
            if not self._models:
                first = EagleModel.load(self._bundle, threads=1, context=256, check_hashes=False)
                self._models = [first, first.twin(), first.twin()]
            return self._models[number % 3]

    def close(self) -> None:
        """In the middle of whatever others do."""
        with self._lock:
            models, self._models = self._models, []
        if models:
            models[-1].close()


@pytest.mark.slow
def test_threads(bundle_of: Callable[..., Path], prompts: list[list[int]], tally: Tally) -> None:
    crowds = {precision: Crowd(bundle_of("eagle3", precision)) for precision in ("fp32", "int8")}
    count = scaled(500)
    todo = cases(prompts, count)
    alone = []
    for precision, prompt, settings in todo:  # fp32's bits depend on the width of a pass: the same tree, alone
        if precision == "int8":
            settings = {**{key: value for key, value in settings.items() if key not in TREE}, "method": "vanilla"}
        alone.append(crowds[precision].model(0).generate(prompt, **settings).token_ids)
    for crowd in crowds.values():
        crowd.close()
    start, lock = threading.Barrier(THREADS), threading.Lock()

    def attempt(number: int, rng: Random) -> str:
        """How one generation ended; "again" where a model was closed under it, or busy with another's stream."""
        precision, prompt, settings = todo[number]
        crowd = crowds[precision]
        if rng.random() < 1 / ROUND:
            crowd.close()
        model = crowd.model(rng.randrange(3))
        emitted: list[int] = []
        try:
            if rng.random() < 0.5:
                emitted += model.generate(prompt, **settings).token_ids
            else:
                stop = rng.choice([None, None, 1, 3])
                for pieces, piece in enumerate(model.stream(prompt, **settings)):
                    emitted += piece.token_ids
                    if pieces == stop:
                        if tuple(emitted) != alone[number][: len(emitted)]:
                            raise AssertionError(f"{settings}: {emitted}, alone {alone[number]}")
                        return "dropped half-way, equal to the output alone so far"
        except (ClosedError, BusyError) as error:
            return f"refused in one sentence ({type(error).__name__}) and tried again"
        if tuple(emitted) != alone[number]:
            raise AssertionError(f"{settings}: {emitted}, alone {alone[number]}")
        return "finished, equal to the output alone"

    def work(first: int) -> None:
        rng = Random(f"{tally.campaign} {first}")
        start.wait(PATIENCE_S)
        for number in range(first, count, THREADS):
            ended = False
            while not ended:
                try:
                    outcome = attempt(number, rng)
                except Exception as error:
                    with lock:
                        tally.fail(number, repr(error))
                    break
                ended = not outcome.startswith("refused")
                with lock:
                    tally.add(outcome)

    for thread in [Thread(work, first) for first in range(THREADS)]:
        thread.result(scaled(600))
    for crowd in crowds.values():
        crowd.close()
