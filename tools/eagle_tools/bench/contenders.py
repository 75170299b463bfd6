"""What is compared, and the order it runs in: on the CPU by turns of a tenth of a second, else of a prompt, so that
the noise of a machine meets all alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import zip_longest
from typing import Protocol, TypeVar

from eagle_runtime import EagleModel
from eagle_runtime.drafting.costs.prior import pass_bytes
from eagle_runtime.errors import RequestError
from eagle_runtime.generate import Cycle
from eagle_tools.bench.methods import Settings, settings_of
from eagle_tools.bench.rows import Asked, Row, Setup, precision_name, row_of
from eagle_tools.questions import Question

WARM_UP = 8  # tokens
TURN = 0.1  # seconds at least: a small model finds its weights in the processor's caches again, as it would alone
PAUSE = 0.05  # seconds: threads of another engine may go on spinning for some milliseconds

R = TypeVar("R")
Watch = Callable[[Setup, Asked], Callable[[Cycle], None] | None]


class Contender(Protocol):
    """Answers prompts in one way. pass_bytes: of weights that one pass of the target reads."""

    setup: Setup
    pass_bytes: int

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        """Answer greedily, or with the seed it was given; yields how many tokens there are wherever others may have
        their turn. place: another for each answer of this contender that takes turns with this one."""


class BundleContender:
    """A bundle, a method, a temperature."""

    def __init__(
        self,
        model: EagleModel,
        setup: Setup,
        settings: Settings,
        seed: int,
        ignore_eos: bool,
        watch: Watch | None = None,
    ) -> None:
        """watch: who is told of the cycles of a generation, if anyone."""
        self.setup = setup
        self.pass_bytes = pass_bytes(model.manifest.target.graph)
        self._model = model
        self._twins: list[EagleModel] = []
        self._settings = {**settings, "temperature": setup.temperature, "seed": seed, "ignore_eos": ignore_eos}
        self._watch = watch

    def check(self, asked: Sequence[Asked], max_new_tokens: int) -> None:
        """Raises RequestError for what this contender could not run, before any work."""
        for prompt in asked:
            try:
                self._model.stream(prompt.token_ids, max_new_tokens=max_new_tokens, **self._settings)
            except RequestError as error:
                where = f"{self.setup.bundle}, method {self.setup.method}, prompt {prompt.id}"
                raise RequestError(f"{where}: {error}") from None

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        model = self._model_at(place)
        count = 0
        for piece in model.stream(
            asked.token_ids,
            max_new_tokens=max_new_tokens,
            on_cycle=None if self._watch is None else self._watch(self.setup, asked),
            **self._settings,
        ):
            if piece.result is not None:
                return row_of(self.setup, asked, piece.result)
            count += len(piece.token_ids)
            if model is not self._model:
                yield count
        raise AssertionError("a stream ends with a result")

    def _model_at(self, place: int) -> EagleModel:
        """A twin that nobody else has, where there are any."""
        if self._model.backend != "cpu":
            return self._model
        while len(self._twins) <= place:
            self._twins.append(self._model.twin())
        return self._twins[place]


def bundle_contenders(
    model: EagleModel,
    bundle: str,
    methods: Sequence[str],
    temperatures: Sequence[float],
    seed: int,
    ignore_eos: bool,
    watch: Watch | None = None,
) -> list[BundleContender]:
    """A contender for each method at each temperature."""
    precision = precision_name(model.manifest)
    return [
        BundleContender(
            model,
            Setup(method, precision, model.backend, bundle, temperature),
            settings_of(method, model.manifest),
            seed,
            ignore_eos,
            watch,
        )
        for temperature in temperatures
        for method in methods
    ]


def first_turns(model: EagleModel, questions: Sequence[Question]) -> list[Asked]:
    """Every question's first turn as ids: through the chat template if the bundle has one, else as plain text."""
    return [Asked(question.id, question.category, _encoded(model, question.turns[:1], ())) for question in questions]


def turns(model: EagleModel, question: Question, answers: list[str]) -> Iterator[Asked]:
    """The prompts of a question: all turns of a chat, or the first as text. answers: filled by the caller between two
    prompts, an answer to each."""
    for number in range(1, 1 + (len(question.turns) if model.text.chat else 1)):
        ids = _encoded(model, question.turns[:number], answers)
        yield Asked(question.id if number == 1 else f"{question.id}/{number}", question.category, ids)


def _encoded(model: EagleModel, said: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
    if not model.text.chat:
        return tuple(model.text.encode(said[0]))
    messages = [{"role": "user", "content": said[0]}]
    for answer, turn in zip(answers, said[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return tuple(model.text.encode(messages))


def answer_text(model: EagleModel, row: Row) -> str:
    """What a row's tokens say, for the next turn's prompt."""
    decoder = model.text.stream([])
    assert decoder is not None
    decoder.feed(row.token_ids)
    decoder.finish()
    return decoder.text


def interleave(
    contenders: Sequence[Contender],
    model: EagleModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    together: int = 1,
    told: Callable[[Setup], None] = lambda setup: None,
) -> Iterator[tuple[Asked, Row]]:
    """Prompts, and rows of every contender on each: after a warm-up each, all answer one prompt before any sees the
    next, another beginning each time.

    model: encodes. together: prompts that are answered by turns too, as those of two lengths that are compared. A later
    turn of a talk follows the first contender's answer for all, so that all are asked the same. told: after each
    run."""
    asked = first_turns(model, questions[:1])[0]
    for contender in contenders:
        list(by_turns([contender.run(asked, min(WARM_UP, max_new_tokens))]))
        told(contender.setup)
    number = 0
    for start in range(0, len(questions), together):
        some = questions[start : start + together]
        answers: list[list[str]] = [[] for _ in some]
        for prompts in zip_longest(
            *(turns(model, question, said) for question, said in zip(some, answers, strict=True))
        ):
            first = number % len(contenders)
            order = [
                (place, asked, index)
                for place, asked in enumerate(prompts)
                if asked is not None
                for index in (*range(first, len(contenders)), *range(first))
            ]
            rows: dict[int, Row] = {}
            for which, row in by_turns([contenders[i].run(asked, max_new_tokens, place) for place, asked, i in order]):
                rows[which] = row
                told(row.setup)
            for which, (place, asked, index) in enumerate(order):
                if index == 0 and model.text.chat:
                    answers[place].append(answer_text(model, rows[which]))
                yield asked, rows[which]
            number += 1


def by_turns(runs: Sequence[Generator[int, None, R]], turn: float = TURN) -> Iterator[tuple[int, R]]:
    """Each run's number and what it returns, as they end. After `turn` seconds it is the turn of the run with the
    fewest tokens, so that all go on over the same time."""
    tokens = dict.fromkeys(range(len(runs)), 0)
    while tokens:
        which = min(tokens, key=tokens.__getitem__)
        begins = tokens[which] == 0
        if begins:
            time.sleep(PAUSE)
        ends = time.perf_counter() + turn
        try:
            tokens[which] = next(runs[which])
            while time.perf_counter() < ends:
                tokens[which] = next(runs[which])
        except StopIteration as end:
            del tokens[which]
            yield which, end.value
        if begins:
            time.sleep(PAUSE)
