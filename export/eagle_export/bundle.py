"""Writes a bundle: graphs, weights, tokenizer files and manifest, in a work folder that is renamed when complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from eagle_calib.folder import work_folder, written
from eagle_calib.observe import SampleFile
from eagle_export.base.destination import (
    check_destination,
    check_older,
    check_space,
    disk_errors,
    engines_of,
    folder_bytes,
)
from eagle_export.base.errors import ExportError
from eagle_export.base.memory import APART, TOGETHER, give_back, only_new_objects, set_threshold
from eagle_export.base.resume import fingerprint, holds_refused, kept, rounded_by
from eagle_export.checking.certificate import certified
from eagle_export.checking.head_check import HeadCheck
from eagle_export.checking.limits import FidelityError, accepted, keep_refused
from eagle_export.checking.source_reading import SourceReading, reading_of_pair
from eagle_export.checking.worst_layers import Layer, layers_of
from eagle_export.graphs.block_graph import write_transitions
from eagle_export.graphs.pair import Pair, build_graphs, open_pair
from eagle_export.graphs.weights import DATA_SUFFIX, num_bytes, save, save_over
from eagle_export.heads.block_config import TRANSITIONS
from eagle_export.recipes.keep import KeepLayers
from eagle_export.recipes.native import both_forms
from eagle_export.recipes.native_head import native_head
from eagle_export.recipes.plan import AUTO, Passes, apply, routes_experts
from eagle_export.recording.recording import OtherHalf, Way, how_to_record, other_half, recorded_inputs
from eagle_export.recording.self_calibration import KEPT, LENGTH
from eagle_export.writing.automatic import Choice, Sensitivity, choose, foreseen, room_for
from eagle_export.writing.bar import Bar, bar
from eagle_export.writing.listing import GRAPH_FILES, NATIVE_FILES, graph_specs, manifest_of, shared_weights
from eagle_export.writing.pair_checks import check_settings, notes_on, rounded_again
from eagle_export.writing.requirement import NOTABLE, requirement_of
from eagle_export.writing.settings import Order, Settings
from eagle_runtime.bundle.fidelity import shortfall
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Manifest
from eagle_runtime.commands.command import print_line

TOP_K = 64  # default of the top k that a head's graph returns per row; sampled trees use many candidates
SAVE_IT = "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
HOLDS_ONE = "give a file that holds one"
LONG = 120.0  # seconds of an export from which its KL is foreseen before its weights are rounded
FORESEEN = 2 * LENGTH  # tokens from which it is foreseen, within a fifth: all would take a sixth of an export of 1 B
BEYOND = "the KL will be about {:.2g}, and {:.2g} is the limit: end this, and choose another precision, or wait and see"
GOES_ON = "free space if that is why, and give the same command again: it goes on with what is finished"


@dataclass(frozen=True, slots=True)
class Exported:
    """A written bundle. shared: weights that both graphs hold under one name. size: bytes on disk. sensitivities: what
    the layers of precision "auto" were chosen from. head_check: how often the head's first drafted token is the
    target's own, if it was looked at."""

    bundle: Path
    manifest: Manifest
    shared: tuple[str, ...]
    size: int
    warnings: tuple[str, ...]
    sensitivities: tuple[Sensitivity, ...] = ()
    head_check: HeadCheck | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """An export that has begun. pair: what is exported. bundle: absolute. top_k: that the head's graph returns per row.
    way: how inputs are recorded, None for not at all. key: of its finished work (resume.py). report: called with what
    is being done. warnings: so far."""

    order: Order
    pair: Pair
    bundle: Path
    top_k: int
    way: Way | None
    key: str
    report: Callable[[str], None]
    warnings: list[str]

    @property
    def settings(self) -> Settings:
        return self.order.settings


@dataclass(frozen=True, slots=True)
class Traced:
    """What is there before the work folder is made. graphs: as traced, by name. layers: of the target's graph. reading:
    what is read of the source while its inputs are recorded, None for nothing. other: a copy of the process that
    records one half. weighed: on about how many tokens the importance of columns is measured, 0 for none."""

    graphs: dict[str, ir.Model]
    layers: tuple[Layer, ...]
    reading: SourceReading | None
    other: OtherHalf | None
    weighed: int


