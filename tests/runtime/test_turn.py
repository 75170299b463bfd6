"""A turn: pieces, cancelling from anywhere, event loops, what is recorded of each token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_tokenizer
from eagle_runtime import EagleModel, Piece, RequestError, Stop
from eagle_runtime.core.target import Target
from insides import bundle_in
from patience import PATIENCE_S
from thread_calls import Thread

LONG: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagleModel]:
    """int8, whose bits do not depend on what shares a pass; a token is a byte."""
    import shutil

    folder = tmp_path_factory.mktemp("bundle") / "bytes"
    shutil.copytree(bundle_of("eagle1", "int8"), folder)
    put_tokenizer(folder)
    with EagleModel.load(folder, threads=1, context=512) as loaded:
        yield loaded


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}])
def test_stop_strings_end_every_method_at_the_same_place(
    model: EagleModel, prompts: list[list[int]], settings: dict[str, Any]
) -> None:
    ended = 0
    for prompt in prompts[:4]:
        whole = model.generate(prompt, method="vanilla", **LONG, **settings)
        assert whole.text is not None
        for start in (3, 11, 24):
            string = whole.text[start : start + 3]
            results = [
                model.generate(prompt, method=method, stop=[string, "\x00\x00\x00"], **LONG, **settings)
                for method in ("vanilla", "eagle", "eagle+lookup", "lookup")
            ]
            assert len({(result.text, result.token_ids, result.stop) for result in results}) == 1
            ended += results[0].stop == Stop("stop_string", string)
            assert results[0].text == whole.text[: whole.text.index(string)]
            assert whole.token_ids[: len(results[0].token_ids)] == results[0].token_ids
    assert ended == 12


def test_no_stop_token_comes_before_the_least_number_of_tokens(model: EagleModel, prompts: list[list[int]]) -> None:
    """And drafts change nothing, since the sampler alone forbids them."""
    moved = 0
    for prompt in prompts:
        free = model.generate(prompt, method="vanilla", **LONG)
        stop = [free.token_ids[5]]
        for settings in ({}, {"temperature": 1.0, "seed": 9}):
            common = {**LONG, **settings, "stop_token_ids": stop, "min_new_tokens": 20}
            plain = model.generate(prompt, method="vanilla", **common)
            drafted = model.generate(prompt, **common)
            assert drafted.token_ids == plain.token_ids and len(plain.token_ids) >= 20
            assert stop[0] not in plain.token_ids[:20]
            moved += plain.token_ids[:20] != free.token_ids[:20]
    assert moved > len(prompts) // 2


def test_log_probabilities_are_those_of_the_targets_own_logits(model: EagleModel, prompts: list[list[int]]) -> None:
    prompt, common = prompts[0], {**LONG, "max_new_tokens": 20, "temperature": 1.3, "top_k": 5, "seed": 4}
    with model.stream(prompt, logprobs=3, repetition_penalty=1.2, **common) as turn:
        tokens = [token for piece in turn for token in piece.tokens]
    ids = [token.id for token in tokens]
    rows = np.concatenate([piece.copy() for piece in model.score([*prompt, *ids], len(prompt) - 1)]).astype(np.float64)
    for token, row in zip(tokens, rows, strict=False):
        logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert token.logprob == pytest.approx(logs[token.id], abs=1e-9)
        assert [index for index, _ in token.top] == np.argsort(-logs, kind="stable")[:3].tolist()
        assert [value for _, value in token.top] == pytest.approx(np.sort(logs)[::-1][:3], abs=1e-9)
    plain = model.generate(prompt, repetition_penalty=1.2, method="vanilla", **common)
    assert plain.token_ids == tuple(ids)  # recording changes nothing
    drafted = [token.drafted for token in tokens]
    assert turn.result is not None
    usage = turn.result.usage
    cut = round(usage.tau_untrimmed * usage.target_passes) - (usage.new_tokens - 1)  # off the last pass
    assert sum(drafted) == sum(usage.accepted_per_depth) - max(0, cut - 1) > 0
    (piece,) = model.stream(prompt, logprobs=0, max_new_tokens=1)
    assert piece.tokens[0].top == () and piece.tokens[0].logprob is not None and piece.tokens[0].logprob <= 0


def test_cancelling_from_another_thread_ends_a_turn_within_a_step(
    model: EagleModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each of the first twenty passes, of which one reads the prompt."""
    feeds_of = Target._feeds
    passes, wanted, met = 0, 0, threading.Event()

    def counted(target: Target, *arguments: Any) -> Any:
        """What every forward pass asks first."""
        nonlocal passes
        passes += 1
        if passes == wanted:
            met.set()
        return feeds_of(target, *arguments)

    monkeypatch.setattr(Target, "_feeds", counted)
    text = [token for prompt in prompts for token in prompt] * 2
    whole = model.generate(text, max_new_tokens=100, ignore_eos=True).token_ids
    assert passes > 20
    during_prefill = 0
    for number in range(60):
        turn = model.stream(text, max_new_tokens=100, ignore_eos=True)
        passes, wanted = 0, 1 + number % 20
        met.clear()
        thread = Thread(lambda turn=turn: list(turn))
        assert met.wait(PATIENCE_S)
        turn.cancel()
        seen = passes
        pieces: list[Piece] = thread.result()
        assert passes <= seen + 2  # the step that ran, and one that may have begun before the flag was seen
        result = pieces[-1].result
        assert result is not None
        assert result.finish_reason in ("cancelled", "length") and turn.done and turn.result is result
        assert result.token_ids == whole[: len(result.token_ids)]
        during_prefill += not result.token_ids
    assert during_prefill > 0
    monkeypatch.undo()
    assert model.generate(text, max_new_tokens=100, ignore_eos=True).token_ids == whole


