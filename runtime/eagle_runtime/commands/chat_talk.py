"""The conversation of eagle-chat: questions, answers, and the commands that begin with a slash."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle_runtime.app.conversation import Conversation
from eagle_runtime.app.eagle_model import EagleModel
from eagle_runtime.app.result import Piece, Result, Token, Usage
from eagle_runtime.app.turn import Turn
from eagle_runtime.base.errors import ContextError, EagleError, RequestError
from eagle_runtime.commands.chat_screen import Interrupt, Screen
from eagle_runtime.sampling.params import SamplingParams, bias_of_json
from eagle_runtime.text.answer_form import has_heads
from eagle_runtime.text.tools import ToolUse

HELP = {
    "help": ("", "this list"),
    "reset": ("", "begin anew; the system text stays"),
    "undo": ("", "forget the last question and its answer"),
    "retry": ("[SEED]", "answer the last question again"),
    "edit": ("[TEXT]", "change the last question and answer it again"),
    "save": ("FILE", "write the conversation to a file"),
    "load": ("FILE", "go on with the conversation of a file"),
    "system": ("[TEXT]", "set the system text; without TEXT there is none"),
    "set": ("[NAME [VALUE]]", "change a setting; without VALUE to that of the start; alone: list them"),
    "stats": ("", "figures of all answers"),
    "tokens": ("", "the last answer, with its drafted tokens in brackets"),
    "quit": ("", "leave; so does Ctrl-C twice, and the end of input"),
}
OF_TOOLS = ("tool_choice", "parallel_tool_calls")  # settings of a turn of a chat alone
SETTINGS = (
    "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "ignore_eos", "method", "tree", "total_token",
    "depth", "draft_top_k", *OF_TOOLS, *(field.name for field in dataclasses.fields(SamplingParams)),
)  # fmt: skip

ENDS = {"cancelled": "stopped, ", "max_new_tokens": "max_new_tokens reached, ", "context_full": "context full, "}


class Talk:
    """A conversation with a model on a screen. Without a chat template the model goes on from each text."""

    def __init__(
        self,
        model: EagleModel,
        screen: Screen,
        interrupt: Interrupt,
        settings: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        tool_format: str | None = None,
    ) -> None:
        """settings: of `EagleModel.stream`, which /set changes. tools: that the model may call, as OpenAI's API
        describes them. tool_format: as in `EagleModel.conversation`. Raises RequestError for wrong ones."""
        self._model = model
        self._chat = model.conversation(tools=tools, tool_format=tool_format)
        self._results: dict[str, str] = {}  # of the last answer's calls, so far
        self._screen = screen
        self._interrupt = interrupt
        self._settings: dict[str, Any] = {}
        for name, value in settings.items():
            self._change(name, value)
        self._first = dict(self._settings)
        self._raw = not model.text.chat
        self._has_heads = has_heads(model.text)
        self._last_text: str | None = None  # where there is no template: the text that was continued last
        self._tokens: list[Token] = []  # of the last answer
        self._usages: list[Usage] = []
        self._over = False

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of the conversation."""
        return self._chat.messages

    def run(self) -> None:
        """Read and answer until the end. Without a terminal the first error is raised; with one it is shown."""
        pressed = False
        while not self._over:
            try:
                line = self._screen.read()
                if line is None:
                    break
                pressed = False
                self.take(line)
            except KeyboardInterrupt:
                self._screen.end_line()
                if pressed:
                    break
                pressed = True
                self._screen.note("Ctrl-C once more leaves")
            except EagleError as error:
                if not self._screen.interactive:
                    raise
                self._screen.end_line()
                full = isinstance(error, ContextError) and self._chat.messages
                self._screen.note(f"{error}{'; /undo and /reset make room' if full else ''}")
        self._chat.close()

    def load(self, path: str | Path) -> None:
        """Go on with the conversation of a file, and with its tools. Raises ConversationFileError."""
        loaded = self._model.load_conversation(Path(path))
        self._go_on_with(loaded)
        count = len(loaded.messages)
        self._screen.note(f"{count} message{'s' * (count != 1)}, {loaded.kv_rows} tokens cached ({loaded.kv_status})")

    def take(self, line: str) -> None:
        """Obey a command, or answer a question. Two slashes begin a question with one."""
        if line.startswith("/") and not line.startswith("//"):
            name, _, rest = line[1:].partition(" ")
            if name not in HELP:
                raise RequestError(f"/{name} is not a command; /help lists them, and // begins a text with a slash")
            commands: dict[str, Callable[[str], None]] = {
                "help": self._help, "reset": self._reset, "undo": self._undo, "retry": self._retry, "edit": self._edit,
                "save": self._save, "load": lambda path: self.load(_file(path)), "system": self._system,
                "set": self._set, "stats": self._stats, "tokens": self._show_tokens, "quit": self._quit,
            }  # fmt: skip
            commands[name](rest.strip())
        elif text := line[1:] if line.startswith("//") else line:
            self._ask(text)

    def _ask(self, text: str) -> None:
        if self._raw:
            self._show(self._chat.complete(text, **_of_text(self._settings)))
            self._last_text = text
        elif calls := self._open_calls():
            self._results[calls[0]["id"]] = text
            if len(calls) == 1:
                results, self._results = self._results, {}
                self._show(self._chat.send_results(results, **self._settings))
            self._ask_for_result()
        else:
            self._show(self._chat.send(text, **self._settings))
            self._ask_for_result()

    def _open_calls(self) -> list[dict[str, Any]]:
        """The calls of the last answer that have no result yet."""
        messages = self._chat.messages
        calls = (messages[-1].get("tool_calls") if messages else None) or []
        ids = {call["id"] for call in calls}
        self._results = {name: said for name, said in self._results.items() if name in ids}
        return [call for call in calls if call["id"] not in self._results]

    def _ask_for_result(self) -> None:
        for call in self._open_calls()[:1]:
            function = call["function"]
            self._screen.note(f"{function['name']}({function['arguments']}) is called; type its result")

    def _show(self, turn: Turn) -> None:
        """Show an answer as it comes; Ctrl-C ends it."""
        tokens: list[Token] = []
        with self._interrupt.calls(turn.cancel), turn:
            for piece in turn:
                self._show_piece(piece)
                tokens += piece.tokens
        self._screen.end_line()
        self._tokens = tokens
        if turn.result is not None:
            self._usages.append(turn.result.usage)
            self._screen.note(self._figures(turn.result))

    def _show_piece(self, piece: Piece) -> None:
        """Show what was answered: taken apart where tools may be called, and where a text leaves out reasoning."""
        calls = bool(self._chat.tools) and self._settings.get("tool_choice") != "none"
        if not (calls or self._has_heads):
            self._screen.say(piece.text)
            return
        for part in piece.parts:
            if part.kind == "reasoning":
                self._screen.think(part.text)
            elif part.kind == "content":
                self._screen.say(part.text)

    def _figures(self, result: Result) -> str:
        usage, limit = result.usage, self._model.context
        end = ENDS.get(result.stop.kind, "")
        return (
            f"[{end}{usage.new_tokens} tokens, {usage.tokens_per_s:.1f} tokens/s, "
            f"tau {usage.tau:.2f}, TTFT {usage.ttft_s:.3f} s, {usage.cached_tokens} cached + {usage.prefilled_tokens} "
            f"prefilled, context {limit - self._chat.room} of {limit}]"
        )

    # Commands; each takes what follows its name.

    def _help(self, _: str) -> None:
        for name, (arguments, what) in HELP.items():
            self._screen.note(f"{f'/{name} {arguments}':<24}{what}")
        self._screen.note('Lines between """ and """ are one text. Ctrl-C stops an answer, which is kept so far.')

    def _reset(self, _: str) -> None:
        self._last_text = None
        self._chat.rollback(to=int(self._has_system()))

    def _undo(self, _: str) -> None:
        self._chat.rollback(to=self._last_question())

    def _retry(self, rest: str) -> None:
        settings = {**self._settings, "seed": _value(rest) if rest else None}
        if self._raw:
            if self._last_text is None:
                raise RequestError("there is no text yet to go on from; type one")
            self._show(self._chat.complete(self._last_text, **_of_text(settings)))
        else:
            self._show(self._chat.regenerate(**settings))
            self._ask_for_result()

    def _edit(self, rest: str) -> None:
        old = self._last_text if self._raw else self._chat.messages[self._last_question()]["content"]
        line = rest or self._screen.read(prefill=old if old is not None and "\n" not in old else "")
        if not line or self._raw:
            return self._ask(line) if line else None
        kept = self._chat.fork()
        try:
            self._undo("")
            self._ask(line)
            if not self._tokens:
                raise RequestError("there was no answer, so the question stays as it was")
        except BaseException:
            self._go_on_with(kept)
            raise
        kept.close()
        return None

    def _save(self, rest: str) -> None:
        size = self._chat.save(_file(rest))
        self._screen.note(f"{rest}: {size / 1e6:.1f} MB")

    def _system(self, rest: str) -> None:
        if self._raw:
            raise RequestError("the bundle has no chat template, so there is no place for a system text")
        if rest and self._has_system():
            self._chat.edit(0, rest)
            return
        system = [{"role": "system", "content": rest}] if rest else []
        messages = [*system, *self._chat.messages[self._has_system() :]]
        chat = self._chat
        self._go_on_with(self._model.conversation(messages, tools=chat.tools, tool_format=chat.tool_format))

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if not name:
            for setting in SETTINGS:
                own = getattr(self._model.manifest.sampling, setting, None)
                default = "default" if own is None else f"default ({own:g})"
                self._screen.note(f"{setting} {json.dumps(self._settings.get(setting, default))}")
        elif not value.strip():
            self._settings.pop(_setting(name), None)
            self._settings |= {key: value for key, value in self._first.items() if key == name}
        else:
            self._change(name, _value(value.strip()))

    def _stats(self, _: str) -> None:
        tokens, passes = (sum(getattr(u, name) for u in self._usages) for name in ("new_tokens", "target_passes"))
        after_first = tokens - len(self._usages)
        seconds = sum(usage.decode_s for usage in self._usages)
        limit = self._model.context
        self._screen.note(
            f"answers {len(self._usages)}, tokens {tokens}, target passes {passes}, tau "
            f"{after_first / passes if passes else 1.0:.2f}, tokens/s {after_first / seconds if seconds else 0.0:.1f}"
        )
        self._screen.note(
            f"context {limit - self._chat.room} of {limit}, keys and values {self._chat.kv_bytes / 1e6:.1f} MB for "
            f"{self._chat.kv_rows} tokens ({self._chat.kv_status})"
        )

    def _show_tokens(self, _: str) -> None:
        for token in self._tokens:
            self._screen.say(f"[{token.text}]" if token.drafted and token.text else token.text)
        self._screen.end_line()
        drafted = sum(token.drafted for token in self._tokens)
        self._screen.note(f"{len(self._tokens)} tokens, of which {drafted} were drafted, in brackets")

    def _quit(self, _: str) -> None:
        self._over = True

    # What they share

    def _go_on_with(self, chat: Conversation) -> None:
        self._chat.close()
        self._chat = chat

    def _has_system(self) -> bool:
        return bool(self._chat.messages) and self._chat.messages[0]["role"] == "system"

    def _last_question(self) -> int:
        """The index of the last message of the user. Raises RequestError."""
        roles = [message["role"] for message in self._chat.messages]
        if "user" not in roles:
            raise RequestError("there is no question yet; type one")
        return len(roles) - 1 - roles[::-1].index("user")

    def _change(self, name: str, value: Any) -> None:
        """Change a setting that a turn accepts. Raises RequestError."""
        changed = {**self._settings, _setting(name): bias_of_json(value) if name == "logit_bias" else value}
        if name in OF_TOOLS:
            ToolUse.of(self._chat.tools, *(changed.get(key) for key in OF_TOOLS))
        self._model.stream([0], **_of_text(changed)).close()  # checks settings, and computes nothing
        self._settings = changed


def _of_text(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that an answer without tools has too."""
    return {name: value for name, value in settings.items() if name not in OF_TOOLS}


def _setting(name: str) -> str:
    if name not in SETTINGS:
        raise RequestError(f"{name} is not a setting; /set lists them")
    return name


def _value(text: str) -> Any:
    """A value as JSON, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _file(rest: str) -> Path:
    if not rest:
        raise RequestError("the name of a file is missing")
    try:
        return Path(rest).expanduser()
    except RuntimeError:
        raise RequestError(f"{rest} begins with the home folder of somebody unknown; give the whole path") from None
