"""Answers that are messages, each a head that names its channel, and a text: OpenAI's harmony format.

    <|channel|>analysis<|message|>Reasoning.<|end|><|start|>assistant<|channel|>final<|message|>Answer.<|return|>

A head may name a recipient too, and then the text is the arguments of a call: " to=functions.NAME" before the channel,
as in prompts, or after it, as models are used to write it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_runtime.text.messages import REASONING

RECIPIENT = re.compile(r"\bto=([A-Za-z0-9_.:-]+)")
JOINT = "\n\n"  # between the texts of two messages that are one part of an answer


@dataclass(frozen=True, slots=True)
class Channels:
    """How such answers are written. start, channel, constrain, message, end: markers, special tokens of the models.
    ends: the markers after which an answer ends. role: what follows `start`, with which a prompt ends. reasoning,
    aside, final: names of channels; text in the last two is content. prefix: of the recipient of a call."""

    start: str = "<|start|>"
    channel: str = "<|channel|>"
    constrain: str = "<|constrain|>"
    message: str = "<|message|>"
    end: str = "<|end|>"
    ends: tuple[str, ...] = ("<|return|>", "<|call|>", "<|endoftext|>")
    role: str = "assistant"
    reasoning: str = "analysis"
    aside: str = "commentary"
    final: str = "final"
    prefix: str = "functions."

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.constrain, self.message, self.end, *self.ends)

    def parse_head(self, text: str) -> tuple[str, str]:
        """Returns the channel and the recipient that a head names, each "" where it names none."""
        head = text.rpartition(self.start)[2]
        channel = re.search(re.escape(self.channel) + r"\s*(\w+)", head)
        recipient = RECIPIENT.search(head)
        return channel[1] if channel else "", recipient[1] if recipient else ""


class Heads:
    """Follows the tokens of an answer as they are drawn. within: whether the last one stands in a head."""

    def __init__(self, channels: Channels, specials: Mapping[str, int]) -> None:
        """specials: the markers that are special tokens, with their ids."""
        opening = (channels.start, channels.channel, channels.constrain)
        self._texts = {specials[m]: m for m in (*opening, channels.message, channels.end) if m in specials}
        self._opening = frozenset(specials[m] for m in opening if m in specials)
        closing = (channels.message, channels.end, *channels.ends)
        self._closing = frozenset(specials[m] for m in closing if m in specials)
        self.within = False

    def take(self, token_id: int) -> str | None:
        """Take the next token. Returns a marker's text, which decoding leaves out; None for any other token."""
        if token_id in self._opening:
            self.within = True
        elif token_id in self._closing:
            self.within = False
        return self._texts.get(token_id)


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages of a chat as templates of such models take them: an answer has one call, which its results
    follow, since a result gets the name of the call before it; reasoning and text before a call are one text."""
    result: list[dict[str, Any]] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        calls = message.get("tool_calls") or ()
        if not calls:
            result.append(message)
            continue
        first = index
        while index < len(messages) and messages[index].get("role") == "tool":
            index += 1
        results = list(messages[first:index])
        for number, call in enumerate(calls):
            before = _before_call(message) if number == 0 else {"role": message["role"]}
            result.append({**before, "tool_calls": [call]})
            own = results if number == len(calls) - 1 else _results_of(call, results)
            result += own
            results = [item for item in results if not any(item is one for one in own)]
    return result


def _results_of(call: Mapping[str, Any], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results that name a call; where none of them names any, the first one."""
    if any(result.get("tool_call_id") for result in results):
        return [result for result in results if result.get("tool_call_id") == call.get("id")]
    return list(results[:1])


def _before_call(message: Mapping[str, Any]) -> dict[str, Any]:
    """An answer with calls whose reasoning and content are one text."""
    thought = next((message[name] for name in REASONING if message.get(name)), None)
    content = message.get("content")
    if not (isinstance(thought, str) and isinstance(content, str) and content):
        return dict(message)
    rest = {name: value for name, value in message.items() if name not in (*REASONING, "content")}
    return {**rest, "reasoning_content": f"{thought}{JOINT}{content}"}