def export(
    target: Path,
    draft: Path | None,
    bundle: Path,
    settings: Settings | None = None,
    sources: Mapping[str, str] | None = None,
    **changed: Any,
) -> Exported:
    """Exports a target (a Hugging Face folder or a GGUF file) and a head (a folder) as a bundle folder.

        export(target, None, bundle, precision="int4", max_kl=0.1)

    draft: None for the target alone. settings: None for Settings(), in fp32. changed: fields that differ from these.
    sources: for the manifest, models of the hub that the folders are copies of -> their commits (fetch.fetched).

    An existing bundle, with the engines built from it, is replaced at the end; a folder with other files is refused.
    Raises ExportError (FidelityError for a bundle outside its limits), CalibrationError or FolderError. Then no files
    are left, but for a bundle outside its limits: it stays in a hidden folder next to its place, and the same call with
    other limits writes it in seconds. When interrupted, or where the disk is full, finished work stays there too, from
    which the same call goes on (resume.py)."""
    order = Order.of(replace(settings or Settings(), **changed), head=draft is not None)
    required = order.required if order.settings.certify else None
    bundle = bundle.absolute()
    with disk_errors(bundle):
        check_destination(bundle)
    rows: tuple[Sensitivity, ...] = ()
    head_check: HeadCheck | None = None
    with bar("reading checkpoints") as shown, only_new_objects(), ExitStack() as until_end:
        work = _begun(order, target, draft, bundle, shown.step)
        traced = None if holds_refused(work_folder(bundle), work.key) else _traced(work, until_end)
        with (
            disk_errors(bundle, GOES_ON),
            written(bundle, lambda older: check_older(older, bundle)) as folder,
            kept(folder.parent, work.key) as finished,
        ):
            manifest = accepted(finished, folder, required)
            if manifest is None:
                assert traced is not None, "a refused bundle is accepted, or refused again"
                manifest, rows = _made(work, traced, folder, finished, shown, sources or {})
                if required is not None:
                    manifest, head_check = _compared(work, traced, folder, finished, manifest)
            elif (marked := shortfall(manifest)) is not None:
                work.warnings.append(f"the bundle is marked: {marked}")
            size = folder_bytes(folder)
    return Exported(bundle, manifest, shared_weights(manifest), size, tuple(work.warnings), rows, head_check)


def _begun(order: Order, target: Path, draft: Path | None, bundle: Path, report: Callable[[str], None]) -> Work:
    """Opens the checkpoints. Raises ExportError for what does not go together."""
    settings, warnings = order.settings, list[str]()
    if engines := engines_of(bundle):
        warnings.append(
            f"the engines {', '.join(engines)} were built from the older bundle and go with it; build them again with "
            "eagle-export engines"
        )
    pair = open_pair(target, draft)
    check_settings(pair, settings.backend, settings.cache_precision, settings.draft_vocab)
    warnings += [*notes_on(pair, settings.backend), *rounded_again(pair.target, settings.backend, settings.precision)]
    if "tokenizer.json" not in pair.texts:
        what, advice = ("tokenizer.json", SAVE_IT) if pair.target.texts is None else ("tokenizer", HOLDS_ONE)
        warnings.append(f"{target} has no {what}; the bundle takes and returns token ids, no text; {advice}")
    top_k = min(TOP_K, settings.draft_vocab or TOP_K) if settings.draft_top_k is None else settings.draft_top_k
    if pair.head is not None:
        top_k = min(top_k, pair.head.config.draft_vocab_size)
    way, notes = how_to_record(pair, settings.calibrate) if order.records else (None, [])
    read = (target, draft, settings.calibration, settings.calibrate)
    made = (
        settings.backend, order.precisions, settings.draft_vocab, settings.keep, settings.cache_precision,
        settings.aim, settings.size, settings.record, way,
    )  # fmt: skip
    key = fingerprint([path for path in read if path is not None], {"planned": repr(made), "k": top_k})
    return Work(order, pair, bundle, top_k, way, key, report, warnings + notes)


def _traced(work: Work, until_end: ExitStack) -> Traced:
    """Traces the graphs, which refuses damaged checkpoints before anything is written. until_end: ends the copy of the
    process, if there is one. Raises ExportError where disk or memory are too small."""
    pair, way, settings = work.pair, work.way, work.settings
    certify, calibrated = settings.certify, settings.calibration is not None
    with disk_errors(work.bundle):  # the disk is tried
        requirement = requirement_of(
            pair, settings.backend, work.order.precisions, way, work.bundle, calibrated=calibrated, certify=certify
        )
        requirement.check(work.bundle)
    reading = reading_of_pair(pair) if certify and way == "whole" else None
    if way is not None:
        set_threshold(APART)  # until inputs are recorded
    other: OtherHalf | None = None
    if way == "whole" and settings.calibrate is None:
        asked = None if reading is None else reading.asked()
        other = until_end.enter_context(other_half(pair, work.bundle, asked))
    work.report("tracing")
    traced = work.order.plan().traced
    graphs = build_graphs(pair, traced, work.top_k, routed=routes_experts(settings.backend))
    if settings.keep:
        KeepLayers(tuple(settings.keep)).check_patterns(graphs["target"])
    if work.settings.size is not None:
        room_for(graphs, partial(work.order.plan, None), work.settings.size)
    if requirement.seconds > NOTABLE:
        print_line("eagle-export", requirement.line(work.bundle))
    layers = layers_of(graphs["target"])
    give_back()
    foreseen = FORESEEN if certify and requirement.seconds > LONG else 0
    weighed = KEPT if settings.precision == AUTO else foreseen
    return Traced(graphs, layers, reading, other, weighed)


