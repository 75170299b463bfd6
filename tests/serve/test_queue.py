"""The queue: order, refusals, clients that go away or do not read, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from eagle_runtime import ClosedError, EagleModel, Piece, Result
from eagle_runtime.app.result import Stop, usage_of
from eagle_runtime.commands.command import print_line
from eagle_runtime.core.rounds import Member, Wish
from eagle_serve import Limits, Options
from eagle_serve.app import Service
from eagle_serve.errors import ApiError
from eagle_serve.jobs import Event, Events, Job, Jobs
from eagle_serve.log_lines import logged
from eagle_serve.request import Prepared, Request
from eagle_serve.server import serving
from patience import PATIENCE_S
from raw_http import events, post, request
from serve.clients import (
    COMPLETIONS,
    idle,
    metric,
    read_until,
    server_process,
    started,
    until,
)

LONG = {"prompt": "def f(", "max_tokens": 2000, "temperature": 0, "ignore_eos": True, "eagle": {"method": "vanilla"}}
SHORT = {"prompt": "def f(", "max_tokens": 3, "temperature": 0}


def prepared(stream: bool = True, choices: int = 1) -> Prepared:
    return Prepared(Request("completions", None, prompts=("x",), choices=choices, stream=stream), (1, 2), {})


def piece(text: str) -> Piece:
    return Piece((), text)


def refused(wishes: Sequence[Wish]) -> None:
    raise AssertionError("nothing was wished for")


def test_jobs_run_in_order_and_too_many_are_refused() -> None:
    ran: list[int] = []
    idle: list[int] = []  # jobs that had run whenever none was left
    open_gate = threading.Event()
    entered = threading.Event()

    def decode(job: Job) -> Iterator[Piece | Wish]:
        entered.set()
        open_gate.wait(PATIENCE_S)
        ran.append(numbers[job])
        yield from ()

    async def scenario() -> None:
        jobs = Jobs(decode, refused, at_once=1, waiting=3, idle=lambda: idle.append(len(ran)))
        made = [Job(prepared(), Events()) for _ in range(5)]
        numbers.update({job: index for index, job in enumerate(made)})
        jobs.submit(made[:1])
        await asyncio.to_thread(entered.wait, PATIENCE_S)
        with pytest.raises(ApiError, match="n asks for 5 answers, but 4 may run and wait"):
            jobs.submit([Job(prepared(choices=5), Events()) for _ in range(5)])
        jobs.submit(made[1:4])
        assert [jobs.ahead(job) for job in made[:4]] == [None, 1, 2, 3]
        with pytest.raises(ApiError) as full:
            jobs.submit(made[4:])
        assert (full.value.status, full.value.code, full.value.headers) == (429, "queue_full", {"retry-after": "1"})
        jobs.withdraw(made[2], "client")
        assert [jobs.ahead(job) for job in made[:4]] == [None, 1, None, 2] and made[2].finished.is_set()
        jobs.submit(made[4:])
        open_gate.set()
        for job in made:
            await asyncio.to_thread(job.finished.wait, PATIENCE_S)
        assert ran == [0, 1, 3, 4]
        jobs.stop()
        assert idle == [4]
        with pytest.raises(ApiError) as stopped:
            jobs.submit([Job(prepared(), Events())])
        assert (stopped.value.status, stopped.value.code) == (503, "shutting_down")

    numbers: dict[Job, int] = {}
    before = set(threading.enumerate())
    asyncio.run(scenario())
    assert set(threading.enumerate()) <= before


LAST = Piece((), "", Result("", (), "stop", Stop("eos"), usage_of("vanilla", 0, (2, 0), 0, [], (0.0, 0.0, 0.0))))


@pytest.mark.parametrize("stream", [True, False])
def test_jobs_share_rounds_and_a_whole_answer_is_told_at_its_end(stream: bool) -> None:
    rounds: list[int] = []  # wishes of each
    open_gate = threading.Event()

    def serve(wishes: Sequence[Wish]) -> None:
        rounds.append(len(wishes))
        if len(rounds) == 5:
            raise ClosedError("the engines are gone")
        for wish in wishes:
            wish.advance()

    def decode(job: Job) -> Iterator[Piece | Wish]:
        open_gate.wait(PATIENCE_S)
        for number in range(3):
            yield (wish := Wish(Member(), partial(list, (number,))))
            yield piece(str(wish.taken()[0]))
        yield LAST

    async def told(job: Job) -> list[list[Event]]:
        """What each look at the news brought."""
        looks: list[list[Event]] = []
        while not looks or not (looks[-1][-1] == LAST or isinstance(looks[-1][-1], ApiError)):
            news = await asyncio.wait_for(job.events.take(), PATIENCE_S)
            assert {one for one, _ in news} == {job}
            looks.append([event for _, event in news])
        return looks

    async def scenario() -> None:
        jobs = Jobs(decode, serve, at_once=2, waiting=0)
        first, second = Job(prepared(stream), Events()), Job(prepared(stream), Events())
        jobs.submit([first, second])
        open_gate.set()
        for looks in await asyncio.gather(told(first), told(second)):
            assert [event for look in looks for event in look] == [piece("0"), piece("1"), piece("2"), LAST]
            assert stream or len(looks) == 1
        assert rounds == [2, 2, 2]
        for job in (first, second):
            await asyncio.to_thread(job.finished.wait, PATIENCE_S)
        rounds[:] = [0] * 4
        jobs.submit([third := Job(prepared(stream), Events())])
        ((error,),) = await told(third)
        assert isinstance(error, ApiError) and "the engines are gone" in error.message
        await asyncio.to_thread(jobs.stop)

    asyncio.run(scenario())


def test_news_are_taken_together() -> None:
    async def scenario() -> None:
        events = Events()
        first, second = Job(prepared(), events), Job(prepared(), events)
        events.put([(first, piece("a"))])
        events.put([(second, piece("b"))])
        assert await events.take() == [(first, piece("a")), (second, piece("b"))]
        waiting = asyncio.create_task(events.take())
        await asyncio.sleep(0)
        events.put([(first, piece("c"))])
        events.put([(first, piece("d"))])
        assert await waiting == [(first, piece("c")), (first, piece("d"))]
        waiting = asyncio.create_task(events.take())
        await asyncio.sleep(0)
        events.wake()
        assert await waiting == []

    asyncio.run(scenario())


def test_a_bug_is_an_error_with_a_number_and_no_details(caplog: pytest.LogCaptureFixture) -> None:
    def decode(job: Job) -> Iterator[Piece | Wish]:
        yield piece("a")
        raise ZeroDivisionError("a secret")

    async def scenario() -> ApiError:
        jobs = Jobs(decode, refused, at_once=1, waiting=0)
        job = Job(prepared(), Events())
        jobs.submit([job])
        events = [event for _, event in await asyncio.wait_for(job.events.take(), PATIENCE_S)]
        await asyncio.to_thread(jobs.stop)
        assert isinstance(events[-1], ApiError)
        return events[-1]

    error = asyncio.run(scenario())
    assert (error.status, error.code) == (500, "internal_error") and "secret" not in error.message
    number = error.message.split()[-1]
    (record,) = [record for record in caplog.records if number in record.getMessage()]
    assert record.exc_info is not None and "a secret" in str(record.exc_info[1])


@pytest.fixture
def narrow(served_model: EagleModel, served_bundle: Path) -> Iterator[str]:
    """A server whose queue holds one request."""
    with serving(served_model, served_bundle, Options(queue=1)) as where:
        yield where


def test_a_stream_tells_how_much_of_its_prompt_was_read(served_model: EagleModel, served_bundle: Path) -> None:
    body = {"prompt": "ab" * 950, "max_tokens": 2, "stream": True}
    with serving(served_model, served_bundle, Options(limits=Limits(look_s=0.001))) as where:
        said = [event for event in events(post(where, COMPLETIONS, body).body) if isinstance(event, str)]
    read = [int(match[1]) for line in said if (match := re.fullmatch(r": prefill (\d+)/1900", line))]
    assert read == sorted(read) and 0 < read[-1] < 1900


def test_a_full_queue_asks_to_retry(narrow: str) -> None:
    with started(narrow, {**LONG, "stream": True}) as first:
        read_until(first, b"data: {")
        with started(narrow, {**SHORT, "stream": True}) as second:
            waiting = read_until(second, b": queued 1\n\n")
            assert waiting.startswith(b"HTTP/1.1 200")
            answer = post(narrow, COMPLETIONS, SHORT)
            assert (answer.status, answer.code, answer.headers["retry-after"]) == (429, "queue_full", "1")
            with OpenAI(base_url=f"{narrow}/v1", api_key="none", max_retries=0) as client:
                with pytest.raises(openai.RateLimitError) as full:
                    client.completions.create(model="any", prompt="x", max_tokens=1)
                assert full.value.code == "queue_full"
            first.close()
            rest = read_until(second, b"data: [DONE]")
    assert b'"finish_reason":"length"' in rest
    until(lambda: idle(narrow))


def test_openai_s_client_retries(narrow: str) -> None:
    with started(narrow, {**LONG, "stream": True}) as first:
        read_until(first, b"data: {")
        second = started(narrow, {**LONG, "stream": True})
        read_until(second, b": queued 1\n\n")
        refused = f'eagle_requests_total{{path="{COMPLETIONS}",status="429"}} 1'

        def leave() -> None:
            until(lambda: refused in request(narrow, "GET", "/metrics").body.decode())
            first.close()
            second.close()

        leaving = threading.Thread(target=leave)
        leaving.start()
        with OpenAI(base_url=f"{narrow}/v1", api_key="none", max_retries=10) as client:
            answer = client.completions.create(model="any", prompt="def f(", max_tokens=3, temperature=0)
        leaving.join()
    assert answer.usage is not None and answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_stops_its_answer(narrow: str, stream: bool) -> None:
    with started(narrow, {**LONG, "stream": stream}) as link:
        if stream:
            read_until(link, b"data: {")
        else:
            until(lambda: metric(narrow, "running") == 1)
    until(lambda: metric(narrow, "cancelled_total") == 1 and idle(narrow))
    assert metric(narrow, "generated_tokens_total") < 2000
    assert post(narrow, COMPLETIONS, SHORT).status == 200


def test_a_client_that_goes_away_leaves_the_queue(narrow: str) -> None:
    with started(narrow, {**LONG, "stream": True}) as first:
        read_until(first, b"data: {")
        for stream in (True, False):
            with started(narrow, {**SHORT, "stream": stream}):
                until(lambda: metric(narrow, "queue_depth") == 1)
            until(lambda: metric(narrow, "queue_depth") == 0)
        assert metric(narrow, "running") == 1
    until(lambda: metric(narrow, "cancelled_total") == 3 and idle(narrow))


def test_clients_that_go_away_at_any_moment(narrow: str, served_model: EagleModel) -> None:
    """Also during the prefill of a long prompt. What they leave does not change the next answer."""
    wanted = served_model.generate("ab" * 600, max_new_tokens=8, temperature=0).text
    moments = random.Random(3)
    body = {"prompt": "ab" * 600 + "c" * 300, "max_tokens": 800, "temperature": 0, "ignore_eos": True}
    for number in range(30):
        with started(narrow, {**body, "stream": number % 2 == 0}):
            time.sleep(moments.random() * 0.08)
        until(lambda: idle(narrow))
    answer = post(narrow, COMPLETIONS, {"prompt": "ab" * 600, "max_tokens": 8, "temperature": 0})
    assert answer.data["choices"][0]["text"] == wanted


def test_a_client_that_does_not_read_is_cancelled(served_model: EagleModel, served_bundle: Path) -> None:
    hasty = Options(limits=Limits(unread_s=0.3))
    data = {**LONG, "stream": True, "logprobs": 20, "eagle": {"method": "vanilla", "trace": True}}
    with (
        serving(served_model, served_bundle, hasty) as where,
        started(where, data, receive_bytes=4096),
    ):
        until(lambda: metric(where, "cancelled_total") == 1 and idle(where))
        assert post(where, COMPLETIONS, SHORT).status == 200


def test_parallel_requests_take_turns(served_model: EagleModel, served_bundle: Path) -> None:
    wanted = served_model.generate("def f(", max_new_tokens=3, temperature=0).text
    with (
        serving(served_model, served_bundle, Options(parallel=2, queue=0)) as where,
        started(where, {**LONG, "stream": True}) as first,
    ):
        read_until(first, b"data: {")
        assert post(where, COMPLETIONS, SHORT).data["choices"][0]["text"] == wanted
        until(lambda: metric(where, "running") == 1)


def test_the_end_of_the_server_is_an_error_of_the_stream(served_model: EagleModel, served_bundle: Path) -> None:
    with serving(served_model, served_bundle) as where:
        link = started(where, {**LONG, "stream": True})
        read_until(link, b"data: {")
    with link:
        rest = b""
        while piece := link.recv(65536):
            rest += piece
    assert b"[DONE]" not in rest
    assert b'"code": "shutting_down"' in rest or b'"code":"shutting_down"' in rest


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_end(served_bundle: Path, number: signal.Signals) -> None:
    process, address, said = server_process(served_bundle)
    assert request(address, "GET", "/health").data == {"status": "ok"}
    with started(address, {**LONG, "max_tokens": 400, "stream": True}) as link:
        got = read_until(link, b"data: {")
        process.send_signal(number)
        while piece := link.recv(65536):
            got += piece
    assert process.wait(PATIENCE_S) == 0
    assert "Traceback" not in said() and "GET /health 200" in said()
    assert str(LONG["prompt"]) not in said()  # without --log-content
    assert b"data: [DONE]" in got


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_a_stopping_server_refuses_new_requests(served_bundle: Path) -> None:
    process, address, _ = server_process(served_bundle)
    with started(address, {**LONG, "stream": True}) as link:
        read_until(link, b"data: {")
        process.send_signal(signal.SIGTERM)
        until(lambda: request(address, "GET", "/health").status == 503)
        assert post(address, COMPLETIONS, SHORT).code == "shutting_down"
    assert process.wait(PATIENCE_S) == 0


def test_a_request_that_arrives_when_the_server_has_ended() -> None:
    service = Service(Options())
    service.end()
    with pytest.raises(ApiError) as caught:
        asyncio.run(service.prepare(int))
    assert (caught.value.status, caught.value.code) == (503, "shutting_down")


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_log_lines_that_nobody_reads_stop_no_answer(served_bundle: Path) -> None:
    command = [sys.executable, "-m", "eagle_serve.cli", str(served_bundle), "--port", "0", "--threads", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([*command, "--log-json"], stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        begun = (re.search(r"http://\S+", line) for line in process.stderr)  # after a note on the backend, if any
        match = next(filter(None, begun), None)
        assert match is not None
        for _ in range(1000):  # lines of a hundred characters; a pipe holds 64 KiB
            assert request(match[0], "GET", "/health").status == 200
        process.terminate()
        lines = process.stderr.read().splitlines()
        assert process.wait(PATIENCE_S) == 0
    wanted = {"method": "GET", "path": "/health", "status": 200}
    requests = [line for line in map(json.loads, lines) if "method" in line]  # the note may come after the address
    assert {name: requests[0][name] for name in wanted} == wanted


def test_lines_of_the_log_and_of_the_command_stay_apart(capfd: pytest.CaptureFixture[str]) -> None:
    """A line whose end were a second write would be joined with another thread's line."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with logged(as_json=True):
            for number in range(300):
                logging.getLogger("eagle_serve").info("request %d", number)
                print_line("eagle-serve", f"said {number}")
    finally:
        sys.setswitchinterval(interval)
    lines = capfd.readouterr().err.splitlines()
    said = [line for line in lines if line.startswith("eagle-serve: ")]
    assert said == [f"eagle-serve: said {number}" for number in range(300)]
    requests = [json.loads(line)["message"] for line in lines if not line.startswith("eagle-serve: ")]
    assert requests == [f"request {number}" for number in range(300)]


