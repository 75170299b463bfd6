"""Executes a plan: loads bundles, decodes, measures memory, computes the summaries."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_runtime import EagleModel
from eagle_runtime.base.backend_names import on_cpu
from eagle_runtime.base.errors import RequestError
from eagle_runtime.opening.datastore_file import with_datastore
from eagle_runtime.opening.draft_bundle import with_draft_bundles
from eagle_runtime.opening.hub_bundle import bundle_folder
from eagle_runtime.opening.loading import open_bundle
from eagle_runtime.opening.opened import OpenBundle
from eagle_tools.bench import machine
from eagle_tools.bench import pytorch as hf
from eagle_tools.bench.contenders import Contender, bundle_contenders, first_turns, interleave, without_datastore
from eagle_tools.bench.cycles import Recorder
from eagle_tools.bench.identity import FOREIGN, PYTORCH, difference_sentence, differing_rows
from eagle_tools.bench.memory import JobError, MemoryRun, Peak, peak_of
from eagle_tools.bench.methods import DATASTORE, VANILLA, settings_of, takes_draft_model
from eagle_tools.bench.peer_rows import CONTEXT, PASS_ROWS, Passes, measure_passes
from eagle_tools.bench.peers import Peers, Stored, converted_peers, load_peers, stored_target
from eagle_tools.bench.plan import Plan, check, check_length
from eagle_tools.bench.rows import Asked, Row, RowFile, Setup
from eagle_tools.bench.summary import Summary, memory_key, summarise
from eagle_tools.peers.source import open_source
from eagle_tools.ties import computes_in, is_tie


class Reporter:
    """Receives the progress of a run. This one ignores it."""

    def say(self, line: str) -> None:
        """Called with a sentence to show at once."""

    def expect(self, what: str, count: int) -> None:
        """Called before `count` steps of one kind."""

    def step(self, what: str) -> None:
        """Called after each of these steps."""


@dataclass(slots=True)
class Outcome:
    """What a run measured. differing: a sentence per output that is not vanilla's, without fp16's ties. facts: on
    machine and prompts. notes: on ties and what could not be measured. cycles: for the page. passes: empty unless they
    were timed. weights: bytes that a forward pass reads, sizes: of targets on the disk; by `memory_key`. peers: what
    other engines load, by precision and backend."""

    asked: list[Asked]
    chat: bool
    bandwidth: dict[str, float | None]
    weights: dict[tuple[str, ...], int]
    cycles: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sizes: dict[tuple[str, ...], Stored] = field(default_factory=dict)
    peers: dict[tuple[str, str], Path] = field(default_factory=dict)
    passes: Passes = field(default_factory=dict)


def execute(plan: Plan, reporter: Reporter) -> Outcome:
    """Check the plan, then measure; returns the outcome. Raises EagleErrors of one sentence."""
    check(plan)
    rows_file = None if plan.rows is None else RowFile(plan.rows)
    measured = _decode(plan, rows_file, reporter)
    peaks = measure_peaks(plan, list(measured.weights), measured, reporter)
    measured.summaries = summarise(measured.rows, peaks, measured.weights, measured.bandwidth, measured.sizes)
    measured.facts = _facts(plan, measured)
    return measured


def _decode(plan: Plan, rows_file: RowFile | None, reporter: Reporter) -> Outcome:
    with contextlib.ExitStack() as stack:
        converted = []
        if plan.peers and plan.pytorch is not None:
            source = open_source(plan.pytorch)
            converted = converted_peers(source, plan.peers, plan.peer_folder, plan.threads, reporter.say)
        models, opened = [], []
        for bundle, must in plan.bundles:
            reporter.expect(f"loading {bundle}", 1)
            draft_bundles, datastore = _loaded_with(plan, must)
            one = open_bundle(bundle_folder(bundle), plan.backend, plan.context, plan.threads, check_hashes=True)
            one = with_datastore(with_draft_bundles(one, draft_bundles, True, None), datastore)
            opened.append(one)
            models.append(stack.enter_context(EagleModel(one)))
            if one.notice is not None:
                reporter.say(f"eagle-bench: {one.notice}")
        asked, longest = first_turns(models[0], plan.questions), check_length(plan, models)
        recorder = Recorder() if plan.record else None
        contenders = list(_our_contenders(plan, models, opened, asked, recorder))
        bandwidth = _bandwidths(plan, {model.backend for model in models})
        notes: list[str] = []
        if plan.pytorch is not None:
            contenders += _their_contenders(plan, plan.pytorch, longest, asked[0], stack, reporter, notes)
        room = max(longest, CONTEXT + PASS_ROWS[-1])
        peers = load_peers(source, converted, plan.threads, room, stack, reporter.say) if converted else None
        contenders += peers.contenders() if peers else []
        chat = models[0].text.chat
        prompts = sum(len(question.turns) if chat else 1 for question in plan.questions)
        weights = {memory_key(contender.setup): contender.pass_bytes for contender in contenders}
        measured = Outcome(asked, chat, bandwidth, weights, {"tokens": {}, "runs": []}, notes=notes)
        if peers:
            measured.sizes = dict(_sizes(plan, models, peers, contenders))
            measured.peers = {(model.format.name, model.format.engine): model.path for model in converted}
        reporter.expect("decoding", len(contenders) * (prompts + 1))
        prompt_ids = {}
        for prompt, row in interleave(
            contenders,
            models[0],
            plan.questions,
            plan.max_new_tokens,
            plan.together,
            lambda setup: reporter.step(_name(setup)),
        ):
            prompt_ids[row.prompt_id] = prompt.token_ids
            measured.rows.append(row)
            if rows_file is not None:
                rows_file.add(row)
        if peers and plan.peer_rows:
            reporter.expect("timing passes of several rows", 1)
            measured.passes = measure_passes(list(zip(plan.names, opened, strict=True)), peers.workers)
        _compare(plan, models, prompt_ids, measured)
        if recorder is not None:
            measured.cycles = recorder.data(models[0].text)
    return measured


def _loaded_with(plan: Plan, must: Sequence[str]) -> tuple[tuple[Path, ...], Path | None]:
    """Returns the draft bundles and the datastore that a bundle's methods need. must: of this bundle. A datastore is
    for all methods that look for matches, but for DATASTORE alone where any bundle runs that."""
    methods = {*must, *plan.wanted}
    drafts = any(map(takes_draft_model, methods))
    alone = any(DATASTORE in methods for _, methods in plan.bundles)
    return plan.draft_bundles if drafts else (), plan.datastore if DATASTORE in methods or not alone else None


def _compare(
    plan: Plan, models: Sequence[EagleModel], prompts: Mapping[int | str, Sequence[int]], measured: Outcome
) -> None:
    """Add a sentence for every output that is not vanilla's: to the notes if it is fp16 and differs only by rounding,
    else to the differing ones. prompts: ids by prompt_id."""
    by_name = dict(zip(plan.names, models, strict=True))
    for row, reference in differing_rows(measured.rows):
        model, prompt, both = by_name[row.bundle], prompts[row.prompt_id], (row.token_ids, reference.token_ids)
        fp16 = computes_in(model) == "float16"
        tie = fp16 and is_tie(model, prompt, *both, temperature=row.temperature, seed=plan.seed)
        sentences = measured.notes if tie else measured.differing
        sentences.append(difference_sentence(row, reference, tie))


def _our_contenders(
    plan: Plan,
    models: Sequence[EagleModel],
    opened: Sequence[OpenBundle],
    asked: Sequence[Asked],
    recorder: Recorder | None,
) -> Iterator[Contender]:
    """Yields one contender per bundle, temperature and method. opened: what the models are on. Raises RequestError for
    a required method that a bundle cannot run."""

    def serves(model: EagleModel, method: str) -> bool:
        try:
            model.stream(asked[0].token_ids, **settings_of(method))
        except RequestError:
            return False
        return True

    for model, bundle, name, (_, must) in zip(models, opened, plan.names, plan.bundles, strict=True):
        methods = [*must, *(method for method in plan.wanted if method not in must and serves(model, method))]
        plain = without_datastore(bundle) if DATASTORE in methods else None
        for contender in bundle_contenders(
            model, name, methods, plan.temperatures, plan.seed, plan.pytorch is not None, recorder, plain
        ):
            contender.check(asked, plan.max_new_tokens)
            yield contender


def _sizes(
    plan: Plan, models: Sequence[EagleModel], peers: Peers, contenders: Sequence[Contender]
) -> Iterator[tuple[tuple[str, ...], Stored]]:
    """Yields (`memory_key`, size of the target) of all contenders but PyTorch's."""
    weights = peers.source.num_weights()
    bundles = {
        name: stored_target(folder, model.manifest.target.graph.file, weights)
        for name, (folder, _), model in zip(plan.names, plan.bundles, models, strict=True)
    }
    for contender in contenders:
        setup = contender.setup
        if setup.backend != PYTORCH:
            size = peers.sizes.get((setup.precision, setup.backend)) or bundles[setup.bundle]
            yield memory_key(setup), size


