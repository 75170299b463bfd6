"""Lets the target answer prompts, as training data: a head drafts best on text that its target would write.

While OUT.jsonl is being written, OUT.partial.jsonl next to it gets each dialogue as it ends, so that nothing is lost if
the run is stopped, and what is there can be trained on already.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from eagle_calib.folder import claimed
from eagle_export.reading.families.target import open_target
from eagle_runtime.base.files import MANIFEST_NAME, file_sha256
from eagle_train.answering import AnswerSampler, Request, TargetSampler
from eagle_train.bundle_target import opened_sampler
from eagle_train.config import Sampling
from eagle_train.decoder import Decoder
from eagle_train.dialogues import Dialogue, Prompts, next_question, user_header
from eagle_train.errors import TrainError
from eagle_train.graphed import GraphedSampler
from eagle_train.padded import PaddedSampler
from eagle_train.partial import PartialFile
from eagle_train.progress import Progress, say
from eagle_train.target import FrozenTarget, fingerprint

# Files of a target that decide how prompts are written and where answers end.
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TURNS = 1000  # by which the numbers of two dialogues' answers differ
ASKING = Sampling(max_new_tokens=128, temperature=1.0, top_p=0.9, cut_loops=True)  # how the target asks questions


def generate_answers(
    target: Path,
    prompts: Path,
    output: Path,
    sampling: Sampling,
    device: str | None,
    bundle: Path | None = None,
    resume: bool = False,
) -> None:
    """Answer every row of a JSONL file and write a JSONL file to train on. Raises TrainError.

    bundle: an exported target that answers in place of the weights in `target`, of which then only config and tokenizer
    are read; raises BundleError and BackendError too. resume: go on with what an interrupted run of the same settings
    has written; a complete file stays as it is.

    Rows of ids, or of text under "prompt" or "text", become {"ids", "prompt_tokens"}: exactly the tokens that were
    sampled. Rows of "turns", "messages" or "conversations" become {"messages"} with every answer by the target, and
    "tools" if they have some, whose calls and results are left out. A row may have "temperature", "top_p", "top_k" and
    "max_new_tokens" of its own, and one of the latter kind "further": the number of questions that the target asks
    itself afterwards, in the user's place."""
    partial, progress = PartialFile(output), Progress()
    if output.is_file() and not partial.path.is_file():
        if not resume:
            raise TrainError(
                f"{output} exists; choose another name, delete it to begin anew, or give --resume to keep it"
            )
        say(f"{output} is complete")
        return
    try:
        with claimed(output.absolute()) as work, _opened(target, sampling, device, bundle) as sampler:
            asked = Prompts(prompts, target, sampler.vocab_size, sampler.context, sampling)
            total = asked.count()
            example = "".join(f"{where}: {reason}" for where, reason in [*asked.left_out.items()][:1])
            if not total:
                raise TrainError(
                    f"no prompt can be answered ({example}); shorten or correct them"
                    if example
                    else f"{prompts} holds no prompts; give a JSONL file with one per line"
                )
            if example:
                say(f"{len(asked.left_out)} prompts cannot be answered and are left out ({example})")
            with partial.opened(_run_of(target, prompts, sampling, bundle), resume) as done:
                progress.begin(total, len(done))
                for dialogue, tokens in Asker(sampler, asked, done).answered():
                    partial.add(dialogue.number, dialogue.row())
                    progress.advance(tokens)
                progress.finish()
            partial.complete(work / "new", total)
    except OSError as error:
        raise TrainError(
            f"{output} could not be written ({error.strerror}); correct that, and go on with --resume"
        ) from None


