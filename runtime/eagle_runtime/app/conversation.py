"""Conversations: messages that outlive an answer, with the rows that both models have read of them.

    chat = model.conversation([{"role": "system", "content": "Answer in one line."}])
    for piece in chat.send("What is a tree?", max_new_tokens=60): ...
    chat.send("And a forest?")      # reads this question alone

Messages are the truth: whatever is changed in them, the next turn reads what differs from what was read before, and
answers as a new conversation with the same messages and the same seed would.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_runtime.app.conversation_file import (
    ADVICE,
    FORMAT,
    Saved,
    as_json,
    identity_of,
    pack,
    read,
    write,
)
from eagle_runtime.app.output import Output
from eagle_runtime.app.result import PastTurn, Usage
from eagle_runtime.app.turn import Turn
from eagle_runtime.app.turns import Turns
from eagle_runtime.base.arguments import checked_int, json_text, short_repr
from eagle_runtime.base.errors import BusyError, ClosedError, ConversationFileError, RequestError
from eagle_runtime.drafting.head import SCRATCH
from eagle_runtime.text.answer_form import chat_prompt
from eagle_runtime.text.call_formats import format_named
from eagle_runtime.text.tokenizer import Message
from eagle_runtime.text.tools import ToolUse

if TYPE_CHECKING:
    from typing import Unpack

    from eagle_runtime.app.settings import ChatSettings, Settings

PATIENCE_S = 60.0  # for the running step of a turn that was cancelled: a chunk of a prompt, seconds on a large model


@dataclass(frozen=True, slots=True)
class Written:
    """A text that was read and answered. text: the prompt that the template made, and the answer; ids: its tokens."""

    text: str
    ids: tuple[int, ...]


class Conversation:
    """Messages, and what the models have read of them. Made by `EagleModel.conversation`.

    One turn at a time: as long as it goes on, calls that would change the conversation raise BusyError. Properties may
    be read from any thread. A turn that is cancelled or left early keeps what was answered so far as the answer; one
    that ends before its first token leaves the messages as they were before it."""

    def __init__(
        self,
        turns: Turns,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_format: str | None = None,
        written: Written | None = None,
        past: Sequence[PastTurn] = (),
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Use `EagleModel.conversation`. written, past, notes: of the conversation that this one goes on from."""
        ToolUse.of(tools)
        if tool_format is not None:
            format_named(tool_format)
        self._turns = turns
        self._messages = [_copied(message) for message in messages]
        self._tools = None if tools is None else [dict(tool) for tool in tools]
        self._template_kwargs = dict(template_kwargs or {})
        self._tool_format = tool_format
        self._written = written or Written("", ())
        self._past = list(past)
        self._turn: weakref.ref[Turn] | None = None
        self._lock = threading.RLock()
        self._closed = False
        self._slot = turns.slots.new()
        self.kv_note: str | None = None  # why the rows of a file were not taken
        self.notes = dict(notes or {})  # strings of the application, saved with the conversation

    # What it holds

    @property
    def messages(self) -> list[dict[str, Any]]:
        """A copy of the messages."""
        with self._lock:
            return [_copied(message) for message in self._messages]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """A copy of the tools that its answers may call; None without any."""
        return None if self._tools is None else [dict(tool) for tool in self._tools]

    @property
    def tool_format(self) -> str | None:
        """The format of their calls; None for that of the chat template."""
        return self._tool_format

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the last prompt and its answer."""
        return self._written.ids

    @property
    def room(self) -> int:
        """Tokens that the context still holds after them."""
        return self._turns.bundle.context - len(self._written.ids)

    @property
    def turns(self) -> tuple[PastTurn, ...]:
        """The turns that have ended, in order; of a text without messages the last one."""
        with self._lock:
            return tuple(self._past)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values of both models."""
        return self._slot.nbytes

    @property
    def kv_rows(self) -> int:
        """Tokens of the text whose rows the target holds."""
        return self._slot.rows(self._written.ids)

    @property
    def kv_status(self) -> str:
        """ "resident" where rows are held, or why there are none."""
        return "resident" if self.kv_rows else self.kv_note or self._slot.note or "nothing was read yet"

    # Turns

    def send(self, message: str | Message, *, wait: bool = False, **settings: Unpack[ChatSettings]) -> Turn:
        """Append a message, by the user if it is text, and answer it.

        wait: for a running turn's end, in place of a BusyError. settings: as in `EagleModel.stream`, and tools (else
        those of the conversation), tool_choice and parallel_tool_calls as in OpenAI's API. The answer is appended at
        the turn's end, its calls as "tool_calls"; send their results as messages of role tool, with `send_results`
        where there are several. Raises RequestError, TemplateError, ContextError and BusyError at once."""
        with self._free(wait):
            new = {"role": "user", "content": message} if isinstance(message, str) else _copied(message)
            return self._answer([*self._messages, new], dict(settings))

    def send_results(self, results: Mapping[str, Any], *, wait: bool = False, **settings: Unpack[ChatSettings]) -> Turn:
        """Append what calls of tools have returned, by their ids, and answer them. Results that are not text become
        JSON. Arguments and errors as in `send`; RequestError where an id is none of the last answer's calls, or one of
        them has no result."""
        with self._free(wait):
            calls = (self._messages[-1] if self._messages else {}).get("tool_calls") or ()
            ids = [call["id"] for call in calls]
            if not ids or set(ids) != set(results):
                raise RequestError(
                    f"the results are of the calls {sorted(results)}, but those of the last answer are {sorted(ids)}; "
                    "give one for each"
                )
            new = [
                {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"],
                 "content": result if isinstance(result := results[call["id"]], str) else json_text("a result", result)}
                for call in calls
            ]  # fmt: skip
            return self._answer([*self._messages, *new], dict(settings))

    def regenerate(self, *, wait: bool = False, **settings: Unpack[ChatSettings]) -> Turn:
        """Answer the last message that is not an answer again, with a new seed unless one is given. Arguments and
        errors as in `send`."""
        with self._free(wait):
            messages = self._messages.copy()
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
            if not messages:
                raise RequestError("there is no message to answer; send one")
            return self._answer(messages, dict(settings))

    def complete(self, prompt: str | Sequence[int], *, wait: bool = False, **settings: Unpack[Settings]) -> Turn:
        """Go on from a text, without a template. prompt: the whole text, or its ids; what it has in common with the
        text before is not read again. Raises RequestError for a conversation that has messages."""
        with self._free(wait):
            if self._messages:
                raise RequestError("the conversation has messages; send one, or open a conversation without any")
            ids = self._turns.ids(prompt)
            return self._start(ids, None, self._messages, dict(settings))

    def _answer(self, messages: list[dict[str, Any]], settings: dict[str, Any]) -> Turn:
        text = self._turns.bundle.text
        settings = {"tools": self._tools, **settings}
        use = ToolUse.of(*(settings.pop(name, None) for name in ("tools", "tool_choice", "parallel_tool_calls")))
        prompt = chat_prompt(text, messages, use, template_kwargs=self._template_kwargs, tool_format=self._tool_format)
        rendered = prompt.text
        if use is not None or prompt.form.thinks:
            settings["form"] = prompt.form
        written, rest = self._written, None
        if written.text and rendered.startswith(written.text):
            rest = text.encode_after(rendered[len(written.text) :])
        ids = text.encode_rendered(rendered) if rest is None else [*written.ids, *rest]
        return self._start(self._turns.ids(ids), rendered, messages, settings)

    def _start(
        self, ids: list[int], rendered: str | None, messages: list[dict[str, Any]], settings: dict[str, Any]
    ) -> Turn:
        """rendered: the prompt's text; None for a text without messages."""
        before, self._messages = self._messages, messages

        def ended(output: Output, seed: int, usage: Usage | None) -> None:
            with self._lock:
                if not output.token_ids:
                    self._messages = before
                    return
                assert output.stop is not None
                kept = output.kept - (output.stop.kind in ("eos", "stop_token"))
                # Without the head of a token that a stop string cuts: the ids lack that token.
                self._written = Written((rendered or "") + output.kept_text, (*ids, *output.token_ids[:kept]))
                if rendered is None:  # a text that goes on for ever keeps no list of how it came about
                    self._past.clear()
                self._past.append(PastTurn(seed, output.stop, usage))
                if rendered is not None:
                    self._messages = [*messages, output.kept_message]

        try:
            turn = self._turns.in_slot(self._slot, ids, ended, settings)
        except BaseException:
            self._messages = before
            raise
        self.kv_note = None
        self._turn = weakref.ref(turn)
        return turn

    # Changes between turns

    def edit(self, index: int, content: Any) -> None:
        """Replace the content of a message. Raises RequestError, BusyError."""
        with self._free(wait=False):
            place = checked_int("index", index, 0, max(0, len(self._messages) - 1))
            if not self._messages:
                raise RequestError("the conversation has no messages to edit; send one")
            messages = self._messages.copy()
            messages[place] = {**messages[place], "content": content}
            self._messages = messages

    def rollback(self, *, to: int) -> None:
        """Keep the first `to` messages. Raises RequestError, BusyError."""
        with self._free(wait=False):
            self._messages = self._messages[: checked_int("to", to, 0, len(self._messages))]

    def fork(self) -> Conversation:
        """Returns a conversation with the same messages, which goes its own way. The rows are copied when it first
        runs. Raises BusyError."""
        with self._free(wait=False):
            other = Conversation(
                self._turns,
                self._messages,
                tools=self._tools,
                template_kwargs=self._template_kwargs,
                tool_format=self._tool_format,
                written=self._written,
                past=self._past,
            )
            other.share_rows(self)
            return other

    def share_rows(self, source: Conversation, tokens: int | None = None) -> None:
        """Copy, when it next runs, the rows of another conversation of the model. tokens: the first so many alone,
        which the turn waits for where the other one's reads them; few are read again instead."""
        self._slot.copy_from(source._slot, tokens)

    def save(
        self,
        path: str | Path,
        *,
        kv: bool = True,
        max_bytes: int | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> int:
        """Write the conversation to a file, which is the old one or the complete new one at any time. Returns its
        bytes.

        kv: with the rows, so that nothing is read again where the same bundle, engine and processor load it. max_bytes:
        RequestError for a larger file, before anything is written. notes: strings of the application, 64 KiB at most;
        None keeps those that were loaded. Raises ConversationFileError, RequestError, BusyError."""
        with self._free(wait=False):
            if notes is not None:
                if not all(isinstance(text, str) for pair in notes.items() for text in pair):
                    raise RequestError("notes must map strings to strings; write other values as JSON")
                self.notes = dict(notes)
            rows = self._slot.snapshot() if kv else None
            head = None if rows is None else rows.head
            saved = Saved(
                format=FORMAT,
                identity=identity_of(self._turns.bundle),
                messages=as_json("a message", self._messages),
                tools=as_json("a tool", {"format": self._tool_format, "tools": self._tools}),
                template_kwargs=as_json("template_kwargs", self._template_kwargs),
                written=self._written.text,
                turns=tuple(self._past),
                notes=self.notes,
                first=0 if head is None else head.first,
                noted_from=0 if head is None else head.noted_from,
            )
            content = pack(saved, self._written.ids, rows)
        if max_bytes is not None and len(content) > max_bytes:
            raise RequestError(
                f"the file would have {len(content)} bytes, but max_bytes is {max_bytes}; raise it, or pass kv=False"
            )
        write(Path(path), content)
        return len(content)

    @classmethod
    def load(cls, turns: Turns, path: str | Path) -> Conversation:
        """Use `EagleModel.load_conversation`."""
        most = 2 * (turns.bundle.context + SCRATCH) * turns.slots.shared[0].token_bytes
        saved, ids, rows = read(Path(path), most)
        identity = identity_of(turns.bundle)
        if saved.identity.text != identity.text:
            raise ConversationFileError(f"{path} is of a model with another tokenizer; {ADVICE}")
        if ids and max(ids) >= turns.bundle.manifest.target.vocab_size:
            raise ConversationFileError(f"{path} holds ids outside the vocabulary; {ADVICE}")
        try:
            tools = json.loads(saved.tools)
            if not isinstance(tools, dict):  # of a version that knew no formats
                tools = {"format": None, "tools": tools}
            chat = cls(
                turns,
                json.loads(saved.messages),
                tools=tools["tools"],
                template_kwargs=json.loads(saved.template_kwargs),
                tool_format=tools["format"],
                written=Written(saved.written, ids),
                past=saved.turns,
                notes=saved.notes,
            )
        except (ValueError, TypeError, KeyError, RecursionError, RequestError):
            raise ConversationFileError(f"{path} holds messages that are not valid; {ADVICE}") from None
        chat.kv_note = saved.identity.difference(identity)
        if rows is not None and chat.kv_note is None:
            chat.kv_note = chat._slot.restore(rows, turns.bundle.context)
        return chat

    def drop_kv(self) -> None:
        """Free the rows; the next turn reads the text again. Raises BusyError."""
        with self._free(wait=False):
            self._slot.drop("dropped by drop_kv")

    def close(self) -> None:
        """Cancel the running turn, wait for its step unless this is called in it, free the rows; a second call does
        nothing."""
        with self._lock:  # which another thread has that begins a turn
            self._closed = True
            turn = self._open_turn()
        if turn is not None:
            turn.close()
            if not turn.runs_here:
                turn.wait(PATIENCE_S)
        self._slot.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_turn(self) -> Turn | None:
        turn = None if self._turn is None else self._turn()
        return None if turn is None or turn.done else turn

    @contextlib.contextmanager
    def _free(self, wait: bool) -> Iterator[None]:
        """Within the block the conversation is in no turn, and no other thread begins one. Raises ClosedError,
        BusyError."""
        while True:
            with self._lock:
                if self._closed:
                    raise ClosedError("the conversation is closed; open another one with model.conversation()")
                if (turn := self._open_turn()) is None:
                    yield
                    return
            self._await_end(turn, wait)
            del turn

    def _await_end(self, turn: Turn, wait: bool) -> None:
        """Return when a turn has ended. Raises BusyError where that is not waited for."""
        if turn.cancelled:
            turn.close()
            if turn.runs_here or not turn.wait(PATIENCE_S):
                raise BusyError("the turn that was cancelled is still in a step; call again when it has ended")
        elif wait and not turn.runs_here:
            turn.wait()
        else:
            raise BusyError("the conversation is in a turn; let it end, cancel it, or pass wait=True")


def _copied(message: Any) -> dict[str, Any]:
    """Returns a copy of a message; raises RequestError for what is none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"a message is {short_repr(message)}, but must be a dict with a role and content")
    return dict(message)
