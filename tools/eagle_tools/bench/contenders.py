"""The contenders of a comparison, and the order in which they answer prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import zip_longest
from typing import Protocol

from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.errors import RequestError
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.cost_prior import pass_bytes
from eagle_runtime.opening.opened import OpenBundle
from eagle_tools.bench.cycles import decoded
from eagle_tools.bench.methods import DATASTORE, Settings, settings_of
from eagle_tools.bench.rows import Asked, Row, Setup, precision_name, row_of
from eagle_tools.questions import Question
from eagle_tools.turns import WARM_UP, by_turns, generation, starting_order

Watch = Callable[[Setup, Asked], Callable[[Cycle], None] | None]


class Contender(Protocol):
    """Answers prompts in one way. pass_bytes: bytes of weights that a forward pass of the target reads."""

    setup: Setup
    pass_bytes: int

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        """A run (eagle_tools/turns.py) that answers a prompt and returns its row. place: number of the prompt among
        those that this contender answers by turns."""


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
        """watch: returns the function to call after each cycle of a generation, or None."""
        self.setup = setup
        self.pass_bytes = pass_bytes(model.manifest.target.graph)
        self._model = model
        self._twins: list[EagleModel] = []
        sampling = SamplingParams(temperature=setup.temperature, seed=seed)
        self._settings = {**settings, "sampling": sampling, "ignore_eos": ignore_eos}
        self._watch = watch

    def check(self, asked: Sequence[Asked], max_new_tokens: int) -> None:
        """Raises RequestError, before any work, for a prompt that this contender cannot run."""
        for prompt in asked:
            try:
                self._model.stream(prompt.token_ids, max_new_tokens=max_new_tokens, **self._settings)
            except RequestError as error:
                where = f"{self.setup.bundle}, method {self.setup.method}, prompt {prompt.id}"
                raise RequestError(f"{where}: {error}") from None

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        on_cycle = None if self._watch is None else self._watch(self.setup, asked)
        settings = {**self._settings, "max_new_tokens": max_new_tokens, "on_cycle": on_cycle}
        model = self._model_at(place)
        before = model.counters()
        result = yield from generation(model, asked.token_ids, **settings)
        now = model.counters()
        row = row_of(self.setup, asked, result)
        if now is None or before is None:
            return row
        return dataclasses.replace(row, counters=dataclasses.asdict(now.since(before)))

    def _model_at(self, place: int) -> EagleModel:
        """Returns a twin of the model that only this place uses; on other backends than the CPU the model itself."""
        if not self._model.has_twins:
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
    plain: EagleModel | None = None,
) -> list[BundleContender]:
    """Returns a contender for each method at each temperature. plain: the model of all methods but DATASTORE, if it is
    another one (without_datastore)."""
    precision, contenders = precision_name(model.manifest), []
    for temperature in temperatures:
        for method in methods:
            setup = Setup(method, precision, model.backend, bundle, temperature)
            settings = settings_of(method)
            mine = model if method == DATASTORE or plain is None else plain
            contenders.append(BundleContender(mine, setup, settings, seed, ignore_eos, watch))
    return contenders


def without_datastore(bundle: OpenBundle) -> EagleModel:
    """Returns a model on the same engines that has no datastore. Raises RequestError where there are no twins."""
    if not bundle.on_cpu:
        raise RequestError(
            f"method {DATASTORE} can be compared with others on the backend cpu alone, not on {bundle.backend}; "
            "leave out --datastore"
        )
    return EagleModel(dataclasses.replace(bundle.with_new_caches(), datastore=None))


def first_turns(model: EagleModel, questions: Sequence[Question]) -> list[Asked]:
    """Returns the first turn of each question as ids: through the chat template if there is one, else as plain text."""
    return [
        Asked(question.id, question.category, _encoded(model, question.turns[:1], ()), question.prompt_set)
        for question in questions
    ]


def turns(model: EagleModel, question: Question, answers: list[str]) -> Iterator[Asked]:
    """Yields the prompts of a question: all turns of a chat, or the first turn as text. The caller appends the answer
    to each prompt to `answers` before it asks for the next."""
    for number in range(1, 1 + (len(question.turns) if model.text.chat else 1)):
        ids = _encoded(model, question.turns[:number], answers)
        name = question.id if number == 1 else f"{question.id}/{number}"
        yield Asked(name, question.category, ids, question.prompt_set)


def _encoded(model: EagleModel, user_turns: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
    if not model.text.chat:
        return tuple(model.text.encode(user_turns[0]))
    messages = [{"role": "user", "content": user_turns[0]}]
    for answer, turn in zip(answers, user_turns[1:], strict=True):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": turn}]
    return tuple(model.text.encode(messages))


def interleave(
    contenders: Sequence[Contender],
    model: EagleModel,
    questions: Sequence[Question],
    max_new_tokens: int,
    together: int = 1,
    on_row: Callable[[Setup], None] = lambda setup: None,
) -> Iterator[tuple[Asked, Row]]:
    """Yields each prompt with the row of each contender: after one warm-up each, all contenders answer a prompt by
    turns before any of them gets the next.

    model: encodes the prompts. together: number of questions answered by turns at once, as those of two lengths that
    are compared. A later turn of a chat follows the first contender's answer for all, so that all get the same prompt.
    on_row: called after each run."""
    asked = first_turns(model, questions[:1])[0]
    for contender in contenders:
        list(by_turns([contender.run(asked, min(WARM_UP, max_new_tokens))]))
        on_row(contender.setup)
    number = 0
    for start in range(0, len(questions), together):
        some = questions[start : start + together]
        answers: list[list[str]] = [[] for _ in some]
        for prompts in zip_longest(
            *(turns(model, question, replies) for question, replies in zip(some, answers, strict=True))
        ):
            order = [
                (place, asked, index)
                for place, asked in enumerate(prompts)
                if asked is not None
                for index in starting_order(len(contenders), number)
            ]
            rows: dict[int, Row] = {}
            runs = [contenders[index].run(asked, max_new_tokens, place) for place, asked, index in order]
            for run, row in by_turns(runs):
                rows[run] = row
                on_row(row.setup)
            for run, (place, asked, index) in enumerate(order):
                if index == 0 and model.text.chat:
                    answers[place].append(decoded(model.text, rows[run].token_ids))
                yield asked, rows[run]
            number += 1
