"""Runs text through the runtime's own loop, records the inputs of linear layers, and writes the calibration.

Each window of text is read as a prompt, then a few tokens are decoded with drafted trees. So each graph sees the inputs
that it will have in use: the target prompts and trees, the head committed rows and the levels of growing trees. Without
a head the trees are chains of n-gram matches in the text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eagle_calib.calibration import ARRAYS_NAME, GRAPHS, JSON_NAME, Graph, Input, Source, Tokens, write_calibration
from eagle_calib.errors import CalibrationError
from eagle_calib.folder import clear_leftovers, written
from eagle_calib.observe import ObservingSession
from eagle_calib.texts import read_windows
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.listed_files import read_graph, read_text_file, verify_hashes
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import HeadOfText
from eagle_runtime.core.session import Session
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.heads import head_of
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter
from eagle_runtime.drafting.transitions import Transitions
from eagle_runtime.opening.loading import MAX_THREADS
from eagle_runtime.opening.opened import transitions_of
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.text.tokenizer import Text

WINDOW = 256  # tokens per prompt
NEW_TOKENS = 32  # tokens decoded after each
MAX_TOKENS = 8192  # default of the text's tokens
TOOLS = ("eagle-edge", "numpy", "onnx", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A finished calibration: inputs of the linear layers per graph; "draft" only if there is a head."""

    tokens: Tokens
    graphs: Mapping[Graph, Sequence[Input]]


def calibrate(
    bundle: Path, folder: Path, *, data: Path | None = None, threads: int | None = None, max_tokens: int = MAX_TOKENS
) -> Calibrated:
    """Runs an fp32 bundle on the text of a file (None: the package's text) and writes a calibration to `folder`.

    max_tokens: tokens of the text to read. threads: threads of a forward pass. An existing calibration is replaced at
    the end; any other existing folder is refused. Raises CalibrationError, BundleError or BackendError. Then, and when
    interrupted, no files are left."""
    if max_tokens < 1:
        raise CalibrationError(f"tokens is {max_tokens}, but must be 1 or more")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise CalibrationError(f"threads is {threads}, but must be 1 to {MAX_THREADS}")
    manifest = read_manifest(bundle)
    for graph, precision in manifest.precision.items():
        if precision != "fp32":
            raise CalibrationError(f"{bundle}: the {graph} is {precision}; export it in fp32 first, calibrate that")
    if manifest.head is not None and manifest.head.form.keyless:
        raise CalibrationError(
            f"{bundle} has {manifest.head.form.title}, whose inputs are not recorded; calibrate a "
            "bundle of its target alone"
        )
    folder = folder.absolute()
    check_place(folder, bundle)
    window = min(WINDOW, max(1, manifest.target.context // 2))
    text = Text(bundle, partial(read_text_file, bundle, manifest))
    windows = read_windows(data, text, manifest.target.vocab_size, window, max_tokens)
    verify_hashes(bundle, manifest)
    transitions = transitions_of(bundle, manifest)
    for model in manifest.models.values():
        read_graph(bundle, manifest, model.graph.file)  # it may name no file that was not hashed
    with contextlib.ExitStack() as stack:
        sessions = {
            name: stack.enter_context(ObservingSession(bundle / model.graph.file, model.graph, threads))
            for name, model in manifest.models.items()
        }
        advance = stack.enter_context(_progress(len(windows)))
        counts = np.zeros(manifest.target.vocab_size, np.int64)
        tokens = decode_windows(
            manifest, sessions["target"], sessions.get("draft"), windows, counts, advance, transitions
        )
        graphs = {graph: sessions[graph].observed() for graph in GRAPHS if graph in sessions}
    source = Source({name: _version(name) for name in TOOLS}, file_sha256(bundle / MANIFEST_NAME), tokens)
    try:
        with written(folder, lambda older: check_older(older, folder)) as new:
            write_calibration(new, source, graphs, counts.astype(np.float32))
    except OSError as error:
        reason = error.strerror or str(error)
        raise CalibrationError(f"{folder} could not be written ({reason}); no files were left") from None
    return Calibrated(tokens, graphs)


def check_place(folder: Path, bundle: Path) -> None:
    """Raises CalibrationError unless a calibration can be written or replaced at `folder`."""
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise CalibrationError(f"{folder} lies in the bundle, which stays as it is; choose another place")
    if not folder.parent.is_dir():
        raise CalibrationError(f"{folder.parent} does not exist; create it first")
    if not os.access(folder.parent, os.W_OK):
        raise CalibrationError(f"{folder.parent} cannot be written; choose another place")
    clear_leftovers(folder.parent)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CalibrationError(f"{folder} exists and is not a folder; choose another name")
    if folder.is_dir():
        check_older(folder, folder)


def check_older(older: Path, folder: Path) -> None:
    """Raises CalibrationError unless `older`, which has or had the name `folder`, is empty or holds a calibration and
    no other file."""
    entries = list(older.iterdir())
    names = {path.name for path in entries}
    ours = {JSON_NAME} <= names <= {JSON_NAME, ARRAYS_NAME} and all(path.is_file() for path in entries)
    if names and not ours:
        raise CalibrationError(f"{folder} exists and holds other files; choose another name")


def decode_windows(
    manifest: Manifest,
    target_session: Session,
    head_session: Session | None,
    windows: Sequence[Sequence[int]],
    counts: npt.NDArray[np.int64],
    advance: Callable[[], None] = lambda: None,
    transitions: Transitions | None = None,
) -> Tokens:
    """Reads each window and decodes after it, greedily with drafts, up to NEW_TOKENS or an end-of-sequence token;
    `advance` is called after each window. Adds each token to `counts` [V]. transitions: of a block head. Returns the
    rows that the target computed."""
    longest = max(map(len, windows)) + NEW_TOKENS + manifest.tree_defaults.total_token
    capacity = min(manifest.target.context, longest)
    target = Target(target_session, capacity)
    head: HeadOfText | None = None
    new_drafter: Callable[[], Drafter] = LookupDrafter
    if head_session is not None:
        shape = _default_tree(manifest, head_session)
        head = head_of(head_session, manifest, capacity, shape.scratch, transitions)
        new_drafter = partial(EagleDrafter, head, shape)
    state = DecodingState(target, head)
    stop = frozenset(manifest.target.eos_token_ids)
    verified = 0
    for window in windows:
        new: list[int] = []
        sampler = Sampler(SamplingParams(), window, manifest.target.vocab_size)
        state.forget()
        for cycle in islice(generate(state, new_drafter(), sampler, window), 1, None):  # the first is the prompt's
            verified += cycle.tree.num_nodes
            new += cycle.step.tokens.tolist()
            if len(new) >= NEW_TOKENS or not stop.isdisjoint(new):
                break
        np.add.at(counts, [*window, *new], 1)
        advance()
    return Tokens(sum(map(len, windows)), verified)


def _default_tree(manifest: Manifest, session: Session) -> DynamicTree:
    """Returns the default dynamic tree of the bundle."""
    defaults = manifest.tree_defaults
    top_k = min(defaults.draft_top_k, int(session.outputs["token_ids"].shape[2]))
    return DynamicTree(defaults.total_token, defaults.depth, top_k)


@contextlib.contextmanager
def _progress(windows: int) -> Iterator[Callable[[], None]]:
    """Yields a function that advances a progress bar on stderr by one window; hidden if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("observing", total=windows)
        yield lambda: progress.advance(task)


def _version(name: str) -> str:
    """Version of an installed distribution."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"
