"""Acceptance test 11: many requests of many clients, some of which go away: pytest -m slow tests/serve/test_soak.py"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import EagleModel
from eagle_serve import Options
from eagle_serve.allocator import resident_bytes
from eagle_serve.server import serving
from patience import PATIENCE_S
from raw_http import events, post
from serve.clients import COMPLETIONS, idle, metric, server_process, started, until

TEXTS = ("def f(a, b):", "class A:", "import os\n" * 12, "for i in range(3):\n    print(i)\n" * 5, "x")
Case = tuple[dict[str, Any], str]


def cases(model: EagleModel, count: int) -> list[Case]:
    """Requests with what the target alone answers to them, computed before any server runs."""
    draw = random.Random(7)
    made: list[Case] = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": draw.choice(TEXTS) + draw.choice(TEXTS)[: draw.randrange(20)] or "x",
            "max_tokens": draw.randrange(1, 60),
            "temperature": draw.choice((0, 0.7, 1.0)),
            "seed": number,
        }
        body |= draw.choice(({}, {"top_k": 8}, {"top_p": 0.9}, {"repetition_penalty": 1.2}, {"min_p": 0.05}))
        settings = {name: value for name, value in body.items() if name not in ("prompt", "max_tokens")}
        wanted = model.generate(body["prompt"], max_new_tokens=body["max_tokens"], method="vanilla", **settings)
        body |= draw.choice(({}, {"eagle": {"method": "eagle"}}, {"eagle": {"method": "lookup"}}, {"logprobs": 1}))
        assert wanted.text is not None
        made.append((body, wanted.text))
    return made


def soak(address: str, asked: list[Case], clients: int) -> Counter[str]:
    """Send all requests from as many threads. A third is streamed, a tenth is left, at any moment. Returns how many
    were answered and left; fails on the first answer that differs."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def ask(number: int) -> None:
        draw = random.Random(number)
        body, wanted = asked[number]
        fate = draw.random()
        if fate < 0.1:
            left = {**body, "stream": draw.random() < 0.5, "max_tokens": 400, "ignore_eos": True}
            with started(address, left):
                time.sleep(draw.random() * 0.05)
            kind = "left"
        elif fate < 0.4:
            said = events(post(address, COMPLETIONS, {**body, "stream": True}).body)
            chunks: list[Mapping[str, Any]] = [event for event in said if isinstance(event, dict)]
            assert said[-1] == "[DONE]", said[-3:]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == wanted, body
            kind = "streamed"
        else:
            answer = post(address, COMPLETIONS, body)
            assert answer.status == 200, answer.body
            assert answer.data["choices"][0]["text"] == wanted, body
            kind = "whole"
        with lock:
            counts[kind] += 1

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(ask, number) for number in range(len(asked))]:
            done.result()
    until(lambda: idle(address))
    return counts


def test_a_short_soak(served_model: EagleModel, served_bundle: Path) -> None:
    asked = cases(served_model, 60)
    before = set(threading.enumerate())
    with serving(served_model, served_bundle, Options(queue=64, parallel=2)) as where:
        counts = soak(where, asked, clients=4)
        assert metric(where, "queue_depth") == 0 and metric(where, "cancelled_total") <= counts["left"]
    assert counts["left"] > 0 and counts["streamed"] > 5 and counts["whole"] > 20
    until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' figures of a process")
@pytest.mark.parametrize("parallel", [1, 3])
def test_a_soak(served_model: EagleModel, served_bundle: Path, parallel: int) -> None:
    asked = cases(served_model, 2000)
    process, where, _ = server_process(served_bundle, "--queue", "64", "--parallel", str(parallel))

    def resident() -> int:
        return resident_bytes(process.pid)

    def threads() -> int:
        return len(list(Path(f"/proc/{process.pid}/task").iterdir()))

    try:
        sizes: list[int] = []
        running: list[int] = []
        counts: Counter[str] = Counter()
        for part in (asked[:200], asked[200:600], asked[600:]):
            counts += soak(where, part, clients=8)
            sizes.append(resident())
            running.append(threads())
        shown = [f"{size / 1e6:.1f}" for size in sizes]
        print(f"\nparallel {parallel}: {dict(counts)}; MB after 200, 600, 2,000: {', '.join(shown)}")
        assert counts["left"] > 100 and counts.total() == 2000
        # Buffers and the allocator's arenas of a model this small still fill up between 200 and 600.
        assert sizes[2] < 1.03 * sizes[1] and sizes[2] < sizes[0] + 10e6
        assert running[2] <= running[0] and metric(where, "queue_depth") == 0
    finally:
        process.terminate()
    assert process.wait(PATIENCE_S) == 0