def test_a_cancelled_turn_gives_what_it_has(model: EagleModel, prompts: list[list[int]]) -> None:
    turn = model.stream(prompts[0], **LONG)
    first = next(turn)
    turn.cancel()
    turn.cancel()
    last = next(turn)
    assert last.result is not None and last.result.stop == Stop("cancelled")
    assert last.result.token_ids == (*first.token_ids, *last.token_ids)
    assert list(turn) == [] and turn.done
    unused = model.stream(prompts[0], **LONG)
    unused.cancel()
    (only,) = list(unused)
    assert only.tokens == () and only.result is not None and only.result.token_ids == ()
    assert only.result.usage.target_passes == 0
    closed = model.stream(prompts[0], **LONG)
    closed.close()
    assert closed.done and closed.result is None and list(closed) == []


def test_event_loops_take_pieces_from_one_thread(model: EagleModel, prompts: list[list[int]]) -> None:
    wanted = [model.generate(prompt, **LONG).token_ids for prompt in prompts[:2]]
    twin = model.twin()
    threads: set[int] = set()

    async def collect(of: EagleModel, prompt: list[int]) -> tuple[int, ...]:
        tokens: list[int] = []
        async with of.stream(prompt, on_cycle=lambda _: threads.add(threading.get_ident()), **LONG) as turn:
            async for piece in turn:
                tokens += piece.token_ids
        return tuple(tokens)

    async def both() -> list[tuple[int, ...]]:
        return list(await asyncio.gather(collect(model, prompts[0]), collect(twin, prompts[1])))

    assert asyncio.run(both()) == wanted
    assert len(threads) == 2 and threading.get_ident() not in threads


def test_cancelling_a_task_cancels_its_turn(model: EagleModel, prompts: list[list[int]]) -> None:
    async def left() -> bool:
        turn = model.stream(prompts[0], max_new_tokens=300, ignore_eos=True)

        async def consume() -> None:
            async for _ in turn:
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(turn.wait, 30)

    assert asyncio.run(left())
    assert model.generate(prompts[0], **LONG).finish_reason == "length"


def test_a_task_is_cancelled_though_the_model_is_closed(
    bundle_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    async def left() -> None:
        other, begun = EagleModel.load(bundle_of("eagle1", "int8"), threads=1, context=512), asyncio.Event()

        async def consume() -> None:
            async with other.stream(prompts[0], max_new_tokens=300, ignore_eos=True) as turn:
                await anext(turn)
                begun.set()
                await asyncio.sleep(PATIENCE_S)

        task = asyncio.create_task(consume())
        await begun.wait()
        other.close()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(left())


def test_long_prompts_report_how_far_they_are_read(model: EagleModel, prompts: list[list[int]]) -> None:
    text = [token for prompt in prompts for token in prompt][:190]
    chunk = bundle_in(model).target.chunk  # 64 of portable graphs
    seen: list[tuple[int, int]] = []
    result = model.generate(text, max_new_tokens=2, on_prefill=lambda *counts: seen.append(counts))
    assert seen == [(done, 190) for done in range(chunk, 190, chunk)]
    usage = result.usage
    assert (usage.cached_tokens, usage.prefilled_tokens, usage.prompt_tokens) == (0, 190, 190)
    assert usage.ttft_s >= usage.prefill_s > 0
    assert model.count_tokens("abc") == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"stop": 5}, "stop is 5, but must be a string or a list"),
        ({"stop": ["a", 3]}, "must be a string or a list"),
        ({"stop": [""]}, "has 0 characters, but must have 1 to 256"),
        ({"stop": ["a" * 257]}, "has 257 characters"),
        ({"stop": ["a"] * 17}, "17 strings, but at most 16"),
        ({"logprobs": 21}, "logprobs is 21, but must be between 0 and 20"),
        ({"logprobs": True}, "logprobs is True, but must be a whole number"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
        ({"min_new_tokens": 300}, "min_new_tokens is 300, but must be between 0 and 256"),
    ],
)
def test_wrong_settings_are_named(model: EagleModel, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        model.stream("abc", **settings)


def test_stop_strings_need_a_tokenizer(model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match="the bundle has no tokenizer; use stop_token_ids"):
        model_of("eagle1").stream([1, 2], stop="a")
