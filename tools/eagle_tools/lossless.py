"""Checks on this processor that drafts do not change the output: compares many generations with drafts and without.

    python -m eagle_tools.lossless BUNDLE [BUNDLE ...] --runs 2000

Each run chooses a prompt, sampling settings and a drafting method at random, decodes with and without drafts from the
same seed, and compares the tokens. With `--at-once 8`, one to eight runs with drafts decode at the same time, each to
be compared with its request alone and without drafts. With `--mixes 4`, a request is answered alone once and then
decodes in four mixes, each time with another drafting method: as many mixed answers for a quarter of those alone.
Prompts are parts of the certificate's texts, or random ids; with `--kinds`, questions with stop strings, JSON schemas
and tools are among them (request_kinds). It needs only what the runtime needs, so that it runs wherever bundles do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime import EagleModel, Result, SamplingParams
from eagle_runtime.base.backend_names import NATIVE
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Parser
from eagle_runtime.drafting.methods import METHODS
from eagle_runtime.machine.host import processor_name
from eagle_tools.check_command import run_check
from eagle_tools.request_kinds import random_kind
from eagle_tools.ties import is_tie

LONGEST_PROMPT = 160  # tokens; exact attention treats the newest 64 positions differently from older ones
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.4, "frequency_penalty": 0.2},
)
TEMPERATURES = (0.0, 0.6, 1.0, 1.4)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome for one bundle. differ: number of runs whose tokens differ. ties: those of them where two logits are
    equal up to rounding, as fp32 allows. kinds: runs of each kind. ended: runs by the reason why the text ended. tau:
    mean tokens per forward pass of the target with drafts. rows: the model's row check, in words."""

    bundle: str
    precision: str
    backend: str
    processor: str
    runs: int
    differ: int
    ties: int
    kinds: dict[str, int]
    ended: dict[str, int]
    tau: float
    rows: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """kind: of request_kinds. prompt: ids. settings: of `EagleModel.stream`; method: those of them that drafts have."""

    kind: str
    prompt: list[int]
    settings: dict[str, Any]
    method: dict[str, Any]


def compare_runs(
    bundle: Path,
    runs: int,
    new_tokens: int,
    threads: int | None,
    seed: int,
    backend: str = "cpu",
    at_once: int = 1,
    kinds: bool = False,
    mixes: int = 1,
) -> Outcome:
    """Decode `runs` times with drafts, and every request once without; returns the outcome. at_once: the most runs with
    drafts that decode at the same time. kinds: whether runs are of every kind, not texts alone. mixes: in how many
    mixes a request decodes. Raises EagleError if the bundle cannot be run."""
    started = time.perf_counter()
    random = np.random.default_rng(seed)
    differ = ties = drafted_tokens = passes = 0
    seen: Counter[str] = Counter()
    ended: Counter[str] = Counter()
    with EagleModel.load(bundle, backend=backend, threads=threads) as model:
        answers: dict[int, Result] = {}  # alone and without drafts, by the seed of the request
        for group in groups(model, random, runs, new_tokens, at_once, kinds, mixes):
            for one, drafted in zip(group, with_drafts(model, group), strict=True):
                seed_of = one.settings["seed"]
                if seed_of not in answers:
                    answers[seed_of] = model.generate(one.prompt, method="vanilla", **one.settings)
                plain = answers[seed_of]
                drafted_tokens += drafted.usage.new_tokens - 1
                passes += drafted.usage.target_passes
                seen[one.kind] += 1
                ended[plain.finish_reason] += 1
                if _said(plain) != _said(drafted):
                    differ += 1
                    sampling = {"temperature": one.settings["temperature"], "seed": seed_of}
                    ties += is_tie(model, one.prompt, plain.token_ids, drafted.token_ids, **sampling)
                    print(
                        f"{bundle}, seed {seed}: {one}: {_said(plain)}, {_said(drafted)}", file=sys.stderr, flush=True
                    )
        rows = "" if model.row_check is None else str(model.row_check)
        precision = model.manifest.precision["target"]
    seconds = round(time.perf_counter() - started, 1)
    tau = round(drafted_tokens / max(passes, 1), 2)
    counts = (runs, differ, ties, dict(seen), dict(ended))
    return Outcome(str(bundle), precision, backend, processor_name(), *counts, tau, rows, seconds)


def groups(
    model: EagleModel, random: np.random.Generator, runs: int, new_tokens: int, at_once: int, kinds: bool, mixes: int
) -> Iterator[list[Run]]:
    """Yields runs that decode at the same time, `runs` in all; the rest as in compare_runs. A request, known by its
    seed, is in `mixes` groups, of random sizes and with random neighbours, each time with a method drawn anew."""
    left, seed = runs, 0
    while left > 0:
        pool = []
        for _ in range(min(2 * at_once, left)):
            pool.append(random_run(model, random, new_tokens, seed, kinds))
            seed += 1
        for _ in range(mixes):
            order = random.permutation(len(pool)).tolist()
            while order and left > 0:
                count = min(int(random.integers(1, at_once + 1)), len(order), left)
                mixed, order = order[:count], order[count:]
                left -= count
                yield [replace(pool[place], method=random_method(model, random)) for place in mixed]


