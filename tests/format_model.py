"""A vocabulary of bytes with the special tokens of a format of calls: what it may write, and what is read of it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle_runtime.sampling.answer_grammar import answer_constraint
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.sampling.grammars import Grammars
from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.answer_reader import AnswerReader, Part
from eagle_runtime.text.call_formats import CallFormat
from eagle_runtime.text.channel_reader import reader_of
from eagle_runtime.text.detokenizer import TextStream, Vocabulary
from eagle_runtime.text.tools import ToolUse


def told(row: CallFormat, text: str) -> str:
    """An answer that is text."""
    return text if row.channels is None else f"<|channel|>final<|message|>{text}"


@dataclass(frozen=True)
class Spoken:
    """A token with its text."""

    id: int
    text: str


class Model:
    """A vocabulary of bytes with the special tokens of a format."""

    def __init__(self, form: CallFormat, special: bool) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tags = r"<[|｜][^>]*>|\[[A-Z_]+\]" + (r"|</?[a-z_]+>" if form.tagged is not None else "")
        tags += r"|<[a-z_]+\|>" if form.quote else ""
        marks = sorted(set(re.findall(tags, "".join(form.texts)))) if special else []
        self.tokenizer.add_special_tokens(["</s>", *marks])
        vocabulary = self.tokenizer.get_vocab()
        self.specials = {mark: vocabulary[mark] for mark in marks}
        self.eos = vocabulary["</s>"]
        vocab = self.tokenizer.get_vocab_size()
        self.grammars = Grammars(self.tokenizer.to_str, vocab, [self.eos])

    def accepts(self, form: AnswerForm, answer: str, content: Constraint | None = None) -> bool:
        """Whether an answer may be written, and end where it ends. content: what it must follow besides."""
        constraint = answer_constraint(form, self.specials, content)
        assert constraint is not None
        matcher = self.grammars.matcher(constraint)
        for token in [*self.tokenizer.encode(answer, add_special_tokens=False).ids, self.eos]:
            if matcher.finished and token == self.eos:
                return True
            if not matcher.mask()[token]:
                return False
            matcher.consume(token)
        return True

    def read(self, form: AnswerForm, answer: str) -> tuple[AnswerReader, list[Part]]:
        """An answer taken apart token by token."""
        reader, parts = reader_of(form, self.specials), []
        stream = TextStream(Vocabulary(self.tokenizer, "test"), [])
        for token in self.tokenizer.encode(answer, add_special_tokens=False).ids:
            parts += reader.feed([Spoken(token, stream.feed([token]))])
        return reader, [*parts, *reader.end()]

    def drawn_calls(self, form: AnswerForm, pick: Callable[[list[int]], list[int]]) -> list[tuple[str, Any]]:
        """Returns names and arguments of the whole calls of an answer that its grammar allows, of at most 500 tokens.
        pick: allowed tokens -> the next ones, of which those are taken that are allowed in turn."""
        constraint = answer_constraint(form, self.specials, None)
        assert constraint is not None
        matcher = self.grammars.matcher(constraint)
        tokens: list[int] = []
        while not matcher.finished and len(tokens) < 500:
            allowed = [int(token) for token in np.flatnonzero(matcher.mask()) if token != self.eos]
            if not allowed:
                break
            for token in pick(allowed):
                if matcher.mask()[token]:
                    matcher.consume(token)
                    tokens.append(token)
        reader, _ = self.read(form, self.tokenizer.decode(tokens, skip_special_tokens=False))
        assert reader.calls and not reader.content.strip()
        calls = reader.calls if matcher.finished else reader.calls[:-1]
        return [(call.name, json.loads(call.arguments)) for call in calls]


def one(schema: Any, **more: Any) -> dict[str, Any]:
    """A schema of one required argument."""
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


def form_with(row: CallFormat, schema: Mapping[str, Any], choice: str, **more: Any) -> AnswerForm:
    """A form with two tools, f, whose arguments have this schema, and f2. more: of f."""
    use = ToolUse.of([{"name": "f", "parameters": schema, **more}, {"name": "f2"}], choice)
    assert use is not None
    return AnswerForm(row, use)


def names_drawn(
    model: Model, row: CallFormat, schema: Mapping[str, Any], closing: Sequence[str], plain: str
) -> set[str]:
    """Draws answers at random from what the grammar allows, asserts that their arguments follow the schema, and returns
    the names of these. closing: texts that end a value; plain: characters that are drawn rather than others."""
    draw, properties = random.Random(3), list(schema["properties"])
    ends = [model.tokenizer.encode(text, add_special_tokens=False).ids for text in closing]
    likely = model.tokenizer.encode(plain, add_special_tokens=False).ids

    def pick(allowed: list[int]) -> list[int]:
        chosen = draw.choice([token for token in likely if token in allowed] or allowed)
        ending = [end for end in ends if end[0] in allowed]
        return draw.choice(ending) if ending and draw.random() < 0.3 else [chosen]

    names: set[str] = set()
    for number in range(2 * len(properties)):
        wanted = {**schema, "required": [*properties, *properties][number % len(properties) :][:3]}
        for called, arguments in model.drawn_calls(form_with(row, wanted, "required"), pick):
            if called == "f":
                Draft202012Validator(wanted).validate(arguments)
                names |= set(arguments)
    return names