def test_the_command_says_in_one_line_what_is_wrong(
    served_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle_serve.cli import main

    monkeypatch.delenv("EAGLE_API_KEY", raising=False)
    (tmp_path / "short").write_text("abc")
    (tmp_path / "key").write_text("k" * 20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for arguments, said in (
            ((str(served_bundle), "--host", "0.0.0.0"), "API key is needed"),
            ((str(served_bundle), "--host", "example.com"), "API key is needed"),
            ((str(served_bundle), "--api-key-file", str(tmp_path / "short")), "at least 16"),
            ((str(served_bundle), "--api-key-file", str(tmp_path / "none")), "cannot be read"),
            ((str(served_bundle), "--port", port), "cannot listen at 127.0.0.1"),
            ((str(served_bundle), "--port", "99999"), "is not a number from 0 to 65535"),
            ((str(served_bundle), "--kv-budget", "many"), "is not a size like 2GB"),
            ((str(served_bundle), "--parallel", "17"), "is not a number from 1 to 16"),
            ((str(tmp_path / "nothing"), "--port", "0"), "is not a folder"),
        ):
            try:
                status = main(arguments)
            except SystemExit as end:
                status = int(str(end.code))
            printed = capfd.readouterr().err.strip().splitlines()
            assert status == 2 and said in printed[-1] and printed[-1].startswith("eagle-serve: "), arguments


def test_health_says_that_the_model_is_being_loaded() -> None:
    from starlette.testclient import TestClient

    from eagle_serve.app import Service, application

    client = TestClient(application(Service(Options()), 80), base_url="http://localhost")
    for answer in (client.get("/health"), client.post(COMPLETIONS, json=SHORT), client.get("/v1/models")):
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
        assert answer.headers["retry-after"] == "1"
    assert client.get("/metrics").status_code == 200 and client.get("/").status_code == 200


def test_events_of_a_stream() -> None:
    assert events(b': queued 1\n\ndata: {"a":1}\n\ndata: [DONE]\n\n') == [": queued 1", {"a": 1}, "[DONE]"]
