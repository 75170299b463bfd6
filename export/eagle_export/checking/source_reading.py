"""What a comparison asks of its source: greedy continuations of the golden prompts, and of text on which a head is
checked. The source writes them beside the text that inputs are recorded on, or, where none are, by themselves."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_calib.replay import GOLDEN_TOKENS, golden_prompts
from eagle_export.base.errors import ExportError
from eagle_export.checking.head_check import (
    MOST,
    START,
    STARTS,
    TOKENS,
    HeadCheck,
    Reading,
    compare_readings,
    taps_of_readings,
)
from eagle_export.graphs.eager import eager_weights
from eagle_export.graphs.pair import HeadPart, Pair
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.registry import family_of, read_config
from eagle_export.recording.continuations import ask, check_finite
from eagle_export.recording.source_text import Asked, Greedy, Written, text_starts
from eagle_runtime.text.tokenizer import Text

LOGITS, REST = "logits.npz", "read.json"  # what a copy of the process leaves


@dataclass(slots=True)
class SourceReading:
    """prompts: golden ones, with the most tokens after each. starts: of the texts for a head, with the most tokens
    after each; none without a head. eos: tokens that end a text. expected, checked: what the source made of them, None
    until it has been read."""

    source: Checkpoint
    prompts: list[list[int]]
    count: int
    starts: list[list[int]]
    length: int
    eos: Collection[int]
    head: HeadPart | None
    expected: Sequence[Written] | None = None
    checked: HeadCheck | None = None
    problem: ExportError | None = None

    @classmethod
    def of(
        cls, source: Checkpoint, text: Text, vocab: int, context: int, eos: Collection[int], head: HeadPart | None
    ) -> SourceReading:
        """text: the tokenizer. vocab, context, eos: of the source. Raises ExportError for a context without room."""
        prompts = golden_prompts(text, vocab, context)
        count = min(GOLDEN_TOKENS, context - max(map(len, prompts)))
        if count < 1:
            raise ExportError(f"a context of {context} tokens has no room for a prompt and a continuation")
        starts: list[list[int]] = []
        length = min(TOKENS, context - START)
        if head is not None and length > 1:
            starts = text_starts(text, vocab, STARTS, START, START, MOST)
        return cls(source, prompts, count, starts, length, eos, head)

    def asked(self) -> Asked:
        """The texts, which are looked at as soon as they are written. Errors are kept, since inputs that are recorded
        meanwhile are worth having: `read` raises them."""
        golden = [Greedy(prompt, self.count, self.eos, with_logits=True) for prompt in self.prompts]
        own = [Greedy(start, self.length, self.eos) for start in self.starts]
        taps = set[int]()
        if self.head is not None and self.starts:
            config = read_config(family_of(self.source), self.source)
            taps = {-1, *self.head.config.taps, *taps_of_readings(self.head.config, config)}
        return Asked([*golden, *own], taps, self._look, self.leave, self.take)

    def read(self) -> tuple[Sequence[Written], HeadCheck | None]:
        """Returns the continuations, and what was seen of the head; lets the source write them if it has not. Raises
        ExportError if transformers cannot run it, or its logits are not finite."""
        if self.expected is None and self.problem is None:
            ask(self.source, self.asked())
        if self.problem is not None:
            raise self.problem
        assert self.expected is not None
        return self.expected, self.checked

    def leave(self, folder: Path) -> None:
        """Writes what was read to a folder, for another process. Raises what `read` does."""
        expected, checked = self.read()
        np.savez(folder / LOGITS, allow_pickle=False, **{str(n): one.logits for n, one in enumerate(expected)})
        seen = {"tokens": [one.tokens for one in expected], "head": None if checked is None else asdict(checked)}
        (folder / REST).write_text(json.dumps(seen), encoding="utf-8")

    def take(self, folder: Path) -> None:
        """Takes what another process left."""
        seen = json.loads((folder / REST).read_text(encoding="utf-8"))
        with np.load(folder / LOGITS, allow_pickle=False) as logits:
            self.expected = [
                Written(prompt, tokens, logits[str(n)])
                for n, (prompt, tokens) in enumerate(zip(self.prompts, seen["tokens"], strict=True))
            ]
        if (head := seen["head"]) is not None:
            best = head.pop("best")
            self.checked = HeadCheck(**head, best=None if best is None else Reading(**best))

    def _look(self, model: Any, written: Sequence[Written]) -> None:
        try:
            expected = written[: len(self.prompts)]
            for text in expected:
                check_finite(self.source, text.logits)
            drafted = [each for each in written[len(self.prompts) :] if each.tokens[1:]]
            if self.head is not None and drafted:
                weights = eager_weights(self.head, model)
                self.checked = compare_readings(self.head, family_of(self.source), model.config, weights, drafted)
            self.expected = expected
        except ExportError as error:
            self.problem = error


def reading_of_pair(pair: Pair) -> SourceReading | None:
    """What the comparison of an export will ask; None if its context has no room."""
    try:
        return SourceReading.of(
            pair.target, pair.text, int(pair.config.vocab_size), pair.context, pair.generation.eos, pair.torch_head
        )
    except ExportError:
        return None
