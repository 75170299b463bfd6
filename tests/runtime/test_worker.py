"""eagle-run --worker: orders and events as lines of JSON, whatever comes down the pipe."""

from __future__ import annotations

import itertools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import with_template
from eagle_runtime import EagleModel
from eagle_runtime.commands.worker_pipes import LONGEST, MOST_PENDING, PAUSE, Writer
from patience import PATIENCE_S

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: "
NOISY = """
import ctypes, os, sys, threading, time
from eagle_runtime.commands.worker import main

def noise():
    libc = ctypes.CDLL(None)
    while True:
        if os.fstat(1) == os.fstat(2):       # the worker has moved descriptor 1
            libc.write(1, b"native noise\\n", 13)
        time.sleep(0.001)

threading.Thread(target=noise, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""
PARENT = """
import subprocess, sys, time
worker = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
worker.stdin.write(b'{"id": 1, "op": "hello"}\\n'); worker.stdin.flush(); worker.stdout.readline()
kept = [worker.stdin.fileno(), worker.stdout.fileno()]
keeper = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=kept)
print(worker.pid, keeper.pid, flush=True)
time.sleep(600)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Worker:
    """A worker process, and its events as they come."""

    def __init__(self, *arguments: object, code: str | None = None) -> None:
        start = ["-m", "eagle_runtime.commands.cli", "--worker"] if code is None else ["-c", code]
        self.process = subprocess.Popen(
            [sys.executable, *start, *map(str, arguments), "--threads", "1"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.errors = b""
        for work in (self._read, self._drain):
            threading.Thread(target=work, daemon=True).start()

    def send(self, **order: Any) -> None:
        self.write(json.dumps(order).encode() + b"\n")

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def next(self) -> dict[str, Any]:
        event = self._events.get(timeout=PATIENCE_S)
        assert event is not None, self.errors.decode()
        return event

    def until_end_of(self, order_id: Any) -> list[dict[str, Any]]:
        """The events up to the one that ends an order."""
        events = [self.next()]
        while events[-1]["id"] != order_id or events[-1]["event"] not in ("done", "error"):
            events.append(self.next())
        return events

    def ask(self, **order: Any) -> dict[str, Any]:
        """The last event of an order."""
        self.send(**order)
        return self.until_end_of(order["id"])[-1]

    def rest(self) -> list[dict[str, Any]]:
        """End the input; returns the events that are left. The exit status must be 0."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        events = []
        while (event := self._events.get(timeout=PATIENCE_S)) is not None:
            events.append(event)
        assert self.process.wait(PATIENCE_S) == 0, self.errors.decode()
        return events

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            assert line.isascii() and line.endswith(b"\n")
            self._events.put(json.loads(line))
        self._events.put(None)

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line


@pytest.fixture(scope="module")
def worker_bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("worker") / "pair", TEMPLATE)


@pytest.fixture
def worker(worker_bundle: Path) -> Iterator[Worker]:
    opened = Worker(worker_bundle)
    yield opened
    opened.process.kill()
    opened.process.wait()


def test_an_answer_comes_in_pieces(worker: Worker, worker_bundle: Path) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    with EagleModel.load(worker_bundle, threads=1) as model:
        wanted = model.generate("ab\n" * 180, **settings)
    worker.send(id="a", op="generate", prompt="ab\n" * 180, logprobs=2, prompt_logprobs=0, **settings)
    events = worker.until_end_of("a")
    assert [event["event"] for event in events[:2]] == ["accepted", "prefill"]
    assert events[1]["done"] < events[1]["total"] == 540
    pieces, done = [event for event in events if event["event"] == "piece"], events[-1]
    assert "".join(piece["text"] for piece in pieces) == done["result"]["text"] == wanted.text
    ids = [token for piece in pieces for token in piece["tokens"]]
    assert ids == done["result"]["token_ids"] == list(wanted.token_ids)
    assert all(len(piece["logprobs"]) == len(piece["tokens"]) == len(piece["drafted"]) for piece in pieces)
    assert len(pieces[0]["logprobs"][0]["top"]) == 2 and len(done["result"]["prompt"]) == 540
    assert done["result"]["finish_reason"] == "length" and done["result"]["seed"] == 3
    assert worker.rest() == []


def test_hello_status_and_counts(worker: Worker) -> None:
    worker.send(id=1, op="hello")
    hello, done = worker.until_end_of(1)
    assert hello["event"] == "hello" and hello["protocol"] == 1 and hello["context"] == 2048 and hello["chat"]
    assert done == {"id": 1, "event": "done", "result": {}}
    assert worker.ask(id=2, op="count_tokens", prompt="abc")["result"] == {"tokens": 3}
    worker.send(id=3, op="status")
    status = worker.until_end_of(3)[0]
    assert status["orders"] == 0 and status["memory"]["weights"] > 0
    assert worker.ask(id=4, op="shutdown")["event"] == "done"
    assert worker.process.wait(PATIENCE_S) == 0


def test_conversations(worker: Worker, tmp_path: Path) -> None:
    answer = {"op": "generate", "max_new_tokens": 12}
    name = worker.ask(id=1, op="conversation", action="open", messages=[{"role": "system", "content": "x"}])["result"][
        "conversation"
    ]
    first = worker.ask(id=2, conversation=name, message="ab", **answer)["result"]
    second = worker.ask(id=3, conversation=name, message="cd", **answer)["result"]
    assert second["usage"]["cached_tokens"] > 0
    messages = [
        {"role": "system", "content": "x"}, {"role": "user", "content": "ab"},
        {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "cd"},
    ]  # fmt: skip
    assert worker.ask(id=4, messages=messages, **answer)["result"]["text"] == second["text"]
    path = str(tmp_path / "saved")
    assert worker.ask(id=5, op="conversation", action="save", conversation=name, path=path)["result"]["bytes"] > 1000
    other = worker.ask(id=6, op="conversation", action="load", path=path)["result"]
    assert other["messages"] == 5 and other["kv_status"] == "resident"
    fork = worker.ask(id=7, op="conversation", action="fork", conversation=name)["result"]["conversation"]
    edit = {"op": "conversation", "action": "edit", "conversation": fork, "index": 3, "content": "zz"}
    assert worker.ask(id=8, **edit)["result"]["messages"] == 5
    back = worker.ask(id=9, op="conversation", action="rollback", conversation=name, to=4)["result"]
    assert back["messages"] == 4
    again = worker.ask(id=10, conversation=name, regenerate=True, **answer)["result"]
    assert again["text"] == second["text"]
    assert worker.ask(id=11, op="conversation", action="close", conversation=name)["event"] == "done"
    refused = worker.ask(id=12, conversation=name, message="x", **answer)
    assert refused["event"] == "error" and refused["code"] == "request"


def test_cancel_while_it_waits_and_while_it_runs(worker: Worker) -> None:
    long = {"op": "generate", "prompt": "ab", "max_new_tokens": 2000, "ignore_eos": True}
    worker.send(id="runs", **long)
    worker.send(id="waits", **long)
    while worker.next()["event"] != "piece":
        pass
    assert worker.ask(id="other", op="hello")["event"] == "done", "the reader takes lines during an answer"
    worker.send(id="runs", op="hello")
    error = worker.next()
    while error["event"] != "error":
        error = worker.next()
    assert error["id"] is None and "in use" in error["message"]
    worker.send(id="c1", op="cancel", target="waits")
    worker.send(id="c2", op="cancel", target="runs")
    worker.send(id="c3", op="cancel", target="nothing")
    ends: dict[str, Any] = {}
    while len(ends) < 5:
        event = worker.next()
        if event["event"] == "done":
            assert event["id"] not in ends
            ends[event["id"]] = event["result"]
    assert ends["c1"] == ends["c2"] == {"cancelled": True} and ends["c3"] == {"cancelled": False}
    assert ends["runs"]["finish_reason"] == ends["waits"]["finish_reason"] == "cancelled"
    assert 0 < len(ends["runs"]["token_ids"]) < 2000 and ends["waits"]["token_ids"] == []


def test_the_end_of_input_ends_the_answer(worker: Worker) -> None:
    worker.send(id=1, op="generate", prompt="ab", max_new_tokens=2000, ignore_eos=True)
    while worker.next()["event"] != "piece":
        pass
    done = worker.rest()[-1]
    assert done["event"] == "done" and done["result"]["finish_reason"] == "cancelled"
    assert len(done["result"]["token_ids"]) < 2000


def fuzzed(seed: int) -> bytes:
    """One line: an order with damage, or no order at all."""
    rng = random.Random(seed)
    values: list[Any] = [
        None, True, -1, 0, 3, 2**70, 1e999, float("nan"), "", "ab", "\ud800", "c1", "x" * 400, [], [1, 2], ["a"], {},
        {"role": "user", "content": "hi"}, [{"role": "user", "content": "hi"}], [{"role": 1}], {"regex": "a+"},
        {"5": 1}, "vanilla", "chain", [[]], {"choice": ["a", "b"]},
    ]  # fmt: skip
    order: dict[str, Any] = {"id": f"f{seed}", "op": rng.choice(["generate", "generate", "count_tokens", "conversation",
                                                              "cancel", "status", "hello", "nothing"])}  # fmt: skip
    if order["op"] == "generate":
        order |= {"prompt": "ab", "max_new_tokens": 2}
    if order["op"] == "conversation":
        order["action"] = rng.choice(["open", "open", "fork", "edit", "rollback", "load", "save", "close", "x"])
    names = [
        "prompt", "messages", "tools", "template_kwargs", "conversation", "message", "regenerate", "stop", "seed",
        "tree", "logprobs", "constraint", "method", "temperature", "top_p", "logit_bias", "stop_token_ids",
        "min_new_tokens", "depth", "index", "content", "to", "target", "max_new_tokens", "path", "op", "unknown",
    ]  # fmt: skip
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        order[rng.choice(names)] = rng.choice(values)
    if isinstance(order.get("path"), str):
        order["path"] = "/nowhere/" + order["path"]
    line = json.dumps(order, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    damage = rng.random()
    if damage < 0.15:
        place = rng.randrange(len(line))
        line = line[:place] + bytes(rng.randrange(256) for _ in range(3)) + line[place + rng.randrange(4) :]
    elif damage < 0.2:
        line = rng.choice([b"", b"[" * 10**5, b"null", b'"x"', b"1" * 10**4, line[: len(line) // 2], b'{"id": []}'])
    return line.replace(b"\n", b" ") + b"\n"


def check_fuzzed(worker: Worker, count: int) -> None:
    """Send lines, some at a time, and count the ends: one for each line that has an id, the others are errors."""
    ends: dict[str, int] = {}
    codes: dict[str, int] = {}
    for start in range(0, count, 100):
        lines = [fuzzed(seed) for seed in range(start, start + 100)]
        worker.write(b"".join(lines))
        worker.send(id=start, op="conversation", action="open")  # carried out after all of them
        for event in worker.until_end_of(start):
            if event["event"] in ("done", "error"):
                ends[str(event["id"])] = ends.get(str(event["id"]), 0) + 1
                codes[event.get("code", "done")] = codes.get(event.get("code", "done"), 0) + 1
                assert event.get("code") != "internal", (event, worker.errors.decode()[-2000:])
        for seed, line in enumerate(lines, start):
            try:
                order = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError):
                continue
            if isinstance(order, dict) and order.get("id") == f"f{seed}":
                assert ends.get(f"f{seed}") == 1, order
        for number in (1, 2, 3):
            worker.ask(id=f"close{start}.{number}", op="conversation", action="close", conversation=f"c{start}")
    assert all(many == 1 for name, many in ends.items() if name != "None")
    assert codes["done"] > count // 10 and codes["request"] + codes["line"] > count // 10
    assert worker.ask(id="last", op="generate", prompt="ab", max_new_tokens=3)["result"]["finish_reason"]


def test_damaged_lines(worker: Worker) -> None:
    check_fuzzed(worker, 500)


@pytest.mark.parametrize("levels", [100, 500, 900, 100_000])
def test_lines_of_many_levels(levels: int, worker: Worker) -> None:
    deep, count = "[" * levels + "]" * levels, 0
    for op, names in (("generate", ("prompt", "messages", "tools", "template_kwargs", "constraint", "stop", "results")),
                      ("conversation", ("messages", "tools", "template_kwargs"))):  # fmt: skip
        for name in names:
            more = '"action": "open", ' if op == "conversation" else ""
            worker.write(f'{{"id": "{name}", "op": "{op}", {more}"{name}": {deep}}}\n'.encode())
            count += 1
    events = [worker.next() for _ in range(count)]
    assert {event["event"] for event in events} == {"error"} and {event["code"] for event in events} == {"line"}
    assert levels > 1000 or [event["id"] for event in events].count(None) == 0
    assert worker.ask(id="last", op="generate", prompt="ab", max_new_tokens=3)["result"]["finish_reason"]
    assert b"Error" not in worker.errors, worker.errors.decode()


@pytest.mark.slow
def test_ten_thousand_damaged_lines(worker: Worker) -> None:
    check_fuzzed(worker, 10_000)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_line_that_is_too_long_is_not_stored(worker: Worker) -> None:
    def peak() -> int:
        status = Path(f"/proc/{worker.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    worker.ask(id=0, op="generate", prompt="ab", max_new_tokens=3)
    before = peak()
    for _ in range(50):
        worker.write(b"x" * 10**6)
    worker.write(b"\n")
    error = worker.next()
    assert (error["id"], error["code"]) == (None, "line") and "16 MiB" in error["message"]
    assert worker.ask(id=1, op="hello")["event"] == "done"
    grown = peak() - before
    assert grown < LONGEST + (4 << 20), grown


@pytest.mark.skipif(sys.platform == "win32", reason="calls the C library by its name")
def test_what_a_library_writes_does_not_reach_the_protocol(worker_bundle: Path) -> None:
    noisy = Worker(worker_bundle, code=NOISY)
    for number in range(3):
        assert noisy.ask(id=number, op="generate", prompt="ab", max_new_tokens=50)["event"] == "done"
    noisy.rest()
    assert noisy.errors.count(b"native noise\n") > 3


@pytest.mark.skipif(sys.platform == "win32", reason="kills as POSIX does")
def test_it_ends_with_its_parent(worker_bundle: Path) -> None:
    """Also where another process holds the pipes open."""
    command = [sys.executable, "-m", "eagle_runtime.commands.cli", "--worker", str(worker_bundle)]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stdout=subprocess.PIPE, env=environment(), text=True
    )
    assert parent.stdout is not None
    worker, keeper = map(int, parent.stdout.readline().split())
    try:
        parent.kill()
        parent.wait()
        end = time.monotonic() + PATIENCE_S
        while _runs(worker):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert _runs(keeper)
    finally:
        os.kill(keeper, signal.SIGKILL)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_memory_limit(worker_bundle: Path) -> None:
    weights = sum(path.stat().st_size for path in worker_bundle.rglob("*") if path.is_file())
    for limit, draft in ((weights, ()), (2 * weights, ("--draft-bundle", str(worker_bundle)))):
        refused = Worker(worker_bundle, "--memory-limit", limit, *draft)
        assert refused.process.wait(PATIENCE_S) == 2
    small = Worker(worker_bundle, "--memory-limit", weights + (1 << 20))
    answer = {"op": "generate", "max_new_tokens": 4}
    for number in range(4):
        small.ask(id=f"open{number}", op="conversation", action="open")
        assert small.ask(id=number, conversation=f"c{number + 1}", message="ab", **answer)["event"] == "done"
    small.send(id="s", op="status")
    memory = small.until_end_of("s")[0]["memory"]
    assert memory["kv_budget"] == 1 << 20 and memory["dropped"] > 0
    error = small.ask(id="big", prompt="a" * 2000, **answer)
    assert (error["event"], error["code"]) == ("error", "memory_limit")
    small.rest()


def test_a_reader_that_pauses() -> None:
    """A turn waits while much is unread; what is answered meanwhile is sent, and all of it arrives in order."""
    source, sink = os.pipe()
    writer = Writer(sink)
    sent = 0
    while sent * 1000 < PAUSE + (1 << 17):
        writer.put({"number": sent, "text": "x" * 980})
        sent += 1
    asked = itertools.count(1)
    writer.wait_for_reader(lambda: next(asked) == 3)
    assert next(asked) == 4, "it waits until it is given up"
    received = b""
    while received.count(b"\n") < sent:
        received += os.read(source, 1 << 16)
    writer.wait_for_reader(lambda: False)
    writer.flush()
    assert [json.loads(line)["number"] for line in received.splitlines()] == list(range(sent))
    assert MOST_PENDING > PAUSE
    os.close(source)
    writer.put({})
    writer.flush()
    assert writer.broken


def test_calls_of_tools(worker: Worker) -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    chat = worker.ask(id=1, op="conversation", action="open", tools=tools, tool_format="llama")["result"][
        "conversation"
    ]
    asked: dict[str, Any] = {"op": "generate", "conversation": chat, "temperature": 0, "max_new_tokens": 100}
    worker.send(id=2, message="What time is it?", tool_choice="required", **asked)
    events = worker.until_end_of(2)
    parts = [part for event in events for part in event.get("parts", ())]
    assert parts[0]["kind"] == "call" and parts[0]["text"] == "clock"
    result = events[-1]["result"]
    (call,) = result["message"]["tool_calls"]
    assert result["finish_reason"] == "tool_calls" and call["function"] == {"name": "clock", "arguments": "{}"}
    wrong = worker.ask(id=3, results={"x": 1}, **asked)
    assert wrong["code"] == "request" and "results are of the calls ['x']" in wrong["message"]
    done = worker.ask(id=4, results={call["id"]: "12:00"}, tool_choice="none", **{**asked, "max_new_tokens": 4})
    assert done["event"] == "done"
    alone = worker.ask(
        id=5, op="generate", messages=[{"role": "user", "content": "?"}], tools=tools, tool_choice="required",
        parallel_tool_calls=False, max_new_tokens=100,
    )  # fmt: skip
    assert alone["result"]["message"]["tool_calls"][0]["function"]["name"] == "clock"
    refused = worker.ask(id=6, op="generate", prompt="x", tool_choice="required")
    assert refused["event"] == "error" and "tool_choice" in refused["message"]
