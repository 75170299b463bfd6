"""Attacks verification with wrong drafts, and compares every answer with vanilla's, token by token.

    python -m studies.trials.adversarial BUNDLE [BUNDLE ...] --cases 100000

The bundle's own engines run; what its head, its transitions, its habits, n-gram matches, lookahead's forecasts or a
draft model propose is replaced (liars.py). A case is one verification whose tree held drafted tokens; cases are shared
among the bundles. Answers follow each other in conversations. They are decoded at T = 0, 0.7 and 1, some with top-k,
top-p, min-p or penalties, from many seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.backend_names import NATIVE
from eagle_runtime.base.errors import EagleWarning, RequestError
from eagle_runtime.base.tree import Int
from eagle_runtime.commands.command import Parser
from eagle_runtime.core.engines import Engines
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.datastore import Datastore
from eagle_runtime.drafting.jacobi import JacobiDrafter
from eagle_runtime.opening.draft_bundle import with_draft_bundles
from eagle_runtime.opening.loading import open_bundle
from eagle_runtime.opening.opened import OpenBundle
from eagle_tools.check_command import run_check
from eagle_tools.lossless import SETTINGS, random_prompt
from eagle_tools.ties import is_tie
from studies.trials.liars import (
    LIES,
    AnyTree,
    FreeDrafts,
    Liar,
    Lie,
    LyingHabits,
    LyingSession,
    LyingTransitions,
    Misled,
)

TEMPERATURES = (0.0, 0.7, 1.0)
LEAST_LIKELY = 64  # tokens that "wrong" takes
STORED = 16  # documents of the datastore
MOST_BETWEEN = 8  # tokens of a text between two answers

Attack = Callable[[list[int], tuple[int, ...]], dict[str, Any]]  # prompt, vanilla's answer -> settings of `generate`


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome for one bundle. answers: that were compared; cases: verifications whose tree held drafted tokens; tokens:
    compared; accepted: drafted tokens that were; failures: answers that differ, without `ties` (two logits are equal up
    to rounding, as fp32 allows); of: for each way of drafting and each lie, cases and drafted tokens accepted."""

    bundle: str
    precision: str
    answers: int
    cases: int
    tokens: int
    accepted: int
    failures: int
    ties: int
    of: dict[str, dict[str, tuple[int, int]]]
    seconds: float


def lying_bundle(
    bundle: Path, liar: Callable[[int], Liar], draft: bool, threads: int | None, backend: str = "cpu"
) -> OpenBundle:
    """Returns an opened bundle whose drafts go through a Liar, which `liar` makes for a vocabulary. draft: whether it
    is its own draft model too. Raises EagleError."""
    opened = with_draft_bundles(
        open_bundle(bundle, backend, None, threads, "once"), [bundle] if draft else [], "once", None
    )
    mine = liar(opened.manifest.target.vocab_size)
    transitions = opened.transitions
    if transitions is not None:
        fields = {field.name: getattr(transitions, field.name) for field in dataclasses.fields(transitions)}
        transitions = LyingTransitions(**fields, liar=mine)
    target, *heads = opened.engines.sessions
    engines = Engines([target, *(LyingSession(head, mine) for head in heads)])
    models: list[OpenBundle] = []
    for model in opened.drafts:
        small, *others = model.engines.sessions
        model = dataclasses.replace(model, engines=Engines([LyingSession(small, mine), *others]), costs=FreeDrafts())
        engines.take(model.engines)
        models.append(model)
    spoiled = dataclasses.replace(
        opened,
        engines=engines,
        transitions=transitions,
        drafts=tuple(models),
        costs=FreeDrafts(),
        habits=LyingHabits(opened.manifest.target.vocab_size, mine),
    )
    return spoiled.with_new_caches()


