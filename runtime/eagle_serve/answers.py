"""Answers as OpenAI's API writes them: whole, or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_runtime import Part, Piece, Result, Token
from eagle_serve.dialect import Body, Dialect, Read
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError
from eagle_serve.figures import drafting, finite, logprob, message_of, shown, timings
from eagle_serve.frames import DONE, EVENTS, comment, event
from eagle_serve.jobs import Job


class Answer:
    """Writes one answer. Pieces are added in order; what is written depends on the request."""

    media_type = EVENTS

    def __init__(self, engine: Engine, job: Job, body: Body) -> None:
        self._engine = engine
        self._job = job
        self._request = job.prepared.request
        self._chat = self._request.endpoint == "chat"
        self._taken_apart = "form" in job.prepared.settings
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": engine.names[0],
            "system_fingerprint": engine.fingerprint,
        }
        self._tokens: list[Token] = []
        self._length = 0  # characters written so far

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer in one object."""
        result = pieces[-1].result
        assert result is not None
        tokens = [token for piece in pieces for token in shown(piece)]
        choice: dict[str, Any] = {"index": 0, "finish_reason": result.finish_reason}
        if self._chat:
            choice["message"] = {**self._message(message_of(pieces)), "refusal": None}
            choice["finish_reason"] = self._reason(result)
        else:
            choice["text"] = _text(pieces)
        choice["logprobs"] = self._logprobs(tokens)
        return {
            **self._head,
            "choices": [choice],
            "usage": self._usage(result),
            **self._figures(result, self._traced(tokens)),
        }

    def begin(self) -> bytes:
        """The chunk before the first piece: a chat's has the role."""
        return event(self._chunk({"delta": {"role": "assistant", "content": ""}}, None)) if self._chat else b""

    def add(self, piece: Piece) -> bytes:
        """The chunks of a piece."""
        return b"".join(map(event, self._chunks(piece)))

    def end(self, result: Result) -> bytes:
        """The chunk with the reason why the answer ended, and one with the counts if they are asked for."""
        counts = event(self._counts(result)) if self._request.include_usage else b""
        return event(self._last(result)) + counts + DONE

    def failed(self, error: ApiError) -> bytes:
        """The error as an event."""
        return event(error.data)

    def waiting(self, state: str) -> bytes:
        """A comment."""
        return comment(state)

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece: one, or one for each of its parts; none for a piece without text."""
        tokens = shown(piece)
        if not tokens and not piece.text:
            return []
        choices: list[dict[str, Any]] = [{"delta": {"content": piece.text}} if self._chat else {"text": piece.text}]
        if self._taken_apart:
            choices = [{"delta": self._delta(part)} for part in piece.parts] or [{"delta": {}}]
        logprobs, traced = self._logprobs(tokens), self._traced(tokens)
        if choices == [{"delta": {}}] and logprobs is None and not traced:
            return []
        first = self._chunk({**choices[0], "logprobs": logprobs}, None)
        return [{**first, "eagle": traced} if traced else first, *(self._chunk(choice, None) for choice in choices[1:])]

    def _delta(self, part: Part) -> dict[str, Any]:
        """A part of an answer, as a stream tells of it."""
        if part.kind == "content":
            return {"content": part.text}
        if part.kind == "reasoning":
            return {"reasoning_content": part.text}
        named = part.kind == "call"
        function = {"name": part.text, "arguments": ""} if named else {"arguments": part.text}
        if self._request.old_calls:
            return {"function_call": function}
        head = {"index": part.index, "id": part.id, "type": "function"} if named else {"index": part.index}
        return {"tool_calls": [{**head, "function": function}]}

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message of an answer; its call as the older API has it, if it was asked so."""
        result = dict(message)
        if self._request.old_calls and "tool_calls" in result:
            result["function_call"] = result.pop("tool_calls")[0]["function"]
        return result

    def _reason(self, result: Result) -> str:
        called = self._request.old_calls and result.finish_reason == "tool_calls"
        return "function_call" if called else result.finish_reason

    def _last(self, result: Result) -> dict[str, Any]:
        chunk = self._chunk({"delta": {}} if self._chat else {"text": ""}, self._reason(result))
        return {**chunk, **self._figures(result, {})}

    def _counts(self, result: Result) -> dict[str, Any]:
        return {**self._chunk({}, None), "choices": [], "usage": self._usage(result)}

    def _chunk(self, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        chunk = {**head, "choices": [{"index": 0, "logprobs": None, **choice, "finish_reason": finish_reason}]}
        return {**chunk, "usage": None} if self._request.include_usage else chunk

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        if self._chat:
            return {"content": [logprob(self._engine, token) for token in tokens], "refusal": None}
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._engine.token_text(other): finite(value) for other, value in token.top} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _traced(self, tokens: Sequence[Token]) -> dict[str, Any]:
        if not self._request.trace:
            return {}
        return {"tokens": [{"id": token.id, "text": token.text, "drafted": token.drafted} for token in tokens]}

    def _usage(self, result: Result) -> dict[str, Any]:
        usage = result.usage
        counts: dict[str, Any] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.new_tokens,
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        if self._request.prediction is not None:
            counts["completion_tokens_details"] = {
                "accepted_prediction_tokens": usage.prediction_accepted,
                "rejected_prediction_tokens": usage.prediction_rejected,
            }
        return counts

    def _figures(self, result: Result, traced: dict[str, Any]) -> dict[str, Any]:
        """llama.cpp's `timings`, and what is EAGLE's own, with the tokens that were traced."""
        job = self._job
        return {"timings": timings(result, job), "eagle": {**drafting(result, job), **traced}}


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


CHAT = Dialect("/v1/chat/completions", lambda body, engine: Read("chat", body), Answer)
COMPLETIONS = Dialect("/v1/completions", lambda body, engine: Read("completions", body), Answer)
