"""Acceptance test 12, and which text a request goes on from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel, Turn
from eagle_runtime.app.slots import COPIED
from eagle_runtime.core.rounds import Wish
from eagle_serve import Limits, Options
from eagle_serve.prefixes import Prefixes, common
from eagle_serve.server import serving
from raw_http import events, post
from serve.clients import COMPLETIONS, idle, metric, read_until, started, until

CHATS = "/v1/chat/completions"
SETTINGS: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def fresh(served_model: EagleModel, served_bundle: Path) -> Iterator[str]:
    """A server that has read nothing."""
    with serving(served_model, served_bundle) as where:
        yield where


def test_a_front_end_s_other_requests_do_not_evict_its_chat(fresh: str, served_model: EagleModel) -> None:
    """Chat, title, tags, chat: the second request of the chat reads its new tokens and the last common one."""
    chat: list[dict[str, str]] = [
        {"role": "system", "content": "You are kind and brief. " * 8},
        {"role": "user", "content": "Why is the sky blue? " * 4},
    ]
    before: list[int] = []
    for turn in range(4):
        body = {"messages": chat, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = post(fresh, CHATS, body).data
        ids = served_model.text.encode(chat)
        text = answer["choices"][0]["message"]["content"]
        assert text == served_model.generate(ids, max_new_tokens=24, temperature=0, ignore_eos=True).text
        usage = answer["usage"]
        read = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        known = common(np.array(ids), np.array(before))
        assert read == len(ids) - max(0, known - 1)
        assert turn == 0 or read < 60 < 300 < len(ids)
        before = [*ids, *served_model.text.encode(text)]
        for task in ("Write a title of 3 words.", "Write three tags."):
            content = f"### Task: {task}\n<chat>{chat[1]['content']}{text}</chat>"
            title = post(fresh, CHATS, {**body, "messages": [{"role": "user", "content": content}], "max_tokens": 8})
            assert title.status == 200
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": f"And now number {turn}?"}]


def cached(prefixes: Prefixes, ids: list[int]) -> int:
    """Answer a prompt; returns how many of its tokens were held, and checks the answer."""
    with prefixes.turn(ids, SETTINGS) as turn:
        (*_, last) = turn
    assert last.result is not None
    return last.result.usage.cached_tokens


def states(prefixes: Prefixes) -> list[int]:
    """Lengths of the texts that are kept."""
    return sorted(len(state.ids) for state in prefixes._states)


def test_a_request_takes_the_longest_common_beginning(served_model: EagleModel) -> None:
    prefixes = Prefixes(served_model, most=8)
    text = list(np.random.default_rng(1).integers(3, 131, 400))
    first, other = [int(i) for i in text[:200]], [int(i) for i in text[200:]]
    assert cached(prefixes, first) == 0
    assert cached(prefixes, [*first[:150], 7]) == 149  # three quarters of the state: it is taken
    assert states(prefixes) == [159]
    assert cached(prefixes, [*first[:50], 9, *other[:20]]) == 49  # less than half: a copy
    assert states(prefixes) == [79, 159]
    assert cached(prefixes, first[:150]) == 149
    assert cached(prefixes, other) == 0 and states(prefixes) == [79, 158, 208]
    assert cached(prefixes, [*first[: COPIED - 1], 9, *other]) == 0 and len(states(prefixes)) == 4  # too few to copy
    assert cached(prefixes, other) == 199
    prefixes.close()
    assert prefixes.kv_bytes == 0


def test_the_least_recently_used_state_goes(served_model: EagleModel) -> None:
    prefixes = Prefixes(served_model, most=2)
    texts = [[3 + n] * 40 for n in range(3)]
    assert [cached(prefixes, text) for text in texts[:2]] == [0, 0]
    assert cached(prefixes, texts[0]) == 39
    assert cached(prefixes, texts[2]) == 0 and len(states(prefixes)) == 2
    assert cached(prefixes, texts[0]) == 39
    assert cached(prefixes, texts[1]) == 0
    prefixes.close()


def test_a_busy_state_is_copied(served_model: EagleModel) -> None:
    prefixes = Prefixes(served_model, most=4)
    text = [5] * 60
    assert cached(prefixes, text) == 0
    with prefixes.turn([*text, 6], SETTINGS) as turn:
        next(turn)
        assert cached(prefixes, [*text, 7]) == 59 and len(states(prefixes)) == 2  # the first is in a turn
    assert cached(prefixes, [*text, 6]) == 60
    prefixes.close()


def run_together(model: EagleModel, turns: Sequence[Turn]) -> None:
    """Run turns to their ends, a step of each at a time; fails if they need more steps than 1,000."""
    pending = list(turns)
    for _ in range(1000):
        wishes = {turn: next((event for event in turn.events if isinstance(event, Wish)), None) for turn in pending}
        pending = [turn for turn in pending if wishes[turn] is not None]
        if not pending:
            return
        model.grant([wish for wish in wishes.values() if wish is not None])
    pytest.fail(f"{len(pending)} turns do not end")


def test_no_two_requests_wait_for_each_other(served_model: EagleModel) -> None:
    """The second waits for the first, which its client leaves; the third gets the state of the first, for what it has
    in common with the second."""
    prefixes = Prefixes(served_model, most=2)
    text = list(range(5, 85))
    left, *prompts = [*text[:40], 6], [*text, 7], [*text, 8]
    alone = [served_model.generate(prompt, **SETTINGS).token_ids for prompt in prompts]
    with contextlib.ExitStack() as running:
        with prefixes.turn(left, SETTINGS):
            turns = [running.enter_context(prefixes.turn(prompts[0], SETTINGS))]
        turns.append(running.enter_context(prefixes.turn(prompts[1], SETTINGS)))
        assert len(states(prefixes)) == 2
        run_together(served_model, turns)
    results = [turn.result for turn in turns if turn.result is not None]
    assert [result.token_ids for result in results] == alone
    assert [result.usage.cached_tokens for result in results] == [0, 79]
    prefixes.close()


def test_requests_that_begin_together_read_once_what_they_have_in_common(served_model: EagleModel) -> None:
    """The second waits for the first, and the third, whose text has less in common with theirs, for that part."""
    prefixes = Prefixes(served_model, most=4)
    text = list(range(5, 85))
    prompts = [[*text, 6], [*text, 7], [*text[:40], 8]]
    alone = [served_model.generate(prompt, **SETTINGS).token_ids for prompt in prompts]
    with contextlib.ExitStack() as running:
        turns = [running.enter_context(prefixes.turn(prompt, SETTINGS)) for prompt in prompts]
        run_together(served_model, turns)
    results = [turn.result for turn in turns if turn.result is not None]
    assert [result.usage.cached_tokens for result in results] == [0, 79, 39]
    assert [result.token_ids for result in results] == alone
    prefixes.close()


def test_what_was_read_for_a_client_serves_its_retry(fresh: str) -> None:
    body: dict[str, Any] = {"prompt": "ab" * 300, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    with started(fresh, {**body, "stream": True}) as link:
        read_until(link, b"data: {")
    until(lambda: idle(fresh) and metric(fresh, "cancelled_total") == 1)
    answer = post(fresh, COMPLETIONS, {**body, "max_tokens": 4}).data
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1
    assert answer["timings"]["prompt_n"] == 1 and answer["timings"]["cache_n"] == answer["usage"]["prompt_tokens"] - 1


def test_the_metrics_tell_what_is_kept(served_model: EagleModel, served_bundle: Path) -> None:
    with serving(served_model, served_bundle, Options(limits=Limits(states=3))) as where:
        for number in range(5):
            assert post(where, COMPLETIONS, {"prompt": "xyzuv"[number] * 50, "max_tokens": 2}).status == 200
        assert metric(where, "kv_states") == 3 and metric(where, "kv_bytes") > 0
        assert metric(where, "prompt_tokens_total") == 250 and metric(where, "cached_tokens_total") == 0
        body = {"prompt": "v" * 50, "max_tokens": 2, "stream": True}
        assert events(post(where, COMPLETIONS, body).body)[-1] == "[DONE]"
        assert metric(where, "cached_tokens_total") == 49


def test_common() -> None:
    def ids(*values: int) -> Any:
        return np.array(values, np.int64)

    assert common(ids(), ids(1)) == 0 and common(ids(1, 2), ids(1, 2, 3)) == 2 and common(ids(1, 2), ids(1, 3)) == 1
