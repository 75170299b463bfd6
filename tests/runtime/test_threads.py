"""One model, many callers: threads, streams left half-way, models closed in the middle, forks, the program's end."""

from __future__ import annotations

import contextlib
import gc
import itertools
import linecache
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import eagle_runtime
from eagle_runtime import BusyError, ClosedError, EagleError, EagleModel, RequestError
from eagle_runtime.base.tree import Tree
from eagle_runtime.core import scheduler
from eagle_runtime.core.generate import Cycle
from eagle_runtime.core.target import Target
from eagle_runtime.core.ticket_queue import Ticket, TicketQueue
from eagle_runtime.sampling.noise import workers
from insides import sessions_of, turns_of
from patience import PATIENCE_S
from thread_calls import TREE, Thread, cases

SHORT: dict[str, Any] = {**TREE, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def model(bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    with EagleModel.load(bundle_of("eagle3"), threads=1, context=256, check_hashes=False) as loaded:
        yield loaded


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    both = threading.Barrier(2)
    for done in [workers().submit(both.wait, PATIENCE_S) for _ in range(2)]:  # they live as long as the process
        done.result()
    before = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - before
    assert [thread for thread in left if type(thread).__name__ != "TMonitor"] == []  # of an exporter's progress bar


class Gate:
    """A callback that reports the first time it is called, and then waits to be opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)


def tokens_of(model: EagleModel, prompt: list[int], **settings: Any) -> tuple[int, ...]:
    return model.generate(prompt, **{**SHORT, **settings}).token_ids


@pytest.fixture
def in_line(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Waits until one more caller waits for the caches of a model."""
    met: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
    check = scheduler._check_predecessor

    def checked(previous: Ticket) -> None:
        check(previous)
        met.put(previous)

    monkeypatch.setattr(scheduler, "_check_predecessor", checked)
    return lambda: (met.get(timeout=PATIENCE_S), None)[1]


# Many threads


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_eight_threads_on_models_and_twins_emit_what_each_would_alone(
    count: int, bundle_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    with contextlib.ExitStack() as stack:
        models = {
            precision: stack.enter_context(
                EagleModel.load(bundle_of("eagle3", precision), threads=1, context=256, check_hashes=False)
            )
            for precision in ("fp32", "int8")
        }
        twins = {precision: (model, model.twin()) for precision, model in models.items()}
        todo = cases(prompts, count)
        alone = []
        for precision, prompt, settings in todo:
            method = {} if precision == "fp32" else {"method": "vanilla", "tree": None}
            plain = {k: v for k, v in settings.items() if k not in TREE} if method else settings
            alone.append(models[precision].generate(prompt, **{**plain, **method}).token_ids)
        wrong: list[object] = []
        start = threading.Barrier(8)

        def work(first: int) -> None:
            start.wait(PATIENCE_S)
            for number in range(first, count, 8):
                precision, prompt, settings = todo[number]
                try:
                    emitted = twins[precision][number // 8 % 2].generate(prompt, **settings).token_ids
                except Exception as error:
                    wrong.append(error)
                else:
                    if emitted != alone[number]:
                        wrong.append((settings, emitted, alone[number]))

        for thread in [Thread(work, first) for first in range(8)]:
            thread.result()
        assert wrong == [] and len(set(alone)) > count // 3


def test_places_in_line_are_granted_in_order_of_arrival() -> None:
    tickets, order = TicketQueue(), list[int]()
    first = Ticket()
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(number: int) -> None:
        ticket = Ticket()
        with ticket.lock:
            tickets.wait_for_turn(ticket, lambda _: arrived.put(number))
            order.append(number)

    with first.lock:
        tickets.wait_for_turn(first, lambda _: None)
        threads = []
        for number in range(12):
            threads.append(Thread(take, number))
            for _ in range(number + 1):  # it sees all that came before
                assert arrived.get(timeout=PATIENCE_S) == number
    for thread in threads:
        thread.result()
    assert order == list(range(12))


def test_places_given_up_are_passed_by_and_not_kept() -> None:
    tickets, first, second = TicketQueue(), Ticket(), Ticket()

    def refuse(_: Ticket) -> None:
        raise BusyError("no")

    with first.lock:
        tickets.wait_for_turn(first, refuse)
        for _ in range(1000):
            ticket = Ticket()
            with ticket.lock, pytest.raises(BusyError):
                tickets.wait_for_turn(ticket, refuse)
        assert sum(type(thing) is Ticket for thing in gc.get_objects()) < 50
        waiting: queue.SimpleQueue[Ticket] = queue.SimpleQueue()

        def take() -> None:
            with second.lock:
                tickets.wait_for_turn(second, waiting.put)

        thread = Thread(take)
        assert waiting.get(timeout=PATIENCE_S) is first and thread.running
    thread.result()


def test_calls_of_generate_wait_for_each_other_in_order_of_arrival(
    model: EagleModel, prompts: list[list[int]], in_line: Callable[[], None]
) -> None:
    alone = [tokens_of(model, prompt) for prompt in prompts[:5]]
    gate, order = Gate(), list[int]()

    def run(number: int) -> tuple[int, ...]:
        if number == 0:
            return tokens_of(model, prompts[0], on_cycle=gate)
        return tokens_of(model, prompts[number], on_cycle=lambda _: order.append(number))

    threads = [Thread(run, 0)]
    assert gate.reached.wait(PATIENCE_S)
    for number in range(1, 5):
        threads.append(Thread(run, number))
        for _ in range(number):
            in_line()
    assert all(thread.running for thread in threads)
    gate.opened.set()
    assert [thread.result() for thread in threads] == alone
    assert [number for number, _ in itertools.groupby(order)] == [1, 2, 3, 4]


def test_the_time_spent_in_line_is_no_part_of_the_figures(
    model: EagleModel, prompts: list[list[int]], in_line: Callable[[], None]
) -> None:
    """They wait for a hundred times as long as they take alone."""
    alone = model.generate(prompts[1], **SHORT).usage
    pause, gate = 100 * (alone.prefill_s + alone.decode_s), Gate()
    first = Thread(lambda: tokens_of(model, prompts[0], on_cycle=gate))
    assert gate.reached.wait(PATIENCE_S)
    second = Thread(lambda: model.generate(prompts[1], **SHORT))
    in_line()
    time.sleep(pause)
    gate.opened.set()
    first.result()
    stats = second.result().usage
    assert 0 < stats.prefill_s < pause and 0 < stats.decode_s < pause


# Streams


def test_a_stream_of_another_thread_is_not_waited_for(model: EagleModel, prompts: list[list[int]]) -> None:
    wanted, other = tokens_of(model, prompts[0]), tokens_of(model, prompts[1])
    twin = model.twin()
    stream = model.stream(prompts[0], **SHORT)
    emitted = list(next(stream).token_ids)
    for call in (
        lambda: model.generate(prompts[1], **SHORT),
        lambda: next(model.stream(prompts[1], **SHORT)),
        lambda: next(model.score([5, 6])),
    ):
        with pytest.raises(BusyError, match="a stream of another thread"):
            Thread(call).result()
    assert Thread(lambda: tokens_of(twin, prompts[1])).result() == other
    for piece in stream:
        emitted += piece.token_ids
    assert tuple(emitted) == wanted
    assert Thread(lambda: tokens_of(model, prompts[1])).result() == other


@pytest.mark.parametrize("end", ["close", "drop", "finish", "error", "last piece"])
def test_a_stream_that_is_over_lets_other_threads_in(model: EagleModel, prompts: list[list[int]], end: str) -> None:
    wanted = tokens_of(model, prompts[1])
    stream = model.stream(prompts[0], **{**SHORT, "on_cycle": error_at(2) if end == "error" else None})
    next(stream)
    if end == "close":
        stream.close()
        stream.close()
    elif end == "drop":
        del stream
    elif end == "finish":
        list(stream)
    elif end == "last piece":
        while next(stream).result is None:
            pass
    else:
        with pytest.raises(ZeroDivisionError):
            list(stream)
    assert Thread(lambda: tokens_of(model, prompts[1])).result() == wanted


def error_at(cycle: int) -> Callable[[Cycle], None]:
    numbers = itertools.count(1)

    def on_cycle(_: Cycle) -> None:
        if next(numbers) == cycle:
            raise ZeroDivisionError

    return on_cycle


def test_a_stream_belongs_to_the_thread_that_asked_for_a_piece_last(
    model: EagleModel, prompts: list[list[int]]
) -> None:
    wanted = tokens_of(model, prompts[1])
    stream = model.stream(prompts[0], **SHORT)
    next(stream)
    Thread(lambda: next(stream)).result()
    with pytest.raises(BusyError):
        model.generate(prompts[1], **SHORT)
    next(stream)
    assert tokens_of(model, prompts[1]) == wanted  # in this thread it ends the stream
    with pytest.raises(RequestError, match="another generation"):
        next(stream)
    assert list(stream) == []


def test_threads_do_not_inherit_the_streams_of_those_that_ended(model: EagleModel) -> None:
    """Systems give an ended thread's number to the next."""
    streams = []
    for _ in range(20):
        try:
            stream = model.stream([5, 6], **SHORT)
            Thread(next, stream).result()
            streams.append(stream)
        except BusyError:
            pass
    assert len(streams) == 1
    next(streams[0])


def test_two_threads_do_not_share_a_piece(model: EagleModel) -> None:
    gate = Gate()
    stream = model.stream([5, 6], **{**SHORT, "on_cycle": gate})
    next(stream)
    thread = Thread(lambda: next(stream))
    assert gate.reached.wait(PATIENCE_S)
    with pytest.raises(BusyError, match="this stream"):
        next(stream)
    stream.close()  # which the other thread learns after its step
    assert not stream.done
    gate.opened.set()
    last = thread.result()
    assert last.token_ids and last.result.finish_reason == "cancelled" and stream.done


def test_a_stream_that_was_not_begun_disturbs_nobody(model: EagleModel, prompts: list[list[int]]) -> None:
    for settings in ({**SHORT, "max_new_tokens": 30}, {"max_new_tokens": 30, "ignore_eos": True}):
        cycles: list[list[Cycle]] = [[], []]
        for kept, also in zip(cycles, (False, True), strict=True):
            stream = model.stream(
                prompts[0], **{**settings, "method": "eagle", "tree": "dynamic"}, on_cycle=kept.append
            )
            for _ in stream:
                if also:
                    model.stream(prompts[1], **settings)
        trees = [[(c.tree.tokens.tolist(), c.step.path.tolist()) for c in kept] for kept in cycles]
        assert trees[0] == trees[1] and len(trees[0]) > 3


def test_scores_stay_when_a_twin_runs(model: EagleModel, prompts: list[list[int]]) -> None:
    text = (prompts[0] * 8)[:130]
    alone = [piece.copy() for piece in model.score(text)]
    twin, pieces = model.twin(), []
    for piece in model.score(text):
        tokens_of(twin, prompts[1])
        pieces.append(piece)
    assert len(pieces) == 3
    for piece, wanted in zip(pieces, alone, strict=True):
        np.testing.assert_array_equal(piece, wanted)


def test_a_generation_within_a_callback_ends_the_outer_one(
    model: EagleModel, prompts: list[list[int]], in_line: Callable[[], None]
) -> None:
    wanted = [tokens_of(model, prompt) for prompt in prompts[:3]]
    gate, inner = Gate(), list[tuple[int, ...]]()

    def on_cycle(_: Cycle) -> None:
        gate()
        inner.append(tokens_of(model, prompts[1]))

    outer = Thread(lambda: tokens_of(model, prompts[0], on_cycle=on_cycle))
    assert gate.reached.wait(PATIENCE_S)
    waiting = Thread(lambda: tokens_of(model, prompts[2]))  # after the outer one, before the inner
    in_line()
    gate.opened.set()
    with pytest.raises(RequestError, match="another generation"):
        outer.result()
    assert waiting.result() == wanted[2]
    assert inner == [wanted[1]]


# Left half-way


@pytest.mark.parametrize("method", ["eagle", "eagle+lookup", "lookup", "vanilla"])
@pytest.mark.parametrize("way", ["drop", "close", "throw"])
def test_after_a_stream_left_at_any_point_the_next_is_right(
    model: EagleModel, prompts: list[list[int]], method: Any, way: str
) -> None:
    settings: dict[str, Any] = {
        "method": method,
        "max_new_tokens": 10,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 3,
    }
    wanted = [model.generate(prompt, **settings).token_ids for prompt in prompts[:2]]
    for pieces in range(12):
        stream = model.stream(prompts[0], **settings)
        with contextlib.suppress(StopIteration):
            for _ in range(pieces):
                next(stream)
        if way == "close":
            stream.close()
        elif way == "throw":
            with contextlib.suppress(ZeroDivisionError):
                list(model.stream(prompts[0], **settings, on_cycle=error_at(pieces)))
        del stream
        assert model.generate(prompts[pieces % 2], **settings).token_ids == wanted[pieces % 2]


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line of eagle_runtime that its thread comes to. Lines with `with` and `try`
    are left out: there a trace function may raise where no interrupt can come, since nothing is called, and where the
    block around does not let go of its lock (a `with` is such a line once more at its block's end)."""

    def __init__(self, line: int) -> None:
        self.left = line
        self._folder = str(Path(eagle_runtime.__file__).parent)

    def __enter__(self) -> Interrupter:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "call" and not frame.f_code.co_filename.startswith(self._folder):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith(("with ", "try:")):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # interrupts in a destructor
@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_an_interrupt_anywhere_leaves_the_model_usable(
    bundle_of: Callable[..., Path], prompts: list[list[int]], precision: str, count: int
) -> None:
    settings: dict[str, Any] = {**TREE, "max_new_tokens": 6, "ignore_eos": True}
    with EagleModel.load(bundle_of("eagle3", precision), threads=1, context=128, check_hashes=False) as model:
        prompt = prompts[0][:20]
        wanted = model.generate(prompt, **settings).token_ids
        model.generate(prompt, **settings)  # buffers have grown, and all that is kept for later passes is there
        with Interrupter(-1) as lines:
            model.generate(prompt, **settings)
        random.seed(count)
        places = random.sample(range(1, -lines.left), min(count, -lines.left - 1))
        missed = 0
        for place in places:
            with contextlib.suppress(KeyboardInterrupt), Interrupter(place) as lines:
                model.generate(prompt, **settings)
            missed += lines.left > 0
            assert Thread(lambda: model.generate(prompt, **settings)).result().token_ids == wanted, place
        assert missed <= len(places) // 20  # the last ones: not every generation comes to as many lines


# Closed


def uses(model: EagleModel) -> dict[str, Callable[[], Any]]:
    """All that a model offers and that takes its engines."""
    return {
        "generate": lambda: model.generate([5, 6]),
        "stream": lambda: model.stream([5, 6]),
        "score": lambda: model.score([5, 6]),
        "costs": model.costs,
        "twin": model.twin,
        "head": lambda: model.head,
        "check": lambda: model.check([5, 6]),
        "with": model.__enter__,
    }


def test_a_closed_model_and_its_twins_say_so(model: EagleModel) -> None:
    twin = model.twin()
    begun, not_begun, scored = model.stream([5, 6]), twin.stream([5, 6]), twin.score([5, 6] * 50)
    next(begun)
    next(scored)
    twin.close()
    model.close()
    twin.close()
    for closed in (model, twin):
        for call in uses(closed).values():
            with pytest.raises(ClosedError, match="the model is closed"):
                call()
        assert closed.default_method and closed.manifest.head is not None  # what needs no engine stays
    for stream in (begun, not_begun, scored):
        with pytest.raises(ClosedError):
            next(stream)
        assert list(stream) == []


def test_closed_from_another_thread_a_generation_ends(model: EagleModel, prompts: list[list[int]]) -> None:
    gate = Gate()
    running = [
        Thread(lambda: tokens_of(model, prompts[0], on_cycle=gate)),
        Thread(lambda: tokens_of(model.twin(), prompts[1], on_cycle=gate)),
    ]
    assert gate.reached.wait(PATIENCE_S)
    waiting = Thread(lambda: tokens_of(model, prompts[0], on_cycle=gate))
    model.close()  # nobody is in a step: nothing to wait for
    gate.opened.set()
    for thread in (*running, waiting):
        with pytest.raises(ClosedError):
            thread.result()


def test_close_waits_for_the_running_step(
    model: EagleModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, feeds = Gate(), Target._feeds_of
    freed: list[bool] = []

    def verify_late(self: Target, tree: Tree, sampler: Any) -> Any:
        gate()
        return feeds(self, tree, sampler)

    def close_noted(close: Callable[[], None]) -> None:
        freed.append(gate.opened.is_set())
        close()

    monkeypatch.setattr(Target, "_feeds_of", verify_late)
    for session in sessions_of(model):
        monkeypatch.setattr(session, "close", partial(close_noted, session.close))
    running = Thread(lambda: tokens_of(model, prompts[0]))
    assert gate.reached.wait(PATIENCE_S)
    closing = [Thread(model.close) for _ in range(3)]
    with contextlib.suppress(ClosedError):
        while True:  # until the first of them has begun
            model.stream([5, 6])
    assert all(thread.running for thread in closing) and freed == []
    gate.opened.set()
    with pytest.raises(ClosedError):
        running.result()
    for thread in closing:
        thread.result()
    assert freed == [True, True]


@pytest.mark.parametrize("where", ["callback", "pieces", "score", "twin"])
def test_closed_by_its_own_caller_a_generation_ends(model: EagleModel, prompts: list[list[int]], where: str) -> None:
    if where == "callback":
        with pytest.raises(ClosedError):
            tokens_of(model, prompts[0], on_cycle=lambda _: model.close())
        return
    by = model.twin() if where == "twin" else model
    stream = model.score(prompts[0] * 4) if where == "score" else model.stream(prompts[0], **SHORT)
    next(stream)
    by.close()
    with pytest.raises(ClosedError):
        next(stream)


@pytest.mark.skipif(sys.platform == "win32", reason="raise_signal of a handler that runs at once is POSIX")
def test_a_signal_handler_in_the_middle_of_a_step(
    model: EagleModel, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may close the model; it cannot decode."""
    feeds, refused = Target._feeds_of, list[type[Exception]]()

    def verify_interrupted(self: Target, tree: Any, sampler: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return feeds(self, tree, sampler)

    def handler(*_: object) -> None:
        try:
            model.twin().generate([5, 6])
        except EagleError as error:
            refused.append(type(error))
        model.close()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        monkeypatch.setattr(Target, "_feeds_of", verify_interrupted)
        with pytest.raises(ClosedError):
            tokens_of(model, prompts[0])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert refused == [BusyError]
    assert turns_of(model).engines._sessions == []


def test_closed_at_any_moment(bundle_of: Callable[..., Path], prompts: list[list[int]]) -> None:
    for closing in range(8):
        model = EagleModel.load(bundle_of("eagle3"), threads=1, context=256, check_hashes=False)
        wanted = tokens_of(model, prompts[0])
        many = threading.Semaphore(0)

        def run(used: EagleModel, wanted: tuple[int, ...] = wanted, many: threading.Semaphore = many) -> None:
            while True:
                assert tokens_of(used, prompts[0], on_cycle=lambda _: many.release()) == wanted

        threads = [Thread(run, used) for used in (model, model, model.twin(), model.twin())]
        for _ in range(3 * closing + 1):
            assert many.acquire(timeout=PATIENCE_S)
        model.close()
        for thread in threads:
            with pytest.raises(ClosedError):
                thread.result()


# Processes

SCRIPT = """
import os, sys, threading, time
from eagle_runtime import ClosedError, EagleModel
model = EagleModel.load({bundle!r}, threads=2, context=256, check_hashes=False)
settings = dict(method="eagle", tree="dynamic", max_new_tokens=12, ignore_eos=True)
prompt = list(range(5, 30))
alone = model.generate(prompt, **settings).token_ids
"""

FORK = """
twin, stream = model.twin(), model.stream(prompt, **settings)
next(stream)
running, stop = threading.Event(), threading.Event()

def work():
    while not stop.is_set():
        assert twin.generate(prompt, on_cycle=lambda _: running.set(), **settings).token_ids == alone

thread = threading.Thread(target=work)
thread.start()
running.wait()
def child(how):
    for call in (lambda: model.generate(prompt), lambda: twin.generate(prompt), lambda: next(stream), twin.twin,
                 lambda: model.stream(prompt), lambda: model.score(prompt), model.costs, lambda: model.check(prompt)):
        try:
            call()
        except ClosedError as error:
            assert "forked" in str(error) and "load the bundle in the new process" in str(error)
        else:
            os._exit(3)
    if how == "load":
        with EagleModel.load({bundle!r}, threads=2, context=256, check_hashes=False) as own:
            assert own.generate(prompt, **settings).token_ids == alone
    if how == "close":
        model.close()
        twin.close()
    if how == "drop":
        for name in ("model", "twin", "stream"):
            del globals()[name]
    if how == "_exit":
        os._exit(0)
    sys.exit(0)

for how in ("close", "drop", "exit", "_exit", "load"):
    if (pid := os.fork()) == 0:
        child(how)
    end = time.monotonic() + {patience}
    while (done := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            print(how, "does not end")
            break
        time.sleep(0.01)
    else:
        print(how, os.waitstatus_to_exitcode(done[1]))
stop.set()
thread.join()
whole = [token for piece in stream for token in piece.token_ids]
assert model.generate(prompt, **settings).token_ids == alone == tuple(alone[:1]) + tuple(whole)
model.close()
print("parent")
"""


def in_process(code: str, bundle: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    env = {**os.environ, "PYTHONPATH": path, "ORT_DISABLE_TELEMETRY": "1"}
    code = (SCRIPT + code).format(bundle=str(bundle), patience=20)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE_S)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_gets_an_error_and_ends(bundle_of: Callable[..., Path]) -> None:
    done = in_process(FORK, bundle_of("eagle3"))
    assert done.stdout.split("\n") == ["close 0", "drop 0", "exit 0", "_exit 0", "load 0", "parent", ""], done.stderr
    assert done.stderr == "" and done.returncode == 0


LEFT = """
streams = [model.stream(prompt, **settings) for _ in range(2)]
next(streams[0])
sys.exit(0)
"""

DAEMON = """
text = (prompt * 9)[:250]
running = threading.Event()

def work():
    try:
        while True:
            for _ in model.score(text):
                running.set()
    except ClosedError:
        pass

threading.Thread(target=work, daemon=True).start()
running.wait()
"""


def test_a_program_ends_with_a_stream_half_way(bundle_of: Callable[..., Path]) -> None:
    done = in_process(LEFT, bundle_of("eagle3"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_program_ends_while_a_daemon_thread_decodes(bundle_of: Callable[..., Path]) -> None:
    for _ in range(3):
        done = in_process(DAEMON, bundle_of("eagle3"))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