class Campaign:
    """Attacks on one bundle."""

    def __init__(
        self, bundle: OpenBundle, liar: Liar, random: np.random.Generator, texts: Sequence[Sequence[int]] = ()
    ) -> None:
        """liar: the model's; texts: whose parts are prompts; none for those of the certificate, and random ids."""
        self._liar, self._random, self._texts = liar, random, texts
        self._model = EagleModel(bundle)  # of which the prompts are
        documents = [self._prompt() for _ in range(STORED)]
        self._bundle = dataclasses.replace(bundle, datastore=Datastore(documents))
        self._model = EagleModel(self._bundle)
        self._seeds = itertools.count(int(random.integers(2**20)))
        self.answers = self.tokens = self.accepted = self.failures = self.ties = self.cases = 0
        self.of: dict[str, dict[str, tuple[int, int]]] = {}

    def attacks(self) -> dict[str, Attack]:
        """Returns ways of drafting of the model, by name."""
        model, liar = self._model, self._liar
        own: dict[str, Attack] = {
            "any tree": lambda prompt, answer: {"drafter": AnyTree(liar, answer, len(prompt), self._random)},
            "lookup": lambda prompt, answer: {"method": "lookup", "tree": "chain", "prediction": liar.text(answer)},
            "datastore": lambda prompt, answer: {"method": "lookup", "tree": "dynamic"},
            "lookahead": lambda prompt, answer: {"drafter": Misled(JacobiDrafter(), liar)},
            "recycling": lambda prompt, answer: {"method": "recycling"},
        }
        shapes = ("dynamic", "static", "chain", "cost-aware", "sequoia")
        methods = (["eagle"] if model.manifest.head is not None else []) + (
            ["draft-model"] if self._bundle.drafts else []
        )
        for method, shape in itertools.product(methods, shapes):
            own[f"{method}, {shape}"] = lambda prompt, answer, m=method, s=shape: {"method": m, "tree": s}  # type: ignore[misc]
        if model.manifest.head is not None:
            own["eagle+lookup"] = lambda prompt, answer: {"method": "eagle+lookup", "prediction": liar.text(answer)}
        return own

    def run(self, cases: int, new_tokens: int) -> None:
        """Attack until there are so many cases. Raises RequestError for a model that drafts nothing."""
        attacks, before = self.attacks(), -1
        while self.cases < cases:
            if self.cases == before:
                raise RequestError("the bundle drafts nothing on this machine, so there is nothing to compare")
            before = self.cases
            self._attack_two_answers(attacks, new_tokens)

    def _attack_two_answers(self, attacks: dict[str, Attack], new_tokens: int) -> None:
        """Decode two answers without drafts, the second after a text that begins with the first; and in each way with
        wrong ones, in a conversation, which keeps the rows that these have left."""
        prompt, seed = self._prompt(), next(self._seeds)
        settings: dict[str, Any] = {
            "sampling": SamplingParams(),  # nothing of the model's own
            **SETTINGS[int(self._random.integers(len(SETTINGS)))],
            "temperature": TEMPERATURES[seed % len(TEMPERATURES)],
            "seed": seed,
            "max_new_tokens": new_tokens,
            "ignore_eos": True,
        }
        first = self._model.generate(prompt, method="vanilla", **settings).token_ids
        longer = [*prompt, *first, *self._prompt()[:MOST_BETWEEN]]
        second = self._model.generate(longer, method="vanilla", **settings).token_ids
        texts = [
            (text, answer, self._least_likely(text, answer)) for text, answer in ((prompt, first), (longer, second))
        ]
        for number, (name, attack) in enumerate(attacks.items(), seed):  # so that every attack meets every lie
            lie = LIES[number % len(LIES)]
            with self._model.conversation() as chat:
                for text, vanilla, wrong in texts:
                    self._liar.begin(lie, wrong)
                    cycles: list[Cycle] = []
                    list(chat.complete(text, on_cycle=cycles.append, **attack(text, vanilla), **settings))
                    self._count(name, lie, cycles)
                    self._compare(f"{name}, {lie}", text, vanilla, chat.token_ids[len(text) :], settings)

    def _compare(
        self, said: str, prompt: list[int], vanilla: tuple[int, ...], drafted: tuple[int, ...], settings: dict[str, Any]
    ) -> None:
        self.tokens += len(vanilla)
        if drafted == vanilla:
            return
        sampling = {"temperature": settings["temperature"], "seed": settings["seed"]}
        tie = self._model.row_check is None and is_tie(self._model, prompt, vanilla, drafted, **sampling)
        self.ties += tie
        self.failures += not tie
        print(f"{'a tie' if tie else 'DIFFERS'}: {said}, {settings}, prompt {prompt}", file=sys.stderr)

    def _count(self, name: str, lie: Lie, cycles: Sequence[Cycle]) -> None:
        cases = sum(cycle.tree.num_nodes > 1 for cycle in cycles)
        accepted = sum(cycle.step.num_accepted for cycle in cycles)
        self.answers += 1
        self.cases += cases
        self.accepted += accepted
        of_name = self.of.setdefault(name, {})
        before = of_name.get(lie, (0, 0))
        of_name[lie] = before[0] + cases, before[1] + accepted

    def _prompt(self) -> list[int]:
        if not self._texts:
            return random_prompt(self._model, self._random)
        text = self._texts[int(self._random.integers(len(self._texts)))]
        start = int(self._random.integers(len(text)))
        return list(text[start : start + int(self._random.integers(1, 100))])

    def _least_likely(self, prompt: Sequence[int], answer: Sequence[int]) -> Int:
        """Returns tokens that the answer has not, those first whose likeliest place is the least likely."""
        rows = np.concatenate(list(self._model.score([*prompt, *answer], len(prompt) - 1)))
        best = (rows - np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True))).max(0)
        order = np.argsort(best, kind="stable")
        return order[~np.isin(order, answer)][:LEAST_LIKELY].astype(np.int64)


