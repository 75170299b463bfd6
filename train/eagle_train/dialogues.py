"""Prompts as dialogues: what a target is to answer, read from rows in the forms of training data."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import first_line
from eagle_train.config import Sampling
from eagle_train.data import chat_of, ids_of, load_tokenizer
from eagle_train.data_rows import Message, Tools, is_chat, lines_of, messages_of, prompt_of, rows_of, tools_of
from eagle_train.errors import RowError, TrainError

OVERRIDES = ("temperature", "top_p", "top_k", "max_new_tokens")  # settings that a prompt's row may have
ANSWERS = ("assistant", "tool", "function", "ipython")  # roles of what a row has after a question: it is left out
MARK = "\u2063user\u2063"  # stands for a user's text, to find where the template puts it


@dataclass(slots=True)
class Dialogue:
    """A prompt and its answers so far: ids to continue once, or questions that are answered one after another. number:
    in the run. turn: of what is sampled next. tools: that the chat template describes. further: questions that the
    target is to ask after that. asks: whether such a question is what is sampled next."""

    sampling: Sampling
    number: int = 0
    turn: int = 0
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    questions: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    tools: Tools = None
    further: int = 0
    asks: bool = False

    def row(self) -> dict[str, Any]:
        """Returns the JSONL row to train on."""
        if self.messages:
            return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        return {"ids": self.ids, "prompt_tokens": self.prompt_tokens}


class Prompts:
    """A file of prompts, in the forms of training data, with the target's tokenizer. left_out: where a prompt stands
    that cannot be answered -> why, known once `count` has read them all."""

    def __init__(self, file: Path, target: Path, vocab_size: int, context: int, sampling: Sampling) -> None:
        self._file, self._target, self._vocab_size, self._sampling = file, target, vocab_size, sampling
        self._context = context
        self._tokenizer: Any = None
        self.left_out: dict[str, str] = {}

    def tokenizer(self, where: str = "prompts") -> Any:
        """Returns the target's tokenizer, loaded when first needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._target, where)
        return self._tokenizer

    def rendered(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """Returns the ids of a conversation that the target is to answer. Raises TrainError."""
        try:
            return list(chat_of(self.tokenizer(), messages, tools, add_generation_prompt=True, return_dict=False))
        except Exception as error:  # a template may raise any exception
            raise TrainError(
                f"the chat template of {self._target} fails on a prompt ({first_line(error)}); give 'prompt' or "
                "'ids' instead"
            ) from None

    def count(self) -> int:
        """Reads all prompts, and returns how many answers they ask for. A prompt that is empty or holds more than text,
        that the context does not hold, or that the chat template refuses, is left out: it would end a run in its
        middle. Raises TrainError."""
        answers = 0
        for where, dialogue in self._read():
            if (reason := self._unanswerable(dialogue)) is None:
                answers += self._sampling.samples
            else:
                self.left_out[where] = reason
        return answers

    def dialogues(self) -> Iterator[Dialogue]:
        """Yields the prompts of the file, each as often as it is to be answered. Raises TrainError."""
        numbers = itertools.count()
        for where, dialogue in self._read():
            for _ in range(0 if where in self.left_out else self._sampling.samples):
                yield replace(copy.deepcopy(dialogue), number=next(numbers))

    def _read(self) -> Iterator[tuple[str, Dialogue]]:
        """Yields where each row stands, and its prompt."""
        if not self._file.is_file():
            raise TrainError(f"{self._file} does not exist; give a JSONL file with one prompt per line")
        for where, row in rows_of(self._file, _refuse) or lines_of(self._file, _refuse):  # under whatever name
            try:
                yield where, self._dialogue(where, row)
            except RowError as error:
                self.left_out[where] = str(error).removeprefix(f"{where}: ")

    def _unanswerable(self, dialogue: Dialogue) -> str | None:
        """Why the first answer of a dialogue cannot be written; None if it can."""
        if not dialogue.ids and not dialogue.questions:
            return "the prompt is empty"
        try:
            ids = dialogue.ids or self.rendered(next_question(dialogue.questions), dialogue.tools)
        except TrainError as error:
            return str(error)
        if max(ids, default=0) >= self._vocab_size:
            return f"the tokenizer gives the id {max(ids)}, but the target knows {self._vocab_size}"
        return None if len(ids) < self._context else f"{len(ids)} tokens, but the target's context is {self._context}"

    def _dialogue(self, where: str, row: Mapping[str, Any]) -> Dialogue:
        try:
            sampling = replace(self._sampling, **{name: row[name] for name in OVERRIDES if name in row})
        except (TypeError, TrainError) as error:
            raise TrainError(f"{where}: {error}") from None
        if "ids" in row:
            ids = ids_of(where, row["ids"], self._vocab_size)
        elif (text := prompt_of(row)) is not None:
            tokenizer = self.tokenizer(where)
            begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
            ids = list(tokenizer(text, add_special_tokens=not begun)["input_ids"])
        else:
            further = row.get("further", 0)
            if type(further) is not int or further < 0:
                raise TrainError(f"{where}: further is {further!r}, but must be a number of questions")
            questions, tools = self._questions(where, row), tools_of(where, row)
            return Dialogue(sampling, questions=questions, tools=tools, further=further)
        return Dialogue(sampling, ids=ids)

    def _questions(self, where: str, row: Mapping[str, Any]) -> list[Message]:
        if not self.tokenizer(where).chat_template:
            raise TrainError(f"{where}: the target has no chat template; give rows of 'prompt' or 'ids'")
        turns = row.get("turns")
        if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
            return [{"role": "user", "content": turn} for turn in turns]
        if isinstance(row.get("prompt"), list):
            row = {"messages": row["prompt"]}
        if not is_chat(row):
            raise TrainError(f"{where}: the row has none of 'ids', 'prompt', 'turns' and 'messages'; correct the file")
        asked = [each for each in messages_of(where, {"output": "", **row}) if each["role"] not in ANSWERS]
        return asked if any(message["role"] == "user" for message in asked) else []


def _refuse(reason: str) -> None:
    """What is no row ends a run before it begins."""
    raise TrainError(reason)


def next_question(questions: Sequence[Message]) -> list[Message]:
    """Returns the messages up to the first of the user's, which is what is answered next."""
    users = [index for index, message in enumerate(questions) if message["role"] == "user"]
    return list(questions[: users[0] + 1] if users else questions)


def user_header(tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> str:
    """Returns messages as the chat template renders them, up to where another turn of the user begins. Raises
    TrainError for a template that does not put the user's text down as it is."""
    try:
        marked = [*messages, {"role": "user", "content": MARK}]
        text = str(chat_of(tokenizer, marked, tools, tokenize=False))
    except Exception as error:  # a template may raise any exception
        raise TrainError(f"the chat template fails ({first_line(error)})") from None
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise TrainError("the chat template changes what users write, so the target cannot ask in their place")
    return before
