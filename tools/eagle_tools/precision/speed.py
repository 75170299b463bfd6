"""How fast the compared models answer prompts, by turns, and what they answer greedily."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from eagle_runtime import EagleModel
from eagle_runtime.core.generate import Cycle
from eagle_tools.bench.peers import PeerContender
from eagle_tools.bench.rows import Asked, speeds
from eagle_tools.bench.rows import Row as BenchRow
from eagle_tools.peers.worker import Worker
from eagle_tools.questions import Question, prompt_ids
from eagle_tools.ties import first_difference
from eagle_tools.turns import WARM_UP, by_turns, generation, starting_order

NODES = 16  # nodes of the fixed tree, and rows of the larger forward pass that is timed
CONTEXT, PASSES = 128, 5  # tokens before the passes of peers that are timed, and their number


@dataclass(slots=True)
class Speed:
    """Measurements of one model. vanilla, eagle: tokens per second of each prompt. answers: greedy tokens of each.
    passes: tokens of a forward pass -> seconds of each. drafts: seconds of drafting each tree of NODES nodes.
    new_tokens, target_passes: of the generations with such trees, for tau."""

    vanilla: list[float] = field(default_factory=list)
    eagle: list[float] = field(default_factory=list)
    answers: dict[int | str, tuple[int, ...]] = field(default_factory=dict)
    passes: dict[int, list[float]] = field(default_factory=lambda: {1: [], NODES: []})
    drafts: list[float] = field(default_factory=list)
    new_tokens: int = 0
    target_passes: int = 0

    def add_cycle(self, cycle: Cycle) -> None:
        """Record the times of a cycle whose tree has one of the sizes that are timed."""
        if cycle.tree.num_nodes in self.passes:
            self.passes[cycle.tree.num_nodes].append(cycle.verify_s)
        if cycle.tree.num_nodes == NODES:
            self.drafts.append(cycle.draft_s)


class Answerer(Protocol):
    """A compared model that answers prompts."""

    def answer(self, question: Question, max_new_tokens: int, speed: Speed) -> Generator[int, None, None]:
        """A run (eagle_tools/turns.py) that answers a prompt in all ways, and adds the measurements to `speed`."""


class BundleAnswers:
    """A bundle: answers without drafts, with its own tree, and with the fixed tree."""

    def __init__(self, model: EagleModel) -> None:
        self._model = model

    def answer(self, question: Question, max_new_tokens: int, speed: Speed) -> Generator[int, None, None]:
        model, prompt = self._model, prompt_ids(self._model, question.turns[0])
        limit: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        plain = yield from generation(model, prompt, method="vanilla", on_cycle=speed.add_cycle, **limit)
        count = plain.usage.new_tokens
        eagle = yield from generation(model, prompt, earlier_tokens=count, **limit)
        count += eagle.usage.new_tokens
        tree: dict[str, Any] = {"tree": "dynamic", "total_token": NODES}
        if model.manifest.head is None:
            tree = {"tree": "chain", "total_token": NODES, "depth": NODES - 2}
        fixed = yield from generation(model, prompt, earlier_tokens=count, on_cycle=speed.add_cycle, **limit, **tree)
        speed.answers[question.id] = plain.token_ids
        if eagle.usage.target_passes:
            speed.vanilla.append(plain.usage.tokens_per_s)
            speed.eagle.append(eagle.usage.tokens_per_s)
            speed.new_tokens += fixed.usage.new_tokens - 1
            speed.target_passes += fixed.usage.target_passes


class PeerAnswers:
    """Another engine: answers without drafts, then with those of its own."""

    def __init__(self, worker: Worker, modes: Sequence[PeerContender], encode: EagleModel) -> None:
        """modes: without drafts, then with them if the engine has some. encode: the bundle that encodes the prompts."""
        self._worker, self._modes, self._encode = worker, modes, encode

    def answer(self, question: Question, max_new_tokens: int, speed: Speed) -> Generator[int, None, None]:
        asked = Asked(question.id, question.category, tuple(prompt_ids(self._encode, question.turns[0])))
        plain, *drafting = self._modes
        row = yield from plain.run(asked, max_new_tokens)
        speed.vanilla += speeds([row]).values()
        speed.answers[question.id] = row.token_ids
        for contender in drafting:
            drafted = yield from _after(row.new_tokens, contender.run(asked, max_new_tokens))
            speed.eagle += speeds([drafted]).values()
        for rows, seconds in speed.passes.items():
            seconds += self._worker.pass_seconds(CONTEXT, rows, PASSES)


def _after(earlier: int, run: Generator[int, None, BenchRow]) -> Generator[int, None, BenchRow]:
    """The run, counting `earlier` tokens of the same turn's runs before it."""
    while True:
        try:
            yield earlier + next(run)
        except StopIteration as end:
            row: BenchRow = end.value
            return row


def time_models(
    models: Sequence[Answerer],
    questions: Sequence[Question],
    max_new_tokens: int,
    on_question: Callable[[], None] = lambda: None,
) -> list[Speed]:
    """Returns the speed of each model over all questions, which the models answer by turns after one warm-up each.
    on_question: called after each question."""
    speeds = [Speed() for _ in models]
    for model in models:
        list(by_turns([model.answer(questions[0], WARM_UP, Speed())]))
    for number, question in enumerate(questions):
        order = starting_order(len(models), number)
        list(by_turns([models[index].answer(question, max_new_tokens, speeds[index]) for index in order]))
        on_question()
    return speeds


def same_start(reference: Speed, compared: Speed) -> float:
    """Returns the median over the prompts of the greedy tokens before the first that differs. The reference's answer
    may end earlier than a peer's, which ignores end-of-sequence tokens."""
    return median(first_difference(answer, compared.answers[name]) for name, answer in reference.answers.items())
