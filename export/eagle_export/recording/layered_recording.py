"""Records the inputs of a target's linear layers where the whole target does not fit into the memory.

The target runs layer by layer (layered.py). What a layer's inputs were is written to a folder before the next layer
runs, and read again when its weights are rounded: the inputs of all layers take gigabytes. A recording that was stopped
goes on after the last layer that is finished. Text of the target's own cannot be sampled, since each token would read
all weights from the disk; without a file, the package's text is read.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_calib.calibration import Observed
from eagle_calib.texts import read_windows
from eagle_export.graphs.eager import eager_head, weights_for_tokens
from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.recording.continuations import run_errors
from eagle_export.recording.layered import LayeredModel, batches
from eagle_export.recording.self_calibration import MAX_TOKENS, WINDOW, HeadInputs, LayerInputs, Listed, Recorded
from eagle_export.recording.source_text import text_starts
from eagle_runtime.base.files import replacing
from eagle_runtime.text.tokenizer import Text

STATE, HIDDEN = "state.json", "hidden.npz"
HEAD_TOKENS = 256  # that a head reads at once: more take memory for their logits
TEXTS, LENGTH = 24, 96  # of the package's text, where the target does not write its own: windows, and tokens of each


@dataclass(frozen=True, slots=True)
class Spilled:
    """Inputs in files of a folder. names: weight name -> name of its file."""

    folder: Path
    names: dict[str, str] = field(default_factory=dict)

    def add(self, observed: Mapping[str, Observed]) -> None:
        """Writes inputs; names that share an object share a file."""
        written: dict[int, str] = {}
        for name, seen in observed.items():
            if id(seen) not in written:
                written[id(seen)] = f"{name}.npz"
                arrays = {"rows": np.array(seen.rows), "largest": seen.channel_absmax, "sample": seen.sample}
                _write(self.folder / f"{name}.npz", arrays)
            self.names[name] = written[id(seen)]

    def listed(self) -> Listed:
        """The inputs, each read when it is asked for."""

        def read(file: str) -> Observed:
            arrays = _read(self.folder / file)
            return Observed(int(arrays["rows"]), arrays["largest"], arrays["sample"])

        return Listed(self.names, read)


def texts_to_read(text: Text, data: Path | None, vocab: int, longest: int) -> list[list[int]]:
    """Returns windows of token ids of the file, or of the package's text. Raises CalibrationError for an empty file."""
    if data is not None:
        return read_windows(data, text, vocab, min(WINDOW, longest), MAX_TOKENS)
    length = min(LENGTH, longest)
    return text_starts(text, vocab, TEXTS, length, length, MAX_TOKENS)


def observe_layers(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    folder: Path,
    head: HeadPart | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> Recorded:
    """Returns what the checkpoint computes for windows of token ids; the inputs are in `folder`, which may hold what an
    earlier call had recorded of the same checkpoint and windows when it was stopped.

    head, report: as for observe_source. Raises ExportError if transformers cannot run the checkpoint."""
    folder.mkdir(exist_ok=True)
    taps = () if head is None else head.config.taps
    with run_errors(checkpoint, " layer by layer", OSError):
        model = LayeredModel(checkpoint, windows)
        spilled, tapped = _resume(folder, model)
        if model.next == 0 and 0 in taps:
            _keep_tap(folder, model, tapped)
        while model.next < len(model.layers):
            number, count = model.next, len(model.layers)
            of_layer = LayerInputs(model.layers[number], f"model.layers.{number}.", model.family.scorers)
            for text in model.run_layer():
                report(f"recording inputs (layer {number + 1} of {count}, text {text + 1} of {len(model.hidden)})")
            spilled.add(of_layer.observed())
            if model.next in taps:
                _keep_tap(folder, model, tapped)
            _save(folder, model, spilled, tapped)
        inputs = LayerInputs(torch.nn.Identity())
        ends = [model.last_hidden(text) for text in range(len(windows))]
        for end in ends:
            inputs.add(LM_HEAD, end)
        spilled.add(inputs.observed())
        if model.config.tie_word_embeddings:
            spilled.names[EMBEDDING] = spilled.names[LM_HEAD]
        if head is not None:
            spilled.add(_head_inputs(checkpoint, head, windows, tapped, ends))
        return Recorded(spilled.listed())


@torch.inference_mode()
def _head_inputs(
    checkpoint: Checkpoint,
    part: HeadPart,
    windows: Sequence[Sequence[int]],
    tapped: Mapping[int, list[Tensor]],
    ends: Sequence[Tensor],
) -> Listed:
    """What a head's layers read. An LM head that it borrows, whose output is of no use, has one row."""
    tokens = [token for window in windows for token in window]
    weights, embedding = weights_for_tokens(part, checkpoint, tokens, lm_head=False)
    head = eager_head(part.config, weights, embedding)
    if isinstance(head, Eagle1Head):
        head.lm_head.weight = torch.nn.Parameter(embedding.rows[:1], requires_grad=False)
    inputs = HeadInputs(part, head)
    kept = {**tapped, -1: ends}
    for texts in batches([len(window) for window in windows], HEAD_TOKENS):
        hidden = {tap: torch.cat([states[text] for text in texts]) for tap, states in kept.items()}
        inputs.read(torch.tensor([windows[text] for text in texts]), hidden)
    return inputs.observed()


def _keep_tap(folder: Path, model: LayeredModel, tapped: dict[int, list[Tensor]]) -> None:
    tapped[model.next] = list(model.hidden)
    _write(folder / f"tap{model.next}.npz", _numbered(model.hidden))


def _save(folder: Path, model: LayeredModel, spilled: Spilled, tapped: Mapping[int, list[Tensor]]) -> None:
    """Notes how far the recording is: first what the next layer reads, then its number."""
    hidden = f"{model.next % 2}-{HIDDEN}"  # not over the one that the state in place names
    _write(folder / hidden, _numbered(model.hidden))
    state = {"next": model.next, "hidden": hidden, "files": spilled.names, "taps": sorted(tapped)}
    with replacing(folder / STATE, folder / f"{STATE}.new") as new:
        new.write_text(json.dumps(state), encoding="utf-8")


def _resume(folder: Path, model: LayeredModel) -> tuple[Spilled, dict[int, list[Tensor]]]:
    """Sets a model to where an earlier recording was stopped; to its first layer if there is none, or one of its files
    is damaged. Returns the inputs and the taps that are there."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        tapped = {tap: _tensors(folder / f"tap{tap}.npz", len(model.hidden)) for tap in state["taps"]}
        for file in set(state["files"].values()):
            _read(folder / file)
        hidden = _tensors(folder / state["hidden"], len(model.hidden))
        model.hidden, model.next = hidden, int(state["next"])
        return Spilled(folder, state["files"]), tapped
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return Spilled(folder), {}


def _numbered(hidden: Sequence[Tensor]) -> dict[str, Any]:
    return {str(text): each.numpy() for text, each in enumerate(hidden)}


def _tensors(path: Path, count: int) -> list[Tensor]:
    arrays = _read(path)
    return [torch.from_numpy(arrays[str(text)]) for text in range(count)]


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(path, allow_pickle=False, **dict(arrays))


def _read(path: Path) -> dict[str, Any]:
    """Raises what NumPy raises for a damaged file: its parts have checksums."""
    with np.load(path, allow_pickle=False) as file:
        return dict(file)
