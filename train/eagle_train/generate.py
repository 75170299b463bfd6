"""Lets the target answer prompts, as training data: a head drafts best on text that its target would write."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from eagle_calib.folder import claimed
from eagle_runtime.files import json_lines
from eagle_train.bundle_target import opened_sampler
from eagle_train.config import Sampling
from eagle_train.data import Message, first_line, ids_of, load_tokenizer, messages_of
from eagle_train.errors import TrainError
from eagle_train.target import FrozenTarget, open_llama


@dataclass(slots=True)
class Dialogue:
    """A prompt and its answers so far: ids to continue once, or questions that are answered one after another."""

    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    questions: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns the JSONL row to train on."""
        if self.messages:
            return {"messages": self.messages}
        return {"ids": self.ids, "prompt_tokens": self.prompt_tokens}


def generate_answers(
    target: Path, prompts: Path, output: Path, sampling: Sampling, device: str | None, bundle: Path | None = None
) -> None:
    """Answer every row of a JSONL file and write a JSONL file to train on. Raises TrainError.

    bundle: an exported target that answers in place of the weights in `target`, of which then only config and tokenizer
    are read; raises BundleError and BackendError too.

    Rows of ids, or of text under "prompt" or "text", become {"ids", "prompt_tokens"}: exactly the tokens that were
    sampled. Rows of "turns", "messages" or "conversations" become {"messages"} with every answer by the target."""
    with _opened(target, sampling, device, bundle) as sampler:
        _write_answers(Answerer(sampler, target), prompts, output, sampling)


@contextmanager
def _opened(target: Path, sampling: Sampling, device: str | None, bundle: Path | None) -> Iterator[AnswerSampler]:
    """Opens what answers: the target's weights or a bundle."""
    if bundle is None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        yield TargetSampler(FrozenTarget(target, where), sampling)
    else:
        with opened_sampler(bundle, open_llama(target), sampling) as sampler:
            yield sampler


def _write_answers(answerer: Answerer, prompts: Path, output: Path, sampling: Sampling) -> None:
    dialogues = (copy.deepcopy(d) for d in _dialogues(prompts, answerer) for _ in range(sampling.samples))
    done = tokens = 0
    try:
        with claimed(output.absolute()) as work:
            (work / "new").mkdir()
            new_file = work / "new" / output.name
            with new_file.open("w", encoding="utf-8") as file:
                while batch := list(islice(dialogues, sampling.batch_size)):
                    tokens += answerer.answer(batch)
                    for dialogue in batch:
                        file.write(json.dumps(dialogue.row(), ensure_ascii=False) + "\n")
                    done += len(batch)
                    print(f"eagle-train: {done} answers, {tokens} tokens", file=sys.stderr, flush=True)
            if not done:
                raise TrainError(f"{prompts} holds no prompts; give a JSONL file with one per line")
            new_file.replace(output)
    except OSError as error:
        raise TrainError(f"{output} could not be written ({error.strerror}); no file was left") from None


class AnswerSampler(Protocol):
    """Continues prompts of token ids."""

    vocab_size: int

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Returns the new tokens of each prompt, up to and including the one that ends the answer. Raises TrainError
        for a prompt that the context does not hold."""
        ...


class TargetSampler:
    """An AnswerSampler that runs the target's weights."""

    def __init__(self, target: FrozenTarget, sampling: Sampling) -> None:
        self.vocab_size = target.vocab_size
        self._target, self._sampling = target, sampling
        self._calls = 0

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        target, sampling = self._target, self._sampling
        context = int(target.config.max_position_embeddings)
        longest = max(len(prompt) for prompt in prompts)
        if longest >= context:
            raise TrainError(f"a prompt has {longest} tokens, but the target's context is {context}; shorten it")
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left, so that all continue from the same column
            ids[row, longest - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, longest - len(prompt) :] = 1
        torch.manual_seed(sampling.seed * 1_000_003 + self._calls)
        self._calls += 1
        out = target.model.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=min(sampling.max_new_tokens, context - longest),
            pad_token_id=0,
            **sampling.arguments(),
        )
        return [self._until_end(row) for row in out[:, longest:].tolist()]

    def _until_end(self, ids: list[int]) -> list[int]:
        ends = [i for i, token in enumerate(ids) if token in self._target.eos]
        return ids[: ends[0] + 1] if ends else ids


