"""Answers as OpenAI's API writes them: whole, or in chunks. A request has several where it asks for `n`, or has several
prompts: they are the choices of one object, and their chunks come as they are made."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eagle_runtime import Part, Piece, Result, Token
from eagle_serve.dialect import Body, Dialect, Read, Writer
from eagle_serve.engine import Engine
from eagle_serve.figures import figures, finite, logprob, message_of, shown, text_of
from eagle_serve.frames import DONE, event
from eagle_serve.jobs import Job
from eagle_serve.request import Prepared, Request


class Together:
    """What the answers to one request have in common. left: how many have not ended; ended: the others' results."""

    def __init__(self, engine: Engine, request: Request, count: int) -> None:
        chat = request.endpoint == "chat"
        self.head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": engine.names[0],
            "system_fingerprint": engine.fingerprint,
        }
        self.left = count
        self.ended: list[tuple[Prepared, Result]] = []

    def end(self, prepared: Prepared, result: Result) -> None:
        """One of the answers has ended."""
        self.left -= 1
        self.ended.append((prepared, result))

    def usage(self) -> dict[str, Any]:
        """The counts of those that have ended; a prompt counts with its first answer alone."""
        prompts = [result.usage for prepared, result in self.ended if prepared.first]
        usages = [result.usage for prepared, result in self.ended if not prepared.request.echoes_alone]
        read, written = sum(one.prompt_tokens for one in prompts), sum(one.new_tokens for one in usages)
        counts: dict[str, Any] = {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
        }
        if self.ended[0][0].request.prediction is not None:
            counts["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(one.prediction_accepted for one in usages),
                "rejected_prediction_tokens": sum(one.prediction_rejected for one in usages),
            }
        return counts


class Answer(Writer):
    """Writes one answer. Pieces are added in order; what is written depends on the request."""

    def __init__(self, engine: Engine, job: Job, together: Together) -> None:
        super().__init__(engine, job)
        self._request = job.prepared.request
        self._chat = self._request.endpoint == "chat"
        self._taken_apart = "form" in job.prepared.settings
        self._together = together
        self._length = 0  # characters written so far

    def whole(self, pieces: Sequence[Piece], result: Result) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in self._shown(piece)]
        self._together.end(self._job.prepared, result)
        choice: dict[str, Any] = {"index": self._job.prepared.index, "finish_reason": self._reason(result)}
        if self._chat:
            choice["message"] = {**self._message(message_of(pieces, result)), "refusal": None}
        else:
            choice["text"] = self._job.prepared.echo + ("" if self._request.echoes_alone else text_of(pieces))
        choice["logprobs"] = self._logprobs([*self._echoed(result.prompt), *tokens])
        return {
            **self._together.head,
            "choices": [choice],
            "usage": self._together.usage(),
            **figures(result, self._job, self._traced(tokens)),
        }

    def begin(self) -> bytes:
        """The chunk before the first piece: a chat's has the role, another may have the prompt."""
        if self._chat:
            return event(self._chunk({"delta": {"role": "assistant", "content": ""}}, None))
        return event(self._chunk({"text": echo}, None)) if (echo := self._job.prepared.echo) else b""

    def add(self, piece: Piece) -> bytes:
        return b"".join(map(event, self._chunks(piece)))

    def end(self, result: Result) -> bytes:
        """The chunk with the reason why the answer ended, and after the last one of the request the counts if they are
        asked for."""
        self._together.end(self._job.prepared, result)
        if self._together.left:
            return event(self._last(result))
        counts = {**self._chunk({}, None), "choices": [], "usage": self._together.usage()}
        return event(self._last(result)) + (event(counts) if self._request.include_usage else b"") + DONE

    def _chunks(self, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of a piece: one, or one for each of its parts; none for a piece without text."""
        tokens = self._shown(piece)
        if self._request.echoes_alone or (not tokens and not piece.text):
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
        if self._request.echoes_alone:
            return "length"
        called = self._request.old_calls and result.finish_reason == "tool_calls"
        return "function_call" if called else result.finish_reason

    def _last(self, result: Result) -> dict[str, Any]:
        chunk = self._chunk({"delta": {}} if self._chat else {"text": ""}, self._reason(result))
        return {**chunk, **figures(result, self._job)}

    def _chunk(self, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        head = {**self._together.head, "object": "chat.completion.chunk"} if self._chat else self._together.head
        index = self._job.prepared.index
        chunk = {**head, "choices": [{"index": index, "logprobs": None, **choice, "finish_reason": finish_reason}]}
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
            "token_logprobs": [None if token.logprob is None else finite(token.logprob) for token in tokens],
            "top_logprobs": [None if token.logprob is None else self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        return {self._engine.token_text(other): finite(value) for other, value in token.top}

    def _echoed(self, prompt: Sequence[Token]) -> list[Token]:
        """The prompt's tokens: a special one that the tokenizer puts before a text has no part in what was sent."""
        if not prompt or self._job.prepared.echo.startswith(prompt[0].text):
            return list(prompt)
        added = self._engine.model.text.special_id(prompt[0].text) is not None
        return [replace(prompt[0], text="") if added else prompt[0], *prompt[1:]]

    def _shown(self, piece: Piece) -> list[Token]:
        """The tokens of a piece that the answer has. Evaluations count on one after the prompt, be it the last."""
        if self._request.echoes_alone:
            return []
        return list(piece.tokens) if self._request.echo else shown(piece)

    def _traced(self, tokens: Sequence[Token]) -> dict[str, Any]:
        if not self._request.trace:
            return {}
        return {"tokens": [{"id": token.id, "text": token.text, "drafted": token.drafted} for token in tokens]}


def write(engine: Engine, jobs: Sequence[Job], body: Body) -> Sequence[Answer]:
    """Returns the writers of a request's answers."""
    together = Together(engine, jobs[0].prepared.request, len(jobs))
    return [Answer(engine, job, together) for job in jobs]


def join(wholes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the object of all answers to a request. What is told besides of one answer then stands in its choice."""
    if len(wholes) == 1:
        return wholes[0]
    own = ("timings", "eagle")
    choices = [{**whole["choices"][0], **{name: whole[name] for name in own}} for whole in wholes]
    shared = {name: value for name, value in wholes[-1].items() if name not in own}
    return {**shared, "choices": choices}


CHAT = Dialect("/v1/chat/completions", lambda body, engine: Read("chat", body), write, join=join)
COMPLETIONS = Dialect("/v1/completions", lambda body, engine: Read("completions", body), write, join=join)