def _their_contenders(
    plan: Plan,
    folder: Path,
    longest: int,
    asked: Asked,
    stack: contextlib.ExitStack,
    reporter: Reporter,
    notes: list[str],
) -> Iterator[Contender]:
    def say(line: str) -> None:
        notes.append(line)
        reporter.say(line)

    for precision in hf.precisions()[: 1 if plan.peers else None]:
        reporter.expect(f"loading PyTorch {precision}", 1)
        model = hf.PytorchModel(folder, precision, plan.threads, longest, plan.assistant)
        stack.callback(model.close)
        yield from hf.pytorch_contenders(model, folder, plan.modes, asked, say)


def measure_peaks(
    plan: Plan, keys: Sequence[tuple[str, ...]], measured: Outcome, reporter: Reporter
) -> dict[tuple[str, ...], Peak]:
    """Returns the peak memory by `memory_key`, measured in processes of their own that answer the longest prompt. All
    drafting methods of a bundle that load nothing else share one figure, and so do PyTorch's modes in one precision,
    since they load the same weights; another engine's modes have one each. A measurement that fails becomes a note."""
    folder_of = {name: folder for name, (folder, _) in zip(plan.names, plan.bundles, strict=True)}
    longest = max(measured.asked, key=lambda prompt: len(prompt.token_ids)).token_ids
    jobs: dict[tuple[object, ...], MemoryRun] = {}
    shared = {}
    for key in keys:
        method, precision, backend, bundle = key
        ours = backend not in FOREIGN
        folder = folder_of[bundle] if ours else measured.peers.get((precision, backend), plan.pytorch)
        drafts = tuple(map(str, plan.draft_bundles)) if ours and takes_draft_model(method) else ()
        text = str(plan.datastore) if ours and method == DATASTORE else None
        how = "eager" if backend == PYTORCH else method
        shared[key] = (precision, backend, bundle, method != VANILLA if ours else how, drafts, text)
        one = MemoryRun(str(folder), backend, plan.threads, how, precision, longest, drafts, text)
        jobs.setdefault(shared[key], one)
    reporter.expect("measuring memory", len(jobs))
    peaks = {}
    for group, job in jobs.items():
        try:
            peaks[group] = peak_of(job)
        except JobError as error:
            measured.notes.append(str(error))
        reporter.step(f"{job.folder} {job.precision}")
    return {key: peaks[group] for key, group in shared.items() if group in peaks}


