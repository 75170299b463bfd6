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

from eagle_runtime.base.backend_names import NATIVE
from eagle_runtime.bundle.listed_files import read_text_file
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from eagle_runtime.ort.operators import native_operators
from eagle_runtime.text.tokenizer import Text
from eagle_tools.bench.methods import sweep
from eagle_tools.bench.plan import Plan
from eagle_tools.bench.rows import Row, Setup, read_rows
from eagle_tools.bench.run import Reporter, execute
from eagle_tools.bench.summary import memory_key
from eagle_tools.peers.engine import Format
from eagle_tools.questions import Question
from eagle_tools.results.pairs import ALONE, PRECISIONS, Pair, bundle_of

METHODS = (  # of the papers' table: name, head, method
    ("Vanilla", ALONE, "vanilla"),
    ("Prompt lookup", ALONE, "lookup:chain"),
    ("Lookup, cost-aware", ALONE, "lookup"),
    ("Token recycling", ALONE, "recycling"),
    ("Lookahead", ALONE, "lookahead"),
    ("Vanilla", "eagle3", "vanilla"),
    ("Prompt lookup", "eagle3", "lookup:chain"),
    ("Lookup, cost-aware", "eagle3", "lookup"),
    ("EAGLE-1", "eagle1", "static"),
    ("EAGLE-2", "eagle1", "dynamic"),
    ("EAGLE-1 head, cost-aware", "eagle1", "cost-aware"),
    ("Block head, dynamic tree", "block", "dynamic"),
    ("Block head, cost-aware", "block", "cost-aware"),
    ("EAGLE-3, chain", "eagle3", "chain"),
    ("EAGLE-3", "eagle3", "dynamic"),
    ("EAGLE-3 head, cost-aware", "eagle3", "cost-aware"),
    ("EAGLE-3 head + lookup, cost-aware", "eagle3", "eagle+lookup"),
)
SHOWN = "int8"  # precision of the tables that show one alone
COMPARED = ("int8", "stored", "int4")  # precisions that are compared with other engines
LONG = (128, 3000)  # tokens of the prompts of the long-context stage


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of the bench. pair: name of the pair that it measures."""

    name: str
    pair: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Finished:
    """What a stage measured. facts: the machine and the prompts. differing: every output that was not vanilla's. peaks,
    bits: bytes of peak memory, and bits per weight of the target, by `setup_name`. measured: date and version of the
    code."""

    rows: list[Row]
    facts: list[str]
    notes: list[str]
    differing: list[str]
    peaks: dict[str, int]
    measured: str
    bits: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured. count: questions of each set. sweep_count: questions of the sweep of tree sizes."""

    count: int
    sweep_count: int
    max_new_tokens: int
    threads: int


def stages_of(
    pair: Pair,
    work: Path,
    questions: Sequence[Question],
    peers: Sequence[Format],
    sizes: Sizes,
    say: Callable[[str], None],
    only: str = "",
) -> list[Stage]:
    """Returns the stages of a pair with `only` in their names, whose missing bundles are exported. peers: formats of
    other engines that run the same weights in the stage that compares engines."""
    first, asked, stages = pair.heads[0], tuple(questions), list[Stage]()
    best = ("recycling",) if first == ALONE else ("eagle+lookup",)

    def bundle(head: str, precision: str) -> Path:
        return bundle_of(pair, head, precision, work, say)

    def engines() -> Plan:
        ours = tuple((bundle(first, precision), ("vanilla", "lookup", *best)) for precision in COMPARED)
        return Plan(ours, asked, pytorch=pair.target, peers=tuple(peers))

    def methods(precision: str) -> Plan:
        return Plan(tuple((bundle(head, precision), methods_of(head)) for head in pair.heads), asked, (0.0, 1.0))

    def trees() -> Plan | None:
        few = asked[:: max(1, len(asked) // sizes.sweep_count)][: sizes.sweep_count]
        every = ("vanilla", "dynamic", "cost-aware", *sweep())
        return None if first == ALONE else Plan(((bundle(first, SHOWN), every),), few)

    def long() -> Plan | None:
        main = bundle(first, SHOWN)
        manifest = read_manifest(main)
        if manifest.target.context <= max(LONG) + sizes.max_new_tokens:
            return None
        ends = long_questions(Text(main, partial(read_text_file, main, manifest)), questions, sizes.sweep_count)
        return Plan(((main, ("vanilla", "lookup", *best)),), ends, together=2)

    plans: list[Callable[[], Plan | None]] = [engines, *(partial(methods, p) for p in PRECISIONS), trees, long]
    for name, planned in zip(stage_names(pair.name), plans, strict=True):
        if only in name and (plan := planned()) is not None:
            backend = backend_of([bundle for bundle, _ in plan.bundles])
            limit, threads = sizes.max_new_tokens, sizes.threads
            plan = dataclasses.replace(plan, max_new_tokens=limit, threads=threads, backend=backend)
            stages.append(Stage(name, pair.name, plan))
    return stages


def stage_names(pair: str) -> list[str]:
    """Returns the names of a pair's stages, in order."""
    return [f"{pair}-{name}" for name in ("engines", *(f"methods-{p}" for p in PRECISIONS), "sweep", "long")]


def methods_of(head: str) -> tuple[str, ...]:
    """Returns the methods of the papers' table with a head, vanilla first."""
    return tuple(dict.fromkeys(["vanilla", *(method for _, other, method in METHODS if other == head)]))


def backend_of(bundles: Sequence[Path]) -> str:
    """Returns the backend on which all bundles are measured: native where its operators are installed and all have
    graphs for it, else cpu."""
    native = native_operators().library is not None
    return NATIVE if native and all(read_manifest(each).target.graph.native for each in bundles) else "cpu"


def long_questions(text: Text, questions: Sequence[Question], count: int) -> tuple[Question, ...]:
    """Returns `count` prompts of each length in LONG, cut from the joined texts of all questions, which are repeated
    where they are too few. A short prompt is the end of a long one, so that both are continued at the same place."""
    joined = "\n\n".join(question.turns[0] for question in questions)
    per_token = len(joined) / len(text.encode(joined))
    sizes = [int(length * per_token) for length in LONG]
    while len(joined) < max(sizes):
        joined += "\n\n" + joined
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
    peaks = {setup_name(s.setup): s.peak.host for s in outcome.summaries if s.peak is not None}
    bits = {setup_name(s.setup): s.stored.bits for s in outcome.summaries if s.stored is not None and s.stored.bits}
    now = date_and_version()
    finished = Finished(outcome.rows, outcome.facts, outcome.notes, outcome.differing, peaks, now, bits)
    known = {key: value for key, value in dataclasses.asdict(finished).items() if key != "rows"}
    record.write_text(json.dumps({"signature": signature, **known}, indent=1), encoding="utf-8")
    return finished


def date_and_version() -> str:
    """Returns today's date and the version of this code, with its commit in a git checkout."""
    folder, version = Path(__file__).parent, f"eagle-edge {metadata.version('eagle-edge')}"
    try:
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
        version += f", commit {subprocess.run(git, capture_output=True, encoding='utf-8', check=True).stdout.strip()}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"{datetime.date.today().isoformat()} by {version}"


def setup_name(setup: Setup) -> str:
    """Returns the name of a setup in Finished.peaks and Finished.bits."""
    return " ".join(memory_key(setup))


def signature_of(plan: Plan) -> str:
    """Returns a hash of the plan and of the bundles' manifests."""
    manifests = [(bundle / MANIFEST_NAME).read_bytes() for bundle, _ in plan.bundles]
    return hashlib.sha256(repr(plan).encode() + b"".join(manifests)).hexdigest()