def _run_of(target: Path, prompts: Path, sampling: Sampling, bundle: Path | None) -> str:
    """Returns a digest of what decides the answers."""
    settings = {name: value for name, value in asdict(sampling).items() if name != "batch_size"}
    checkpoint = open_target(target)
    answers = fingerprint(checkpoint) if bundle is None else file_sha256(bundle / MANIFEST_NAME)
    texts = {name: file_sha256(target / name) for name in TEXTS if (target / name).is_file()}
    texts |= {name: hashlib.sha256(content).hexdigest() for name, content in (checkpoint.texts or {}).items()}
    parts = [settings, answers, texts, file_sha256(prompts)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextmanager
def _opened(target: Path, sampling: Sampling, device: str | None, bundle: Path | None) -> Iterator[AnswerSampler]:
    """Opens what answers: the target's weights or a bundle."""
    if bundle is None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        frozen = FrozenTarget(target, where)
        own = GraphedSampler if where.type == "cuda" else TargetSampler
        kind = own if Decoder.fits(frozen) else PaddedSampler
        yield kind(frozen, sampling.batch_size)
    else:
        with opened_sampler(bundle, open_target(target)) as sampler:
            yield sampler


class Asker:
    """Asks a sampler the questions of dialogues. Those that have begun come first. The sampler's Requests."""

    def __init__(self, sampler: AnswerSampler, prompts: Prompts, done: Set[int]) -> None:
        self._sampler, self._prompts = sampler, prompts
        self._new = (dialogue for dialogue in prompts.dialogues() if dialogue.number not in done)
        self._begun: deque[Dialogue] = deque()
        self._asked: dict[int, Dialogue] = {}
        self._full: list[Dialogue] = []  # whose next question the context does not hold, or the template refuses

    def answered(self) -> Iterator[tuple[Dialogue, int]]:
        """Yields each dialogue with its answers, as it ends, and the number of their tokens. Raises TrainError."""
        counts: dict[int, int] = {}
        for request, new in self._sampler.answers(self):
            dialogue = self._asked.pop(request.number)
            dialogue.turn += 1
            if not dialogue.asks:
                counts[dialogue.number] = counts.get(dialogue.number, 0) + len(new)
            if self._goes_on(dialogue, new):
                self._begun.append(dialogue)
            else:
                yield dialogue, counts.pop(dialogue.number)
        for dialogue in self._full:
            yield dialogue, counts.pop(dialogue.number)

    def _goes_on(self, dialogue: Dialogue, new: list[int]) -> bool:
        """Puts what was sampled into the dialogue. Returns whether more is to be sampled."""
        if dialogue.ids:
            dialogue.prompt_tokens = len(dialogue.ids)
            dialogue.ids = dialogue.ids + new
            return False
        tokenizer = self._prompts.tokenizer()
        text, whole = tokenizer.decode(new, skip_special_tokens=True), new[-1:] and new[-1] in tokenizer.all_special_ids
        if dialogue.asks:
            dialogue.asks = False
            if not whole or not text.strip():
                return False
            dialogue.further -= 1
            dialogue.questions.append({"role": "user", "content": text})
            return True
        dialogue.messages.append({"role": "assistant", "content": text})
        dialogue.asks = bool(not dialogue.questions and dialogue.further and whole)
        return bool(dialogue.questions) or dialogue.asks

    def take(self) -> Request | None:
        """Returns the next prompt of a dialogue, or None while there is none."""
        while (dialogue := self._begun.popleft() if self._begun else next(self._new, None)) is not None:
            ids, sampling, messages = dialogue.ids, dialogue.sampling, dialogue.messages
            if dialogue.asks:
                tokenizer = self._prompts.tokenizer()
                header = user_header(tokenizer, messages, dialogue.tools)
                ids = list(tokenizer(header, add_special_tokens=False)["input_ids"])
                sampling = replace(ASKING, seed=sampling.seed)
            elif not ids:
                if dialogue.questions and (not messages or messages[-1]["role"] != "user"):
                    asked = next_question(dialogue.questions)
                    del dialogue.questions[: len(asked)]
                    messages = [*messages, *asked]
                try:
                    ids = self._prompts.rendered(messages, dialogue.tools)
                except TrainError:
                    if not dialogue.turn:
                        raise
            if dialogue.turn and not 0 < len(ids) < self._sampler.context:
                self._full.append(dialogue)
                continue
            dialogue.messages = messages
            number = dialogue.number * TURNS + dialogue.turn
            self._asked[number] = dialogue
            return Request(ids, number, sampling)
        return None
