"""Answers on their way to the client: a stream, or one object; either way the client may go away."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from eagle_runtime import Piece, Result
from eagle_serve.dialect import Writer
from eagle_serve.errors import ApiError
from eagle_serve.jobs import Event, Events, Job, Jobs
from eagle_serve.metrics import Metrics
from eagle_serve.options import Limits


class EventStream:
    """An ASGI response that streams the answers to a request."""

    def __init__(
        self, answers: Mapping[Job, Writer], events: Events, jobs: Jobs, metrics: Metrics, limits: Limits, headers: Any
    ) -> None:
        """events: of the request's jobs; answers: what writes theirs; headers: more headers of the response, name ->
        value."""
        self._answers = answers
        self._first, self._answer = next(iter(answers.items()))
        self._events = events
        self._jobs = jobs
        self._metrics = metrics
        self._limits = limits
        self._headers = headers
        self._written = time.monotonic()  # when, the last time
        self._sending: float | None = None  # since when the client has not taken what was written
        self._stalled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(disconnected(receive))
        gone.add_done_callback(lambda task: None if task.cancelled() else self._withdraw())
        looking = asyncio.create_task(self._look(asyncio.current_task()))
        complete = False
        try:
            complete = await self._run(send, gone)
        except asyncio.CancelledError:
            if not self._stalled:
                raise
        except OSError:
            pass
        finally:
            gone.cancel()
            looking.cancel()
            if not complete:
                self._withdraw()
                self._metrics.add("cancelled")

    def _withdraw(self) -> None:
        for job in self._answers:
            self._jobs.withdraw(job, "client")

    async def _look(self, task: asyncio.Task[Any] | None) -> None:
        """Wake the stream from time to time, and cancel it where its client does not read. One timer for all that it
        sends: one for each token would cost more than the token's text."""
        assert task is not None
        while True:
            await asyncio.sleep(self._limits.look_s)
            if self._sending is None:
                self._events.wake()
            elif time.monotonic() - self._sending > self._limits.unread_s:
                self._stalled = True
                task.cancel()

    async def _run(self, send: Send, gone: asyncio.Task[None]) -> bool:
        """Returns whether the answer was sent to its end, be it an error."""
        headers = {"content-type": self._answer.media_type, "x-accel-buffering": "no", **self._headers}
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": Headers(headers).raw})
        await self._write(send, b"".join(answer.begin() for answer in self._answers.values()))
        said, left = "", len(self._answers)
        while not gone.done():
            news = await self._events.take()
            if news:
                content = b""
                for job, event in news:
                    content += self._content(job, event)
                    if isinstance(event, ApiError):  # which ends the stream, and with it the other answers
                        self._withdraw()
                        left = 0
                        break
                    left -= event.result is not None
                if not left:
                    await self._send(send, _body(content, more=False))
                    return True
                await self._write(send, content)
                continue
            silent, state = time.monotonic() - self._written, self._state()
            if silent > self._limits.ping_s or (silent > self._limits.look_s / 2 and state != said):
                said = state
                await self._write(send, self._answer.waiting(state))
        return False

    def _content(self, job: Job, event: Event) -> bytes:
        """What the stream says of an event."""
        answer = self._answers[job]
        if isinstance(event, ApiError):
            return answer.failed(event)
        content = answer.add(event)
        return content if event.result is None else content + answer.end(event.result)

    def _state(self) -> str:
        """What the client waits for."""
        if (place := self._jobs.ahead(self._first)) is not None:
            return f"queued {place}"
        if self._first.first is None:
            done, total = self._first.prefill
            return f"prefill {done}/{total}"
        return "decoding"

    async def _write(self, send: Send, content: bytes) -> None:
        if content:
            await self._send(send, _body(content))

    async def _send(self, send: Send, message: Message) -> None:
        self._sending = time.monotonic()
        await send(message)
        self._sending, self._written = None, time.monotonic()


async def whole(
    asked: Sequence[Job], events: Events, jobs: Jobs, metrics: Metrics, receive: Receive
) -> list[tuple[list[Piece], Result]]:
    """Returns the pieces and the result of each of a request's jobs. Raises ApiError, and ConnectionError if the client
    goes away; either cancels the jobs."""
    gone = asyncio.create_task(disconnected(receive))
    pieces: dict[Job, list[Piece]] = {job: [] for job in asked}
    results: dict[Job, Result] = {}
    failed = False
    try:
        while len(results) < len(asked):
            news = asyncio.create_task(events.take())
            await asyncio.wait((news, gone), return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                news.cancel()
                raise ConnectionError("the client went away")
            for job, event in news.result():
                if isinstance(event, ApiError):
                    failed = True
                    raise event
                pieces[job].append(event)
                if event.result is not None:
                    results[job] = event.result
        return [(pieces[job], results[job]) for job in asked]
    finally:
        if len(results) < len(asked):
            for job in asked:
                jobs.withdraw(job, "client")
            if not failed:
                metrics.add("cancelled")
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone


async def disconnected(receive: Receive) -> None:
    """Wait until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _body(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
