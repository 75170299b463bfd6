"""The stages that measure docs/results.md. Each stage's rows are kept, so that a stopped run can go on."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
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
BOTH_HEADS = "int8"  # precision in which EAGLE-3 is compared with PyTorch too
LONG = (128, 3000)  # tokens of the prompts of the long-context stage
REPEATED = 3  # the first third of a text is repeated after the text
MORE = 2  # factor of the number of prompts where few methods are compared


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of the bench. pair: name of the pair that it measures."""

    name: str
    pair: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Finished:
    """What a stage measured. facts: the machine and the prompts. differing: every output that was not vanilla's. peaks:
    bytes of peak memory by `peak_name`. measured: date and version of the code."""

    rows: list[Row]
    facts: list[str]
    notes: list[str]
    differing: list[str]
    peaks: dict[str, int]
    measured: str


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. count: prompts of a table of methods; the comparison with PyTorch, repeating and edited
    text and long context use MORE times as many. sweep_count: prompts of the sweep of tree sizes."""

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
    """Returns all stages of a pair, whose missing bundles are exported. edits: prompts whose answers repeat parts of
    the prompt."""
    bundles = {
        (head, precision): bundle_of(pair, head, precision, work, say)
        for precision in PRECISIONS
        for head in ("eagle1", "eagle3")
    }
    asked, more = tuple(questions[: sizes.count]), tuple(questions[: MORE * sizes.count])

    def stage(name: str, plan: Plan) -> Stage:
        plan = dataclasses.replace(plan, max_new_tokens=sizes.max_new_tokens, threads=sizes.threads, backend="cpu")
        return Stage(f"{pair.name}-{name}", pair.name, plan)

    stages = []
    for precision in PRECISIONS:
        methods = ("vanilla", *SPECULATIVE, *(ABLATED if precision == ABLATION else ()))
        both = ((bundles["eagle1", precision], methods), (bundles["eagle3", precision], EAGLE3))
        stages.append(stage(f"methods-{precision}", Plan(both, asked, (0.0, 1.0))))
    adaptive = ("cost-aware", "eagle+lookup")
    ours = [(bundles["eagle1", precision], ("vanilla", *adaptive)) for precision in PRECISIONS]
    ours.append((bundles["eagle3", BOTH_HEADS], ("vanilla", *adaptive)))
    stages.append(stage("pytorch", Plan(tuple(ours), more, pytorch=pair.target)))
    for precision in PRECISIONS:
        shapes = ("vanilla", "dynamic", "cost-aware", *sweep())
        stages.append(
            stage(f"sweep-{precision}", Plan(((bundles["eagle1", precision], shapes),), asked[: sizes.sweep_count]))
        )
    int8 = bundles["eagle1", "int8"]
    again = tuple(repeating(question) for question in more)
    repeat = ("vanilla", "lookup:chain", "lookup", "dynamic", "cost-aware", "eagle+lookup")
    stages.append(stage("repeat", Plan(((int8, repeat),), again)))
    stages.append(stage("edit", Plan(((int8, repeat),), tuple(edits[: len(more)]))))
    manifest = read_manifest(int8)
    if manifest.target.context > max(LONG) + sizes.max_new_tokens:
        long = long_questions(Text(int8, partial(read_text_file, int8, manifest)), questions, len(more))
        stages.append(stage("long", Plan(((int8, ("vanilla", "dynamic", *adaptive)),), long, together=len(LONG))))
    return stages


def repeating(question: Question) -> Question:
    """Returns a prompt of a text followed by the text's beginning, so that the continuation repeats the text."""
    text = question.turns[0]
    return Question(question.id, (f"{text}\n\n\n{text[: len(text) // REPEATED]}",), "repeats itself")


def long_questions(text: Text, questions: Sequence[Question], count: int) -> tuple[Question, ...]:
    """Returns `count` prompts of each length in LONG, cut from the joined texts of all questions. A short prompt is the
    end of a long one, so that both are continued at the same place."""
    joined = "\n\n".join(question.turns[0] for question in questions)
    per_token = len(joined) / len(text.encode(joined))
    sizes = [int(length * per_token) for length in LONG]
    longest = min(len(joined), max(sizes))
    ends = [longest + index * (len(joined) - longest) // max(1, count - 1) for index in range(count)]
    return tuple(
        Question(f"{length}-{number}", (joined[max(0, end - characters) : end],), f"{length} tokens")
        for number, end in enumerate(ends)
        for length, characters in zip(LONG, sizes, strict=True)
    )


def kept(stage: Stage, folder: Path) -> Finished | None:
    """Returns what an earlier run of the same stage measured, or None. folder: of rows."""
    rows, record = (folder / f"{stage.name}.{kind}" for kind in ("jsonl", "json"))
    if not (record.is_file() and rows.is_file()):
        return None
    known = json.loads(record.read_text(encoding="utf-8"))
    same = known.pop("signature") == signature_of(stage.plan) and "measured" in known
    return Finished(read_rows(rows), **known) if same else None


def finish(stage: Stage, folder: Path, reporter: Reporter) -> Finished:
    """Returns what the stage measured, now or in an earlier run. folder: of rows."""
    if (before := kept(stage, folder)) is not None:
        return before
    rows, record, part = (folder / f"{stage.name}.{kind}" for kind in ("jsonl", "json", "part.jsonl"))
    signature = signature_of(stage.plan)
    part.unlink(missing_ok=True)
    outcome = execute(dataclasses.replace(stage.plan, rows=part), reporter)
    part.replace(rows)
    peaks = {peak_name(s.setup): s.peak.host for s in outcome.summaries if s.peak is not None}
    finished = Finished(outcome.rows, outcome.facts, outcome.notes, outcome.differing, peaks, date_and_version())
    known = {key: value for key, value in dataclasses.asdict(finished).items() if key != "rows"}
    record.write_text(json.dumps({"signature": signature, **known}, indent=1), encoding="utf-8")
    return finished


def date_and_version() -> str:
    """Returns today's date and the version of this code, with its commit in a git checkout."""
    folder, version = Path(__file__).parent, f"eagle-edge {metadata.version('eagle-edge')}"
    try:
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        version += f", commit {subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"{datetime.date.today().isoformat()} by {version}"


def peak_name(setup: Setup) -> str:
    return " ".join(memory_key(setup))


def signature_of(plan: Plan) -> str:
    """Returns a hash of the plan and of the bundles' manifests."""
    manifests = [(bundle / MANIFEST_NAME).read_bytes() for bundle, _ in plan.bundles]
    return hashlib.sha256(repr(plan).encode() + b"".join(manifests)).hexdigest()
