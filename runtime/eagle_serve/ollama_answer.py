"""Answers as Ollama writes them: one object, or a line of JSON for each piece. A call of a tool comes whole, once its
arguments are; times are in nanoseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from eagle_runtime import Part, Piece, Result
from eagle_serve.dialect import Body, Writer
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError
from eagle_serve.figures import logprob, message_of, parts_of, shown
from eagle_serve.frames import LINES, line
from eagle_serve.jobs import Job


def head(engine: Engine, body: Body) -> dict[str, Any]:
    """What every line begins with: the model by the name that was asked for."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    return {"model": body.get("model") or f"{engine.names[0]}:latest", "created_at": now}


class GenerateAnswer(Writer):
    """Writes an answer of /api/generate."""

    media_type = LINES

    def __init__(self, engine: Engine, job: Job, body: Body) -> None:
        super().__init__(engine, job)
        self._body = body
        self._call: list[Part] = []  # of a tool, so far

    def whole(self, pieces: Sequence[Piece], result: Result) -> dict[str, Any]:
        message = message_of(pieces, result)
        calls = [_call(call["function"], index, call["id"]) for index, call in enumerate(message.get("tool_calls", ()))]
        said = self._said(message["content"] or "", message.get("reasoning_content", ""), [one for one in calls if one])
        logprobs = [one for piece in pieces for one in self._logprobs(piece)]
        return {**head(self._engine, self._body), **said, **self._end(result), **_named(logprobs)}

    def add(self, piece: Piece) -> bytes:
        """A line for each part, and for each call that is whole."""
        lines = b""
        logprobs = self._logprobs(piece)
        for part in parts_of(piece, self._job):
            if part.kind == "arguments":
                self._call.append(part)
                continue
            lines += self._called()
            if part.kind == "call":
                self._call = [part]
                continue
            content, thinking = (part.text, "") if part.kind == "content" else ("", part.text)
            lines += self._line(self._said(content, thinking, []), **_named(logprobs))
            logprobs = []
        if logprobs:
            lines += self._line(self._said("", "", []), **_named(logprobs))
        return lines

    def end(self, result: Result) -> bytes:
        """The line with the counts, after the last call."""
        return self._called() + self._line(self._said("", "", []), **self._end(result))

    def failed(self, error: ApiError) -> bytes:
        return line({"error": error.message})

    def waiting(self, state: str) -> bytes:
        """Nothing: lines have no comments."""
        return b""

    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """What a line says."""
        return {"response": content, **({"thinking": thinking} if thinking else {}), **_calls(calls)}

    def _line(self, said: dict[str, Any], **fields: Any) -> bytes:
        return line({**head(self._engine, self._body), **said, "done": False, **fields})

    def _called(self) -> bytes:
        """The line of the call that has ended, unless it was cut off."""
        if not self._call:
            return b""
        first, self._call, rest = self._call[0], [], self._call[1:]
        function = {"name": first.text, "arguments": "".join(part.text for part in rest)}
        call = _call(function, first.index, first.id)
        return self._line(self._said("", "", [call])) if call else b""

    def _logprobs(self, piece: Piece) -> list[dict[str, Any]]:
        if self._job.prepared.request.logprobs is None:
            return []
        return [logprob(self._engine, token) for token in shown(piece)]

    def _end(self, result: Result) -> dict[str, Any]:
        usage = result.usage
        return {
            "done": True,
            "done_reason": "length" if result.finish_reason == "length" else "stop",
            "total_duration": _ns(usage.queue_s + usage.prefill_s + usage.decode_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(usage.prefill_s),
            "eval_count": usage.new_tokens,
            "eval_duration": _ns(usage.decode_s),
        }


class ChatAnswer(GenerateAnswer):
    """Writes an answer of /api/chat, whose lines hold messages."""

    def _said(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"thinking": thinking} if thinking else {}
        return {"message": {"role": "assistant", "content": content, **more, **_calls(calls)}}


def _calls(calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"tool_calls": calls} if calls else {}


def _call(function: dict[str, Any], index: int, call_id: str) -> dict[str, Any] | None:
    """A call with its arguments as an object; None where they were cut off, or are not JSON."""
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return None
    return {"id": call_id, "function": {"index": index, "name": function["name"], "arguments": arguments}}


def _named(logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"logprobs": logprobs} if logprobs else {}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