def _bandwidths(plan: Plan, backends: set[str]) -> dict[str, float | None]:
    """Returns the bytes per second of the memory that each backend, and PyTorch, reads weights from."""
    device = machine.device_bandwidth()
    host = machine.read_bandwidth(plan.threads) if any(map(on_cpu, backends)) or device is None else None
    return {**{name: host if on_cpu(name) else device for name in backends}, PYTORCH: device or host}


def _name(setup: Setup) -> str:
    return f"{setup.bundle} {setup.precision} {setup.method} T = {setup.temperature:g}"


def _facts(plan: Plan, measured: Outcome) -> list[str]:
    digest = hashlib.sha256(repr([prompt.token_ids for prompt in measured.asked]).encode()).hexdigest()[:12]
    how = "through the chat template, all turns" if measured.chat else "as plain text, first turns"
    ending = "end-of-sequence ignored" if plan.pytorch is not None else "up to an end-of-sequence"
    speeds = [f"{name}: memory read at {speed / 1e9:.1f} GB/s" for name, speed in measured.bandwidth.items() if speed]
    return [
        *machine.describe(plan.threads),
        *(line for line in speeds if plan.pytorch is not None or not line.startswith(PYTORCH)),
        f"{len(plan.questions)} questions {how}, ids {digest}",
        f"{plan.max_new_tokens} new tokens, {ending}",
        f"seed {plan.seed}",
    ]
