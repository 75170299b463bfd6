"""Calls in threads of their own, and random generations to run in many threads."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from patience import PATIENCE_S

TREE: dict[str, Any] = {"method": "eagle", "tree": "dynamic", "total_token": 12, "depth": 2, "draft_top_k": 3}


class Thread:
    """A call in a thread of its own, and what came of it."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call = partial(call, *arguments)
        self._outcome: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.put((self._call(), None))
        except BaseException as error:
            self._outcome.put((None, error))

    def result(self, patience: float = PATIENCE_S) -> Any:
        """What the call returned; raises what it raised. patience: seconds that are waited for it."""
        value, error = self._outcome.get(timeout=patience)
        self._thread.join(patience)
        if error is not None:
            raise error
        return value

    @property
    def running(self) -> bool:
        return self._outcome.empty()


def cases(prompts: list[list[int]], count: int) -> list[tuple[str, list[int], dict[str, Any]]]:
    """(precision, prompt, settings): of int8 all methods, of fp32, whose bits depend on a pass's width, one tree."""
    random.seed(7)
    chosen = []
    for number in range(count):
        prompt = random.choice(prompts)[: random.randrange(1, 40)]
        settings: dict[str, Any] = {"max_new_tokens": random.randrange(1, 24), "ignore_eos": random.random() < 0.5}
        if random.random() < 0.5:
            settings |= {"temperature": random.choice([0.7, 1.0]), "seed": number, "top_p": random.choice([1.0, 0.9])}
        if random.random() < 0.2:
            settings |= {"repetition_penalty": 1.2}
        precision = random.choice(["fp32", "int8"])
        method = "eagle" if precision == "fp32" else random.choice(["vanilla", "lookup", "eagle", "eagle+lookup"])
        chosen.append((precision, prompt, settings | (TREE if method == "eagle" else {"method": method})))
    return chosen
