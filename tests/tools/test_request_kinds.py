"""`eagle_tools.lossless --kinds`: requests with stop strings, grammars and tools, several at once, change no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eagle_runtime import EagleModel
from eagle_tools import lossless
from eagle_tools.request_kinds import KINDS, kinds_of, random_kind


def test_mixes_of_all_kinds_change_no_text(chatting: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = lossless.compare_runs(chatting, 10, 4, 1, seed=3, at_once=6, kinds=True)
    assert outcome.differ == 0 and sum(outcome.kinds.values()) == sum(outcome.ended.values()) == 10
    assert len(outcome.kinds) > 2
    together = lossless.with_drafts
    monkeypatch.setattr(
        lossless, "with_drafts", lambda *args: [replace(one, text=f"{one.text}!") for one in together(*args)]
    )
    assert lossless.compare_runs(chatting, 2, 4, 1, seed=3, at_once=2, kinds=True).differ == 2


def test_a_request_is_in_several_mixes(chatting: Path) -> None:
    with EagleModel.load(chatting, threads=1) as model:
        drawn = list(lossless.groups(model, np.random.default_rng(5), 60, 4, 5, True, 3))
    mixed = [run for group in drawn for run in group]
    assert len(mixed) == 60 and {len(group) for group in drawn} >= {1, 2, 5} and max(map(len, drawn)) == 5
    times = Counter(run.settings["seed"] for run in mixed)
    assert set(times.values()) == {3} and len(times) == 20
    for group in drawn:
        assert len({run.settings["seed"] for run in group}) == len(group), "a request is not its own neighbour"
    methods = {run.settings["seed"]: set[str]() for run in mixed}
    for run in mixed:
        methods[run.settings["seed"]].add(str(run.method))
    assert sum(len(one) > 1 for one in methods.values()) > 15


def test_a_bundle_gets_the_kinds_that_it_can_answer(bundle_of: Callable[..., Path], chatting: Path) -> None:
    with EagleModel.load(bundle_of("eagle1", "int8"), threads=1) as plain, EagleModel.load(chatting, threads=1) as chat:
        assert kinds_of(plain) == ("text",) and kinds_of(chat) == KINDS
        random = np.random.default_rng(0)
        drawn = [random_kind(chat, random, 90) for _ in range(40)]
    assert {kind for kind, *_ in drawn} == set(KINDS)
    assert all(0 < len(ids) <= 90 for kind, ids, _ in drawn if kind != "text")