def _chosen(work: Work, traced: Traced, finished: Path, samples: SampleFile) -> Choice:
    """Records inputs, if any are, and chooses by them how weights are stored. finished: for what is to be read again if
    the export is stopped. samples: for what is not, open until weights are written."""
    if work.way is None:
        return Choice((), work.order.plan(), {}, None)
    asked = None if traced.reading is None else traced.reading.asked()
    recorded, missing = recorded_inputs(
        work.pair, work.settings.calibrate, work.way, finished, samples, work.report, asked,
        other=traced.other, weighed=traced.weighed,
    )  # fmt: skip
    work.warnings.extend(missing)
    give_back()
    set_threshold(TOGETHER)
    with_inputs = partial(work.order.plan, None if recorded is None else recorded.inputs)
    chosen = Choice((), with_inputs(), {}, None)
    if work.settings.precision == AUTO:
        if recorded is None:
            raise ExportError(f"layers cannot be chosen: {missing[0]}")
        chosen = choose(traced.graphs, with_inputs, recorded, work.settings.aim, work.settings.size, work.report)
    elif recorded is not None and recorded.importance:
        chosen = foreseen(traced.graphs["target"], chosen.plan, recorded)
    if recorded is not None:
        rounded_by(finished, recorded.digest([(row.name, row.choice.grid) for row in chosen.rows]))
    most = work.order.required.limits.kl
    if chosen.kl is not None and work.settings.certify and chosen.kl > most:
        print_line("eagle-export", BEYOND.format(chosen.kl, most))
    return chosen


def _made(
    work: Work, traced: Traced, folder: Path, finished: Path, shown: Bar, sources: Mapping[str, str]
) -> tuple[Manifest, tuple[Sensitivity, ...]]:
    """Writes the bundle, and frees the graphs. finished: where weights of an earlier run may be. Returns its manifest,
    and what layers were chosen from."""
    graphs, pair = traced.graphs, work.pair
    hashes, before = dict[str, str](), 0
    with SampleFile(finished) as samples:  # weights are rounded by them as they are written
        chosen = _chosen(work, traced, finished, samples)
        work.report("choosing scales")
        decisions, natives = _rewritten(chosen.plan.passes, graphs)
        decisions["target"] = {**chosen.done, **decisions["target"]}
        total = sum(num_bytes(graph) for graph in graphs.values())
        check_space(work.bundle.parent, total - folder_bytes(finished))
        shown.weights(total)
        for name, graph in graphs.items():
            path = folder / GRAPH_FILES[name]
            path.parent.mkdir()
            hashes[GRAPH_FILES[name] + DATA_SUFFIX] = save(graph, path, partial(shown.tensor, before), finished)
            before += num_bytes(graph)
        for name, native in natives.items():
            save_over(native, graphs[name], folder / NATIVE_FILES[name], GRAPH_FILES[name])
    for name, content in pair.texts.items():
        (folder / name).write_bytes(content)
    if pair.head is not None and pair.head.config.markov_rank:
        write_transitions(folder / TRANSITIONS, pair.head.checkpoint, pair.head.d2t)
    manifest = manifest_of(
        folder, pair, graph_specs(graphs, natives, decisions), work.order.precisions, work.top_k,
        work.settings.draft_vocab, hashes, sources,
    )  # fmt: skip
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    graphs.clear()  # with their weights, before the source's are loaded
    return manifest, chosen.rows


def _compared(
    work: Work, traced: Traced, folder: Path, finished: Path, manifest: Manifest
) -> tuple[Manifest, HeadCheck | None]:
    """Compares the bundle with its source; returns the manifest with the certificate, and what was seen of the head. A
    refused bundle goes to the finished work. Raises FidelityError, ExportError."""
    give_back()  # recorded inputs; graphs refer to themselves
    try:
        manifest, head_check, shortfalls = certified(
            work.pair, folder, manifest, traced.layers, work.order.required, work.report, traced.reading
        )
    except FidelityError as error:
        if error.certificate is not None:
            keep_refused(folder, error.certificate, manifest, finished)
        raise
    work.warnings.extend(shortfalls)
    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return manifest, head_check


def _rewritten(
    passes: Mapping[str, Passes], graphs: Mapping[str, ir.Model]
) -> tuple[dict[str, dict[str, str]], dict[str, ir.Model]]:
    """Runs the passes over the graphs, in place. Returns by the graphs' names what was done, and the native forms: of
    the target if it has one, and then of the head if that has one too."""
    decisions = {name: apply(passes[name], graph) for name, graph in graphs.items() if name != "target"}
    decisions["target"], target = both_forms(passes["target"], graphs["target"])
    if target is None:
        return decisions, {}
    head = native_head(graphs["draft"]) if "draft" in graphs else None
    return decisions, {"target": target} | ({} if head is None else {"draft": head})
