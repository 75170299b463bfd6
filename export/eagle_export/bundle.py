"""Write a bundle: graphs, weights, tokenizer files and manifest, beside the destination and renamed when complete."""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import onnx_ir as ir
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_export.checkpoint import read_json
from eagle_export.errors import ExportError
from eagle_export.pair import Pair, build_graphs, open_pair
from eagle_export.recipes import apply, passes_for
from eagle_export.weights import num_bytes, save
from eagle_runtime.errors import BundleError
from eagle_runtime.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    GraphSpec,
    HeadSpec,
    Manifest,
    TargetSpec,
    TensorSpec,
    TreeDefaults,
    file_sha256,
)
from eagle_runtime.text import Text

TARGET_FILE, DRAFT_FILE = "target/model.onnx", "draft/model.onnx"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TOOLS = ("eagle-edge", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export made. shared: weights that both graphs hold under one name. size: bytes on disk."""

    bundle: Path
    manifest: Manifest
    shared: tuple[str, ...]
    size: int
    warnings: tuple[str, ...]


def export(
    target: Path,
    draft: Path,
    bundle: Path,
    *,
    precision: str = "fp32",
    draft_precision: str | None = None,
    draft_top_k: int = 10,
) -> Exported:
    """Export a target and a head (Hugging Face folders) as a bundle folder.

    precision: a key of recipes.CPU. draft_precision: of the head, None for the target's. draft_top_k: children
    per node that the head's graph computes, so the most a tree may ask for. An existing bundle is replaced in the end;
    any other existing folder is refused. Raises ExportError, and then, as when interrupted, leaves nothing behind."""
    if draft_top_k < 1:
        raise ExportError(f"draft top-k is {draft_top_k}, but must be 1 or more")
    precisions = {"target": precision, "draft": draft_precision or precision}
    traced, *passes = passes_for(precisions["target"], precisions["draft"])
    bundle = bundle.absolute()
    with _disk_errors(bundle):
        _check_destination(bundle)
    with _progress() as progress:
        task = progress.add_task("reading checkpoints", total=None)
        pair = open_pair(target, draft)
        texts = _read_texts(target)
        top_k = min(draft_top_k, pair.head_config.draft_vocab_size)
        progress.update(task, description="tracing target and head")
        graphs = build_graphs(pair, traced, top_k)
        decisions = [apply(steps, graph) for steps, graph in zip(passes, graphs, strict=True)]
        size = sum(num_bytes(graph) for graph in graphs)
        _check_space(bundle.parent, size)
        progress.update(task, description="writing weights", total=size, completed=0)
        with _folder_beside(bundle) as beside, _disk_errors(bundle):
            folder = beside / "new"
            folder.mkdir()
            _write(folder, texts, graphs, lambda n: progress.advance(task, n))
            manifest = _manifest(folder, pair, graphs, precisions, decisions, top_k)
            (folder / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
            total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            _move_into_place(folder, bundle, beside / "old")
    shared = shared_weights(manifest)
    warnings: tuple[str, ...] = ()
    if "tokenizer.json" not in texts:
        warnings = (f"{target} has no tokenizer.json; the bundle decodes token ids only (eagle-run --prompt-ids)",)
    return Exported(bundle, manifest, shared, total, warnings)


def _write(
    folder: Path, texts: Mapping[str, bytes], graphs: tuple[ir.Model, ir.Model], advance: Callable[[int], None]
) -> None:
    """Write everything but the manifest."""
    for name, graph in zip((TARGET_FILE, DRAFT_FILE), graphs, strict=True):
        (folder / name).parent.mkdir()
        save(graph, folder / name, advance)
    for name, content in texts.items():
        (folder / name).write_bytes(content)


def _read_texts(target: Path) -> dict[str, bytes]:
    """Tokenizer and template files, name -> content; what the runtime could not read is refused before the trace."""
    try:
        Text(target)
    except BundleError as error:
        raise ExportError(str(error)) from None
    texts = {}
    for name in TEXT_FILES:
        if not (target / name).is_file():
            continue
        try:
            texts[name] = (target / name).read_bytes()
            texts[name].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ExportError(f"{target / name} is not readable text ({error}); download it again") from None
    if "tokenizer_config.json" in texts and "chat_template.jinja" not in texts:
        template = _stored_template(read_json(target / "tokenizer_config.json").get("chat_template"))
        texts |= {"chat_template.jinja": template.encode()} if template is not None else {}
    return texts


def _stored_template(stored: object) -> str | None:
    """Older tokenizers keep the template, or several with names, inside tokenizer_config.json."""
    if isinstance(stored, list):
        named = [item for item in stored if isinstance(item, dict) and item.get("name") == "default"]
        stored = named[0].get("template") if named else None
    return stored if isinstance(stored, str) else None


def shared_weights(manifest: Manifest) -> tuple[str, ...]:
    """Weights, not small constants, that both graphs hold alike."""
    target, head = manifest.target.graph.weights, manifest.head.graph.weights
    return tuple(sorted(name for name in target if target[name] == head.get(name) and "." in name))


def _manifest(
    folder: Path,
    pair: Pair,
    graphs: tuple[ir.Model, ir.Model],
    precisions: dict[str, str],
    decisions: list[dict[str, str]],
    top_k: int,
) -> Manifest:
    config, head = pair.config, pair.head_config
    files = sorted(path for path in folder.rglob("*") if path.is_file())
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
            context=int(config.max_position_embeddings),
            eos_token_ids=pair.eos,
            graph=_graph_spec(TARGET_FILE, graphs[0], decisions[0]),
        ),
        head=HeadSpec(
            kind=head.kind,
            hidden_size=head.hidden_size,
            draft_vocab_size=head.draft_vocab_size,
            num_layers=head.num_layers,
            num_kv_heads=head.num_kv_heads,
            head_dim=head.head_dim,
            top_k=top_k,
            taps=head.taps,
            graph=_graph_spec(DRAFT_FILE, graphs[1], decisions[1]),
        ),
        tree_defaults=TreeDefaults(draft_top_k=min(TreeDefaults().draft_top_k, top_k)),
        tools={name: metadata.version(name) for name in TOOLS},
        files={path.relative_to(folder).as_posix(): file_sha256(path) for path in files},
    )


def _graph_spec(file: str, model: ir.Model, decisions: dict[str, str]) -> GraphSpec:
    graph = model.graph
    return GraphSpec(
        file=file,
        inputs={str(value.name): _tensor_spec(value) for value in graph.inputs},
        outputs={str(value.name): _tensor_spec(value) for value in graph.outputs},
        weights={name: _tensor_spec(value) for name, value in graph.initializers.items()},
        recipe=decisions,
    )


def _tensor_spec(value: ir.Value) -> TensorSpec:
    assert value.shape is not None and value.dtype is not None
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(str(value.dtype.numpy()), shape)


def _check_destination(bundle: Path) -> None:
    if bundle.is_symlink() or (bundle.exists() and not bundle.is_dir()):
        raise ExportError(f"{bundle} exists and is no folder; choose another name")
    if bundle.is_dir() and any(bundle.iterdir()) and not (bundle / MANIFEST_NAME).is_file():
        raise ExportError(f"{bundle} exists and holds other files; choose another name")
    if not bundle.parent.is_dir():
        raise ExportError(f"{bundle.parent} does not exist; create it first")


def _check_space(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    needed += needed // 50 + (4 << 20)  # graphs, manifest, blocks that are not filled
    if free < needed:
        raise ExportError(
            f"{parent} has {free / 1e6:.0f} MB free, but the bundle may take {needed / 1e6:.0f} MB; free space first"
        )


@contextlib.contextmanager
def _folder_beside(bundle: Path) -> Iterator[Path]:
    """A temporary folder on the same disk, gone afterwards whatever happens."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{bundle.name}.", dir=bundle.parent))
    except OSError as error:
        raise ExportError(f"{bundle.parent} cannot be written ({error.strerror})") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _disk_errors(bundle: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # NumPy reports a write that was cut short without a number.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        what = "the disk is full" if full else error.strerror or str(error)
        raise ExportError(f"{bundle} could not be written ({what}); nothing was left behind") from None


def _move_into_place(folder: Path, bundle: Path, aside: Path) -> None:
    """Rename; an older bundle of that name steps aside first and comes back if the rename fails."""
    try:
        if bundle.exists():
            bundle.rename(aside)
        folder.rename(bundle)
    except BaseException:  # an interrupt may come between any two steps
        if aside.exists() and not bundle.exists():
            aside.rename(bundle)
        raise


def _progress() -> Progress:
    """A bar on stderr; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True)
