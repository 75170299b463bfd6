"""The runs behind docs/results.md: what each compares, and their rows, kept so that a run that was stopped goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from eagle_runtime.bundle.listed_files import read_text_file
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from eagle_runtime.text.tokenizer import Text
from eagle_tools.bench.methods import ABLATED, sweep
from eagle_tools.bench.plan import Plan
from eagle_tools.bench.rows import Row, Setup, read_rows
from eagle_tools.bench.run import Reporter, execute
from eagle_tools.bench.summary import memory_key
from eagle_tools.questions import Question
from eagle_tools.results.pairs import PRECISIONS, Pair, bundle_of

SPECULATIVE = ("lookup:chain", "lookup", "chain", "static", "dynamic", "cost-aware", "eagle+lookup")
EAGLE3 = ("vanilla", "dynamic", "cost-aware")
ABLATION = "int8"  # precision of Table 3
BOTH_HEADS = "int8"  # precision in which EAGLE-3 too is set beside PyTorch
LONG = (128, 3000)  # tokens of prompt
REPEATED = 3  # a third of a text follows the text itself
MORE = 2  # times as many prompts where few methods are compared


@dataclass(frozen=True, slots=True)
class Stage:
    """One run. pair: name of the pair it is about."""

    name: str
    pair: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Finished:
    """Its rows, and what was noted: of the machine, every output that was not vanilla's, and bytes of peak memory by
    `peak_name`."""

    rows: list[Row]
    facts: list[str]
    notes: list[str]
    differing: list[str]
    peaks: dict[str, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. count: prompts of a table of methods; MORE times as many of the comparison with PyTorch, on
    repeating and edited text and on long context; sweep_count: of the sweep, which has many contenders."""

    count: int
    sweep_count: int
    max_new_tokens: int
    threads: int


def stages_of(
    pair: Pair,
    work: Path,
    questions: Sequence[Question],
    edits: Sequence[Question],
    sizes: Sizes,
    say: Callable[[str], None],
) -> list[Stage]:
    """All runs about a pair; its bundles are exported where they are missing. edits: prompts whose answers repeat what
    stands in them."""
    bundles = {
        (head, precision): bundle_of(pair, head, precision, work, say)
        for precision in PRECISIONS
        for head in ("eagle1", "eagle3")
    }
    asked, more = tuple(questions[: sizes.count]), tuple(questions[: MORE * sizes.count])

    def stage(name: str, plan: Plan) -> Stage:
        plan = dataclasses.replace(plan, max_new_tokens=sizes.max_new_tokens, threads=sizes.threads, backend="cpu")
        return Stage(f"{pair.name}-{name}", pair.name, plan)

    found = []
    for precision in PRECISIONS:
        methods = ("vanilla", *SPECULATIVE, *(ABLATED if precision == ABLATION else ()))
        both = ((bundles["eagle1", precision], methods), (bundles["eagle3", precision], EAGLE3))
        found.append(stage(f"methods-{precision}", Plan(both, asked, (0.0, 1.0))))
    adaptive = ("cost-aware", "eagle+lookup")
    ours = [(bundles["eagle1", precision], ("vanilla", *adaptive)) for precision in PRECISIONS]
    ours.append((bundles["eagle3", BOTH_HEADS], ("vanilla", *adaptive)))
    found.append(stage("pytorch", Plan(tuple(ours), more, pytorch=pair.target)))
    for precision in PRECISIONS:
        shapes = ("vanilla", "dynamic", "cost-aware", *sweep())
        found.append(
            stage(f"sweep-{precision}", Plan(((bundles["eagle1", precision], shapes),), asked[: sizes.sweep_count]))
        )
    int8 = bundles["eagle1", "int8"]
    again = tuple(repeating(question) for question in more)
    repeat = ("vanilla", "lookup:chain", "lookup", "dynamic", "cost-aware", "eagle+lookup")
    found.append(stage("repeat", Plan(((int8, repeat),), again)))
    found.append(stage("edit", Plan(((int8, repeat),), tuple(edits[: len(more)]))))
    manifest = read_manifest(int8)
    if manifest.target.context > max(LONG) + sizes.max_new_tokens:
        long = long_questions(Text(int8, partial(read_text_file, int8, manifest)), questions, len(more))
        found.append(stage("long", Plan(((int8, ("vanilla", "dynamic", *adaptive)),), long, together=len(LONG))))
    return found


def repeating(question: Question) -> Question:
    """A text, then its beginning again: what follows has been seen."""
    text = question.turns[0]
    return Question(question.id, (f"{text}\n\n\n{text[: len(text) // REPEATED]}",), "repeats itself")


def long_questions(text: Text, questions: Sequence[Question], count: int) -> tuple[Question, ...]:
    """`count` prompts of each length in LONG, cut from all the questions' texts in a row: the short ones are the ends
    of the long ones, so that both are gone on from at the same places. The lengths take turns, as methods do."""
    whole = "\n\n".join(question.turns[0] for question in questions)
    per_token = len(whole) / len(text.encode(whole))
    sizes = [int(length * per_token) for length in LONG]
    longest = min(len(whole), max(sizes))
    ends = [longest + index * (len(whole) - longest) // max(1, count - 1) for index in range(count)]
    return tuple(
        Question(f"{length}-{number}", (whole[max(0, end - characters) : end],), f"{length} tokens")
        for number, end in enumerate(ends)
        for length, characters in zip(LONG, sizes, strict=True)
    )


def kept(stage: Stage, folder: Path) -> Finished | None:
    """The stage as an earlier run of the very same left it. folder: of rows."""
    rows, record = (folder / f"{stage.name}.{kind}" for kind in ("jsonl", "json"))
    if not (record.is_file() and rows.is_file()):
        return None
    known = json.loads(record.read_text(encoding="utf-8"))
    return Finished(read_rows(rows), **known) if known.pop("signature") == signature_of(stage.plan) else None


def finish(stage: Stage, folder: Path, reporter: Reporter) -> Finished:
    """The stage's rows, measured unless they were kept. folder: of rows."""
    if (before := kept(stage, folder)) is not None:
        return before
    rows, record, part = (folder / f"{stage.name}.{kind}" for kind in ("jsonl", "json", "part.jsonl"))
    signature = signature_of(stage.plan)
    part.unlink(missing_ok=True)
    outcome = execute(dataclasses.replace(stage.plan, rows=part), reporter)
    part.replace(rows)
    peaks = {peak_name(s.setup): s.peak.host for s in outcome.summaries if s.peak is not None}
    found = Finished(outcome.rows, outcome.facts, outcome.notes, outcome.differing, peaks)
    known = {key: value for key, value in dataclasses.asdict(found).items() if key != "rows"}
    record.write_text(json.dumps({"signature": signature, **known}, indent=1), encoding="utf-8")
    return found


def peak_name(setup: Setup) -> str:
    return " ".join(memory_key(setup))


def signature_of(plan: Plan) -> str:
    """Tells one plan from another, by the bundles' contents too."""
    manifests = [(bundle / MANIFEST_NAME).read_bytes() for bundle, _ in plan.bundles]
    return hashlib.sha256(repr(plan).encode() + b"".join(manifests)).hexdigest()
