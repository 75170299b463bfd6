"""A client that leaves frees its sequence within one pass, with others at once on native kernels."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import needs_operators
from eagle_runtime import EagleModel
from eagle_serve import Options
from eagle_serve.engine import Engine
from eagle_serve.jobs import Events, Job, Jobs
from eagle_serve.metrics import Metrics
from eagle_serve.request import parse_request
from patience import PATIENCE_S
from systems import posix_only


@needs_operators
@posix_only  # under wine the event loop wakes some passes late
@pytest.mark.parametrize("reading", [False, True], ids=["answered", "prompt_is_read"])
def test_a_client_that_leaves_frees_its_sequence_within_a_pass(bundle_of: Callable[..., Path], reading: bool) -> None:
    bundle = bundle_of("eagle3", "int4")
    options = Options(parallel=4)
    with EagleModel.load(bundle, backend="native", threads=1, check_hashes=False) as model:
        engine = Engine(model, bundle, options, Metrics())

        async def scenario() -> None:
            def job(prompt: list[int], tokens: int) -> Job:
                body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
                (prepared,) = engine.prepare(
                    parse_request(body, "completions", options, engine.names, engine.own_penalty)
                )
                return Job(prepared, Events())

            others = [job([number, 5, 6], 120) for number in range(3)]
            leaving = job([7] * 1500 if reading else [7, 8], 120)
            jobs = Jobs(engine.decode, engine.model.grant, 4, 0)
            try:
                jobs.submit([*others, leaving])
                if reading:
                    while leaving.prefill[0] == 0:
                        await asyncio.sleep(0)
                else:
                    await asyncio.wait_for(leaving.events.take(), PATIENCE_S)
                jobs.withdraw(leaving, "client")
                read, drafted = leaving.prefill[0], leaving.drafted
                await asyncio.to_thread(leaving.finished.wait, PATIENCE_S)
                # What runs when the client leaves may come to its end; nothing begins after it.
                assert leaving.prefill[0] - read <= 512 and leaving.prefill[0] <= 1500
                assert (leaving.drafted > drafted) <= (not reading) and len(leaving.events) <= 1
                for one in others:
                    await asyncio.to_thread(one.finished.wait, PATIENCE_S)
                    assert not one.cancelled and len(one.events) > 0
            finally:
                await asyncio.to_thread(jobs.stop)

        asyncio.run(scenario())
        engine.prefixes.close()