def attack_bundle(
    bundle: Path,
    cases: int,
    new_tokens: int = 32,
    threads: int | None = None,
    seed: int = 0,
    texts: Sequence[Sequence[int]] = (),
    backend: str = "cpu",
) -> Outcome:
    """Attack until there are so many cases; returns the outcome. texts: as in Campaign. Raises EagleError."""
    started = time.perf_counter()
    random = np.random.default_rng(seed)
    liars: list[Liar] = []

    def liar(vocab: int) -> Liar:
        liars.append(Liar(vocab, random))
        return liars[-1]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagleWarning)  # of heads that compute what they should not
        opened = lying_bundle(bundle, liar, True, threads, backend)
        with contextlib.closing(opened.engines):
            campaign = Campaign(opened, liars[0], random, texts)
            campaign.run(cases, new_tokens)
            precision = opened.manifest.precision["target"]
    counts = {name: getattr(campaign, name) for name in ("answers", "cases", "tokens", "accepted", "failures", "ties")}
    seconds = round(time.perf_counter() - started, 1)
    return Outcome(str(bundle), precision, **counts, of=campaign.of, seconds=seconds)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if an answer differed by more than a tie, 2 for wrong input."""
    return run_check(_parser(), argv, run, extra="cpu", interrupted="interrupted")


def run(args: argparse.Namespace) -> bool:
    """Attack each bundle and print the outcomes; returns whether no answer differed."""
    if args.cases < 1 or args.tokens < 2:
        raise RequestError(f"cases is {args.cases} and tokens {args.tokens}, but they must be 1 and 2 or more")
    outcomes = []
    for outcome in _outcomes(args):
        print(json.dumps(asdict(outcome)) if args.json else described(outcome), flush=True)
        outcomes.append(outcome)
    if not args.json and len(outcomes) > 1:
        cases, tokens, failures = (
            sum(getattr(one, name) for one in outcomes) for name in ("cases", "tokens", "failures")
        )
        print(f"together: {failures} failures in {cases} cases, {tokens} tokens")
    return not any(outcome.failures for outcome in outcomes)


def _outcomes(args: argparse.Namespace) -> Iterator[Outcome]:
    share = -(-args.cases // len(args.bundles))
    for number, bundle in enumerate(args.bundles):
        yield attack_bundle(Path(bundle), share, args.tokens, args.threads, args.seed + number, backend=args.backend)


def described(outcome: Outcome) -> str:
    """Returns the outcome as one line."""
    ties = f", {outcome.ties} ties" if outcome.ties else ""
    return (
        f"{outcome.bundle}: {outcome.precision}, {outcome.failures} failures{ties} in {outcome.cases} cases "
        f"({outcome.answers} answers, {outcome.tokens} tokens, {outcome.accepted} drafted tokens accepted), "
        f"{outcome.seconds:.0f} s"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="studies.trials.adversarial", description="Compare answers with wrong drafts and without drafts."
    )
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folder written by eagle-export")
    parser.add_argument("--cases", type=int, default=2000, metavar="N", help="of all bundles together (default 2000)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="new tokens of an answer (default 32)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    parser.add_argument("--backend", choices=("cpu", NATIVE), default="cpu", help="form of the graphs that runs")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts, settings and lies")
    parser.add_argument("--json", action="store_true", help="print one JSON object per bundle")
    return parser


if __name__ == "__main__":
    sys.exit(main())