def random_run(model: EagleModel, random: np.random.Generator, new_tokens: int, seed: int, kinds: bool = False) -> Run:
    """Returns a run. new_tokens: of a text; a request of another kind may have twice as many, to come to its end."""
    kind, prompt, own = random_kind(model, random, model.context // 2) if kinds else ("text", [], {})
    if kind == "text":
        prompt, own = random_prompt(model, random), {"max_new_tokens": new_tokens, "ignore_eos": True}
    settings = {**SETTINGS[int(random.integers(len(SETTINGS)))], "max_new_tokens": 2 * new_tokens, "seed": seed, **own}
    settings["sampling"] = SamplingParams()  # nothing of the model's own
    settings["temperature"] = TEMPERATURES[int(random.integers(len(TEMPERATURES)))]
    return Run(kind, prompt, settings, random_method(model, random))


def _said(result: Result) -> tuple[Any, ...]:
    """What of an answer must not depend on drafts or on what else runs."""
    return result.token_ids, result.text, result.finish_reason


def with_drafts(model: EagleModel, group: Sequence[Run]) -> list[Result]:
    """Returns the results of runs that decode at the same time."""
    if len(group) == 1:
        return [model.generate(group[0].prompt, **group[0].settings, **group[0].method)]
    results: dict[int, Result] = {}
    requests = [{"prompt": one.prompt, **one.settings, **one.method} for one in group]
    for number, piece in model.batch(requests, width=len(group)):
        if piece.result is not None:
            results[number] = piece.result
    return [results[number] for number in range(len(group))]


def random_prompt(model: EagleModel, random: np.random.Generator) -> list[int]:
    """Returns 1 to LONGEST_PROMPT ids: a part of a text of the certificate, or with equal chance random ids."""
    most = min(LONGEST_PROMPT, model.context // 2)
    certificate = model.manifest.certificate
    if certificate is not None and random.random() < 0.5:
        golden = certificate.prompts[int(random.integers(len(certificate.prompts)))]
        text = [*golden.prompt, *golden.continuation]
        start = int(random.integers(len(text)))
        return text[start : start + most]
    count = int(random.integers(1, most + 1))
    ids: list[int] = random.integers(0, model.manifest.target.vocab_size, count).tolist()
    return ids


def random_method(model: EagleModel, random: np.random.Generator) -> dict[str, Any]:
    """Returns settings of a method and a tree that the bundle can draft."""
    depth = int(random.integers(0, 12))
    dynamic = {"total_token": int(random.integers(2, 65)), "depth": min(depth, 7)}
    sizes = {"dynamic": dynamic, "static": {"draft_top_k": 4}, "chain": {"depth": depth}}
    runnable = (None, "habits") if model.manifest.head is None else (None, "habits", "head")
    choices: list[dict[str, Any]] = [{}]
    for method in METHODS:
        for trees in method.trees if method.proposer in runnable and not method.drafts_nothing else ():
            kinds = () if trees.datastore else trees.kinds or (None,)
            choices += [{"method": method.name, "tree": kind, **sizes.get(kind or "", {})} for kind in kinds]
    return choices[int(random.integers(len(choices)))]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if an output differed by more than a tie, 2 for wrong input."""
    return run_check(_parser(), argv, run, extra="cpu", interrupted="interrupted")


def run(args: argparse.Namespace) -> bool:
    """Compare runs of each bundle and print the outcomes; returns whether all outputs are equal but for allowed
    ties."""
    if args.runs < 1 or args.tokens < 2 or args.at_once < 1 or args.mixes < 1:
        raise RequestError(
            f"runs is {args.runs}, tokens {args.tokens}, at-once {args.at_once} and mixes {args.mixes}, but they must "
            "be 1, 2, 1 and 1 or more"
        )
    lossless = True
    for bundle in args.bundles:
        outcome = compare_runs(
            Path(bundle),
            args.runs,
            args.tokens,
            args.threads,
            args.seed,
            args.backend,
            args.at_once,
            args.kinds,
            args.mixes,
        )
        allowed = 0 if outcome.rows else outcome.ties  # quantised targets must be equal without ties
        lossless &= outcome.differ == allowed
        print(json.dumps(asdict(outcome)) if args.json else described(outcome), flush=True)
    return lossless


def described(outcome: Outcome) -> str:
    """Returns the outcome as one line."""
    ties = f", {outcome.ties} of them ties" if outcome.ties else ""
    rows = f"; {outcome.rows}" if outcome.rows else ""
    return (
        f"{outcome.bundle}: {outcome.precision} on {outcome.backend}, "
        f"{outcome.differ} of {outcome.runs} runs differ{ties}, tau {outcome.tau:.2f}{rows}; "
        f"{outcome.processor}, {outcome.seconds:.0f} s"
    )


def _parser() -> Parser:
    parser = Parser(prog="eagle_tools.lossless", description="Compare generations with drafts and without.")
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="folder written by eagle-export")
    parser.add_argument("--runs", type=int, default=200, metavar="N", help="generations of each kind (default 200)")
    parser.add_argument("--tokens", type=int, default=24, metavar="N", help="new tokens of each (default 24)")
    parser.add_argument("--backend", choices=("cpu", NATIVE), default="cpu", help="form of the graphs that runs")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs with drafts at the same time (1)")
    parser.add_argument(
        "--kinds", action="store_true", help="runs with stop strings, JSON schemas and tools among them"
    )
    parser.add_argument("--mixes", type=int, default=1, metavar="N", help="mixes that each request decodes in (1)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a forward pass (default: physical cores)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the choice of prompts and settings")
    parser.add_argument("--json", action="store_true", help="print one JSON object per bundle")
    return parser


if __name__ == "__main__":
    sys.exit(main())
