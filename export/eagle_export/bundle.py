"""Writes a bundle: graphs, weights, tokenizer files and manifest, in a work folder that is renamed when complete."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path

import onnx_ir as ir
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from eagle_calib.calibration import read_calibration
from eagle_calib.folder import work_folder, written
from eagle_export.base.data_file import Report
from eagle_export.base.destination import (
    check_destination,
    check_older,
    check_space,
    disk_errors,
    engines_of,
    folder_bytes,
)
from eagle_export.base.errors import ExportError
from eagle_export.base.memory import give_back, keep_blocks_apart, keep_blocks_together
from eagle_export.base.resume import fingerprint, holds_refused, kept
from eagle_export.checking.certificate import certified
from eagle_export.checking.head_check import HeadCheck
from eagle_export.checking.limits import LIMITS, FidelityError, accepted, keep_refused, required_fidelity
from eagle_export.checking.source_reading import SourceReading, reading_of_pair
from eagle_export.checking.worst_layers import Layer, layers_of
from eagle_export.graphs.block_graph import write_transitions
from eagle_export.graphs.pair import Pair, build_graphs, open_pair
from eagle_export.graphs.weights import DATA_SUFFIX, graph_spec, num_bytes, save, save_over
from eagle_export.heads.block_config import TRANSITIONS
from eagle_export.heads.config import HeadConfig
from eagle_export.recipes.native import DOMAIN, both_forms
from eagle_export.recipes.native_head import native_head
from eagle_export.recipes.plan import (
    AUTO,
    Passes,
    apply,
    default_draft_precision,
    plan,
    recorded_from_source,
    routes_experts,
)
from eagle_export.recording.recording import OtherHalf, how_to_record, other_half, recorded_inputs
from eagle_export.recording.self_calibration import KEPT, LENGTH
from eagle_export.recording.source_text import Asked
from eagle_export.writing.automatic import (
    Choice,
    Sensitivity,
    checked_budget,
    choose,
    foreseen_kl,
    plan_after,
    smoothed_first,
)
from eagle_export.writing.pair_checks import check_settings, notes_on
from eagle_export.writing.requirement import NOTABLE, requirement_of
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.fidelity import shortfall
from eagle_runtime.bundle.manifest import (
    MANIFEST_NAME,
    OPERATORS,
    SCHEMA_VERSION,
    GraphSpec,
    HeadSpec,
    Manifest,
    NativeSpec,
    TargetSpec,
    TreeDefaults,
)
from eagle_runtime.commands.command import print_line

GRAPH_FILES = {"target": "target/model.onnx", "draft": "draft/model.onnx"}
NATIVE_FILES = {"target": "target/native.onnx", "draft": "draft/native.onnx"}
TOP_K = 64  # default of the top k that a head's graph returns per row; sampled trees use many candidates
SAVE_IT = "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes one"
LONG = 120.0  # seconds of an export from which its KL is foreseen before its weights are rounded
FORESEEN = 2 * LENGTH  # tokens from which it is foreseen, within a fifth: all would take a sixth of an export of 1 B
BEYOND = "the KL will be about {:.2g}, and {:.2g} is the limit: end this, and choose another precision, or wait and see"
GOES_ON = "free space if that is why, and give the same command again: it goes on with what is finished"
TOOLS = ("eagle-edge", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")


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


def export(
    target: Path,
    draft: Path | None,
    bundle: Path,
    *,
    precision: str = "fp32",
    draft_precision: str | None = None,
    backend: str = "cpu",
    calibration: Path | None = None,
    draft_vocab: int | None = None,
    draft_top_k: int | None = None,
    certify: bool = True,
    min_agreement: float | None = None,
    max_kl: float | None = None,
    keep: Sequence[str] = (),
    cache_precision: str | None = None,
    calibrate: Path | None = None,
    record: bool = True,
    size: int | None = None,
    sources: Mapping[str, str] | None = None,
) -> Exported:
    """Exports a target (a Hugging Face folder or a GGUF file) and a head (a folder) as a bundle folder. draft: None for
    the target alone.

    backend, precision: keys of recipes.plan.RECIPES. draft_precision: precision of the head, None for the default next
    to the target's. calibration: folder that eagle-calib wrote for these models. draft_vocab: number of most frequent
    tokens that the head keeps, None for all. draft_top_k: the top k that the head's graph returns per row, which is the
    most children that a tree's node may have; None for TOP_K. certify: compare the finished bundle with the source and
    write the result into its manifest; if this machine cannot do that, a warning is returned. min_agreement, max_kl
    (nats): limits beyond which the bundle is refused; None for those of its precision (limits.LIMITS). keep: patterns
    of names of the target's weights that stay as traced. cache_precision: "int8" for a quantised target on a CPU that
    keeps its keys and values in bytes; None for the type in which it computes them. calibrate: a text file (or JSONL
    as eagle-calib reads it) on which inputs are recorded where there is no calibration; None for text that the target
    itself generates. record: whether inputs are recorded at all where there is no calibration. size: bytes of all
    weights to which precision "auto" widens layers; without it, it widens them until it should reach min_agreement,
    and the bundle is refused only below its precision's own limit. sources: for the manifest, models of the hub that
    the folders are copies of -> their commits (fetch.fetched).

    An existing bundle, with the engines built from it, is replaced at the end; a folder with other files is refused.
    Raises ExportError (FidelityError for a bundle outside its limits), CalibrationError or FolderError. Then no files
    are left, but for a bundle outside its limits: it stays in a hidden folder next to its place, and the same call with
    other limits writes it in seconds. When interrupted, or where the disk is full, finished work stays there too, from
    which the same call goes on (resume.py)."""
    if draft_top_k is not None and draft_top_k < 1:
        raise ExportError(f"draft top-k is {draft_top_k}, but must be 1 or more")
    if draft_vocab is not None and draft_vocab < 1:
        raise ExportError(f"draft vocabulary is {draft_vocab}, but must be 1 or more")
    precisions = {"target": precision}
    if draft is not None:
        precisions["draft"] = draft_precision or default_draft_precision(backend, precision)
    elif (draft_precision, draft_vocab, draft_top_k) != (None, None, None):
        raise ExportError(
            "draft precision, vocabulary and top-k are settings of a head; give a head, or leave them out"
        )
    aim = min_agreement if precision == AUTO and size is None else None
    budget = checked_budget(precision, aim, size)
    if calibrate is not None and not recorded_from_source(backend, precision):
        raise ExportError(f"{precision} for backend {backend} records no inputs; leave the text out")
    if precision == AUTO and calibration is not None:
        raise ExportError(f"precision {AUTO} measures the source itself; give a text as calibrate, not a calibration")
    if not record and (calibrate is not None or precision == AUTO):
        raise ExportError(f"{'a text' if calibrate is not None else AUTO} needs recorded inputs; let them be recorded")
    if calibrate is not None and calibration is not None:
        raise ExportError("a calibration and a text to record one on were given; leave one of them out")
    least = min_agreement if aim is None else min(aim, LIMITS[AUTO].agreement)
    required = required_fidelity(backend, precision, least, max_kl, calibrated=calibration is not None)
    if required.explicit and not certify:
        raise ExportError("an agreement or a KL is asked for, but the export is to go without the comparison")
    observed = None if calibration is None else read_calibration(calibration)
    planned = (backend, precision, precisions.get("draft"), observed, draft_vocab, keep, cache_precision)
    recipe = plan(*planned)
    bundle = bundle.absolute()
    warnings: list[str] = []
    with disk_errors(bundle):
        check_destination(bundle)
    if engines := engines_of(bundle):
        warnings.append(
            f"the engines {', '.join(engines)} were built from the older bundle and go with it; build them again with "
            "eagle-export engines"
        )
    with _progress() as progress, ExitStack() as until_end:
        task = progress.add_task("reading checkpoints", total=None)
        pair = open_pair(target, draft)
        check_settings(pair, backend, cache_precision, draft_vocab)
        warnings += notes_on(pair, backend)
        if "tokenizer.json" not in pair.texts:
            warnings.append(
                f"{target} has no tokenizer.json; the bundle takes and returns token ids, no text; {SAVE_IT}"
            )
        top_k = min(TOP_K, draft_vocab or TOP_K) if draft_top_k is None else draft_top_k
        if pair.head is not None:
            top_k = min(top_k, pair.head.config.draft_vocab_size)
        report = partial(_show_step, progress, task)
        choice: Choice | None = None
        weighed = KEPT if precision == AUTO else 0
        head_check: HeadCheck | None = None
        records = record and observed is None and recorded_from_source(backend, precision)
        way, notes = how_to_record(pair, calibrate) if records else (None, [])
        warnings += notes
        key = fingerprint(
            [path for path in (target, draft, calibration, calibrate) if path is not None],
            {
                "planned": repr((backend, precisions, draft_vocab, keep, cache_precision, aim, size, record, way)),
                "k": top_k,
            },
        )
        graphs: dict[str, ir.Model] = {}
        layers: tuple[Layer, ...] = ()
        reading: SourceReading | None = None
        other: OtherHalf | None = None
        if not holds_refused(work_folder(bundle), key):
            requirement = requirement_of(
                pair, backend, precisions, way, bundle, calibrated=observed is not None, certify=certify
            )
            requirement.check(bundle)
            if not weighed and certify and requirement.seconds > LONG:
                weighed = FORESEEN
            reading = reading_of_pair(pair) if certify and way == "whole" else None
            if way is not None:
                keep_blocks_apart()  # until inputs are recorded
            if way == "whole" and calibrate is None:
                other = until_end.enter_context(other_half(pair, bundle, *_in_both(reading)))
            progress.update(task, description="tracing")  # refuses damaged checkpoints before anything is written
            graphs = build_graphs(pair, recipe.traced, top_k, routed=routes_experts(backend))
            if requirement.seconds > NOTABLE:
                print_line("eagle-export", requirement.line(bundle))
            layers = layers_of(graphs["target"])
            give_back()
        with (
            disk_errors(bundle, GOES_ON),
            written(bundle, lambda older: check_older(older, bundle)) as folder,
            kept(folder.parent, key) as finished,
        ):
            manifest = accepted(finished, folder, required if certify else None)
            if manifest is None:
                recorded, with_inputs = None, partial(plan, *planned)
                smoothing, kl = dict[str, str](), None
                if records:
                    missing = notes
                    if way is not None:
                        asked = None if reading is None else reading.asked()
                        recorded, missing = recorded_inputs(
                            pair, calibrate, way, finished, report, asked, other=other, weighed=weighed
                        )
                        warnings += missing
                        give_back()
                        keep_blocks_together()
                    with_inputs = partial(with_inputs, recorded=None if recorded is None else recorded.inputs)
                    recipe = with_inputs()
                    if precision == AUTO:
                        if recorded is None:
                            raise ExportError(f"layers cannot be chosen: {missing[0]}")
                        choice = choose(graphs, lambda grids: with_inputs(grids=grids), recorded, budget, report)
                        recipe, smoothing, kl = choice.plan, choice.done, choice.kl
                    elif recorded is not None and recorded.importance:
                        smoothing, first = smoothed_first(graphs["target"], recipe)
                        recipe = plan_after(first, recipe)
                        kl = foreseen_kl(graphs["target"], recipe, recorded)
                    if kl is not None and certify and kl > required.limits.kl:
                        print_line("eagle-export", BEYOND.format(kl, required.limits.kl))
                progress.update(task, description="choosing scales")
                decisions, natives = _rewritten(recipe.passes, graphs)
                decisions["target"] = smoothing | decisions["target"]
                total = sum(num_bytes(graph) for graph in graphs.values())
                check_space(bundle.parent, total - folder_bytes(finished))
                progress.update(task, total=total, completed=0)
                hashes = _write(folder, pair.texts, graphs, natives, finished, partial(_show_tensor, progress, task))
                if pair.head is not None and pair.head.config.markov_rank:
                    write_transitions(folder / TRANSITIONS, pair.head.checkpoint, pair.head.d2t)
                manifest = _manifest(
                    folder, pair, graphs, precisions, decisions, top_k, draft_vocab, hashes, sources or {}
                )
                manifest = _with_native(manifest, natives)
                (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
                # Frees weights and recorded inputs before the source's weights are loaded. Graphs refer to themselves.
                del graphs, natives, recipe, with_inputs, recorded
                give_back()
                if certify:
                    try:
                        manifest, head_check, shortfalls = certified(
                            pair, folder, manifest, layers, required, report, reading
                        )
                    except FidelityError as error:
                        if error.certificate is not None:
                            keep_refused(folder, error.certificate, manifest, finished)
                        raise
                    warnings += shortfalls
                    (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
            elif (marked := shortfall(manifest)) is not None:
                warnings.append(f"the bundle is marked: {marked}")
            written_bytes = folder_bytes(folder)
    shared = shared_weights(manifest)
    return Exported(bundle, manifest, shared, written_bytes, tuple(warnings), choice.rows if choice else (), head_check)


def _in_both(
    reading: SourceReading | None,
) -> tuple[Asked | None, Callable[[Path], None], Callable[[Path], None]]:
    """Returns what a copy of the process asks its source, how it leaves that in a folder, and how this one takes it."""
    if reading is None:
        return None, lambda folder: None, lambda folder: None
    return reading.asked(), reading.leave, reading.take


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


def _write(
    folder: Path,
    texts: Mapping[str, bytes],
    graphs: Mapping[str, ir.Model],
    natives: Mapping[str, ir.Model],
    finished: Path,
    report: Report,
) -> dict[str, str]:
    """Writes everything but the manifest. natives: other forms of graphs, over the same weights. finished: where
    weights of an earlier run may be. Returns the SHA-256 of the files of weights, by their names in the bundle."""
    hashes, before = {}, 0
    for name, graph in graphs.items():
        path = folder / GRAPH_FILES[name]
        path.parent.mkdir()
        hashes[GRAPH_FILES[name] + DATA_SUFFIX] = save(graph, path, partial(_after, report, before), finished)
        before += num_bytes(graph)
    for name, native in natives.items():
        save_over(native, graphs[name], folder / NATIVE_FILES[name], GRAPH_FILES[name])
    for name, content in texts.items():
        (folder / name).write_bytes(content)
    return hashes


def _after(report: Report, before: int, name: str, done: int) -> None:
    report(name, before + done)


def shared_weights(manifest: Manifest) -> tuple[str, ...]:
    """Names of the weights, without small constants, that are the same in both graphs. What is rounded in blocks is
    not: a target's table is rounded as its LM head, a head's as a table."""
    if manifest.head is None:
        return ()
    target, head = manifest.target.graph, manifest.head.graph
    rounded = tuple(f"{name}." for graph in (target, head) for name, done in graph.recipe.items() if "blocks" in done)
    same = (name for name, spec in target.weights.items() if spec == head.weights.get(name) and "." in name)
    return tuple(sorted(name for name in same if not name.startswith(rounded)))


def _manifest(
    folder: Path,
    pair: Pair,
    graphs: Mapping[str, ir.Model],
    precisions: dict[str, str],
    decisions: Mapping[str, dict[str, str]],
    top_k: int,
    draft_vocab: int | None,
    hashes: Mapping[str, str],
    sources: Mapping[str, str],
) -> Manifest:
    config = pair.config
    specs = {name: graph_spec(GRAPH_FILES[name], graph, decisions[name]) for name, graph in graphs.items()}
    head = None if pair.head is None else _head_spec(pair.head.config, specs["draft"], top_k, draft_vocab)
    trees = TreeDefaults()
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return Manifest(
        schema_version=SCHEMA_VERSION,
        precision=precisions,
        target=TargetSpec(
            model_type=str(config.model_type),
            hidden_size=int(config.hidden_size),
            vocab_size=int(config.vocab_size),
            num_layers=int(config.num_hidden_layers),
            num_kv_heads=pair.num_kv_heads,
            head_dim=pair.head_dim,
            context=pair.context,
            eos_token_ids=pair.generation.eos,
            graph=specs["target"],
        ),
        head=head,
        tree_defaults=replace(trees, draft_top_k=min(trees.draft_top_k, top_k)),
        sampling=pair.generation.sampling,
        tools={name: metadata.version(name) for name in TOOLS} | dict(sources),
        files={name: hashes.get(name) or file_sha256(files[name]) for name in sorted(files)},
        certificate=None,
    )


def _with_native(manifest: Manifest, natives: Mapping[str, ir.Model]) -> Manifest:
    """natives: by the graphs' names."""

    def with_native(name: str, graph: GraphSpec) -> GraphSpec:
        if name not in natives:
            return graph
        operators = {node.op_type for node in natives[name].graph if node.domain == DOMAIN}
        return replace(graph, native=NativeSpec(NATIVE_FILES[name], OPERATORS, tuple(sorted(operators))))

    target, head = manifest.target, manifest.head
    target = replace(target, graph=with_native("target", target.graph))
    head = None if head is None else replace(head, graph=with_native("draft", head.graph))
    return replace(manifest, target=target, head=head)


def _head_spec(config: HeadConfig, graph: GraphSpec, top_k: int, draft_vocab: int | None) -> HeadSpec:
    return HeadSpec(
        kind=config.kind,
        hidden_size=config.hidden_size,
        draft_vocab_size=config.draft_vocab_size if draft_vocab is None else draft_vocab,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        top_k=top_k,
        taps=config.taps,
        block=None if config.block is None else config.block.spec(config.state_size),
        graph=graph,
    )


def _show_step(progress: Progress, task: TaskID, description: str) -> None:
    """Shows a step of unknown length."""
    progress.update(task, description=description, total=None)


def _show_tensor(progress: Progress, task: TaskID, name: str, done: int) -> None:
    """Shows which tensor is being written, and the bytes of those before it."""
    progress.update(task, description=f"writing weights: {name}", completed=done)


def _progress() -> Progress:
    """A progress bar on stderr, hidden if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True)