class Answerer:
    """What answers, with the target's tokenizer and chat template."""

    def __init__(self, sampler: AnswerSampler, folder: Path) -> None:
        self.vocab_size = sampler.vocab_size
        self._sampler, self._folder = sampler, folder
        self._tokenizer: Any = None

    def tokenizer(self, where: str) -> Any:
        """Returns the target's tokenizer, loaded when first needed."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._folder, where)
        return self._tokenizer

    def answer(self, batch: Sequence[Dialogue]) -> int:
        """Continue ids once, answer all questions in turn, in place. Returns the number of sampled tokens."""
        count = 0
        plain = [d for d in batch if d.ids]
        if plain:
            for dialogue, new in zip(plain, self._sampler.sample([d.ids for d in plain]), strict=True):
                dialogue.prompt_tokens = len(dialogue.ids)
                dialogue.ids = dialogue.ids + new
                count += len(new)
        while waiting := [d for d in batch if d.questions]:
            for dialogue in waiting:
                self._ask(dialogue)
            tokenizer = self.tokenizer("prompts")
            try:
                prompts = [
                    tokenizer.apply_chat_template(d.messages, add_generation_prompt=True, return_dict=False)
                    for d in waiting
                ]
            except Exception as error:  # a template may raise any exception
                raise TrainError(
                    f"the chat template of {self._folder} fails on a prompt ({first_line(error)}); give 'prompt' or "
                    "'ids' instead"
                ) from None
            for dialogue, new in zip(waiting, self._sampler.sample(prompts), strict=True):
                text = tokenizer.decode(new, skip_special_tokens=True)
                dialogue.messages.append({"role": "assistant", "content": text})
                count += len(new)
        return count

    @staticmethod
    def _ask(dialogue: Dialogue) -> None:
        """Move the next question, and any system message before it, into the dialogue."""
        while dialogue.questions:
            dialogue.messages.append(dialogue.questions.pop(0))
            if dialogue.messages[-1]["role"] == "user":
                return


def _dialogues(prompts: Path, answerer: Answerer) -> Iterator[Dialogue]:
    """Yields the prompts of a JSONL file. Raises TrainError."""
    if not prompts.is_file():
        raise TrainError(f"{prompts} does not exist; give a JSONL file with one prompt per line")
    for number, row in json_lines(prompts, TrainError, "correct the file"):
        where = f"{prompts}, line {number}"
        if "ids" in row:
            ids = ids_of(where, row["ids"], answerer.vocab_size)
        elif isinstance(text := row.get("prompt", row.get("text")), str):
            ids = list(answerer.tokenizer(where)(text)["input_ids"])
        else:
            yield Dialogue(questions=_questions(where, row, answerer))
            continue
        if not ids:
            raise TrainError(f"{where}: the prompt is empty; give one token at least")
        yield Dialogue(ids=ids)


def _questions(where: str, row: dict[str, Any], answerer: Answerer) -> list[Message]:
    if not answerer.tokenizer(where).chat_template:
        raise TrainError(f"{where}: the target has no chat template; give 'prompt' or 'ids'")
    turns = row.get("turns")
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [{"role": "user", "content": turn} for turn in turns]
    if "messages" not in row and "conversations" not in row:
        raise TrainError(f"{where}: the row has none of 'ids', 'prompt', 'turns' and 'messages'; correct the file")
    asked = [message for message in messages_of(where, row) if message["role"] != "assistant"]
    if not any(message["role"] == "user" for message in asked):
        raise TrainError(f"{where}: no message is the user's, so there is nothing to answer")
    return asked
