"""Answers as OpenAI's Responses API writes them: an object with items, or named events.

An item is reasoning, a message, or a call of a function. A stream tells of each item's beginning, its pieces and its
end, then of the whole response.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from eagle_runtime import Part, Piece, Result, Token
from eagle_serve.dialect import Body, Writer
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError
from eagle_serve.figures import figures, logprob, parts_of, shown
from eagle_serve.frames import named_event
from eagle_serve.jobs import Job

ECHOED: Body = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "safety_identifier": None, "prompt_cache_key": None, "tool_choice": "auto",
    "tools": [], "top_logprobs": 0, "user": None,
}  # fmt: skip


class ResponseAnswer(Writer):
    """Writes one response. Its items grow as parts are added, whether it is streamed or not."""

    def __init__(self, engine: Engine, job: Job, body: Body) -> None:
        super().__init__(engine, job)
        self._asked = {name: value for name, value in body.items() if value is not None}
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._output: list[dict[str, Any]] = []  # the last one may be unfinished
        self._number = 0  # of the next event
        self._waiting: list[Token] = []  # of a message whose text goes on: the reader holds white space back

    def whole(self, pieces: Sequence[Piece], result: Result) -> dict[str, Any]:
        for piece in pieces:
            self.add(piece)
        self._last(result)
        return self._response(result)

    def begin(self) -> bytes:
        """That the response was made, and is in progress."""
        response = self._response(None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def add(self, piece: Piece) -> bytes:
        """Add a piece to the items; returns the events that tell of it. Log-probabilities of a piece stand at its first
        part of a message."""
        within = bool(self._output) and self._output[-1]["type"] == "message"
        tokens = [*self._waiting, *shown(piece)] if self._job.prepared.request.logprobs is not None else []
        self._waiting, events = [], b""
        parts = parts_of(piece, self._job)
        for part in parts:
            events += self._grow_by(part, tokens if part.kind == "content" else ())
            tokens = [] if part.kind == "content" else tokens
        if within and not parts:
            self._waiting = tokens
        return events

    def end(self, result: Result) -> bytes:
        """The end of the last item, and the whole response."""
        events = self._last(result)
        response = self._response(result)
        return events + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """The response so far with the error."""
        said = {"code": error.code if error.status < 500 else "server_error", "message": error.message}
        return self._event("response.failed", response={**self._response(None), "status": "failed", "error": said})

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **fields})

    def _response(self, result: Result | None) -> dict[str, Any]:
        asked, own = self._asked, self._engine.model.manifest.sampling
        cut = result is not None and result.finish_reason == "length"
        status = "in_progress" if result is None else "incomplete" if cut else "completed"
        reasoning, shape = asked.get("reasoning", {}), asked.get("text", {})
        response = {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "model": self._engine.names[0],
            "output": [] if result is None else self._output,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": asked.get("temperature", own.temperature),
            "text": {**shape, "format": shape.get("format") or {"type": "text"}},
            "top_p": asked.get("top_p", own.top_p),
            "truncation": "disabled",
            "usage": None,
            **{name: asked.get(name, value) for name, value in ECHOED.items()},
        }
        if result is None:
            return response
        return {**response, "usage": self._usage(result), **figures(result, self._job)}

    def _usage(self, result: Result) -> dict[str, Any]:
        """The counts; tokens of reasoning are those of its text."""
        usage, text = result.usage, self._engine.model.text
        said = "".join(part["text"] for item in self._output if item["type"] == "reasoning" for part in item["content"])
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.new_tokens,
            "output_tokens_details": {
                "reasoning_tokens": min(len(text.encode_rendered(said)) if said else 0, usage.new_tokens)
            },
            "total_tokens": usage.prompt_tokens + usage.new_tokens,
        }

    def _grow_by(self, part: Part, tokens: Sequence[Token]) -> bytes:
        events = b""
        if part.kind == "call":
            return self._close("completed") + self._open(_call(part))
        item = self._output[-1] if self._output else None
        if part.kind == "arguments":
            assert item is not None
            item["arguments"] += part.text
            return self._delta("function_call_arguments", part.text)
        kind = "message" if part.kind == "content" else "reasoning"
        if item is None or item["type"] != kind:
            events = self._close("completed") + self._open(_message() if kind == "message" else _reasoning())
            item = self._output[-1]
        content = item["content"][0]
        content["text"] += part.text
        if kind == "reasoning":
            return events + self._delta("reasoning_text", part.text, content_index=0)
        logprobs = [logprob(self._engine, token) for token in tokens]
        content["logprobs"] += logprobs
        return events + self._delta("output_text", part.text, content_index=0, logprobs=logprobs)

    def _last(self, result: Result) -> bytes:
        """Finish the last item; an answer without any gets an empty message."""
        events = b"" if self._output else self._open(_message())
        return events + self._close("incomplete" if result.finish_reason == "length" else "completed")

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}.delta", **self._where(), delta=text, **fields)

    def _open(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        begun = {**item, **({"content": []} if "content" in item else {})}
        events = self._event("response.output_item.added", output_index=len(self._output) - 1, item=begun)
        if "content" in item:
            events += self._event(
                "response.content_part.added", **self._where(), content_index=0, part=item["content"][0]
            )
        return events

    def _close(self, status: str) -> bytes:
        """Finish the item that grows, if one does."""
        if not self._output:
            return b""
        item, where = self._output[-1], self._where()
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events = self._event("response.function_call_arguments.done", **where, **done)
        else:
            content = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            more = {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
            events = self._event(f"response.{kind}.done", **where, content_index=0, text=content["text"], **more)
            events += self._event("response.content_part.done", **where, content_index=0, part=content)
        return events + self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)


def _message() -> dict[str, Any]:
    content = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{secrets.token_hex(12)}", "type": "message", "status": "in_progress", "role": "assistant",
        "content": [content],
    }  # fmt: skip


def _reasoning() -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": ""}]
    return {
        "id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "status": "in_progress", "summary": [],
        "content": content, "encrypted_content": None,
    }  # fmt: skip


def _call(part: Part) -> dict[str, Any]:
    return {
        "id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress",
        "call_id": part.id, "name": part.text, "arguments": "",
    }  # fmt: skip
