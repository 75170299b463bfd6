"""How the inputs of a target's layers are recorded where no calibration is given: with the whole model in the memory,
or layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from eagle_export.base.errors import ExportError
from eagle_export.graphs.pair import Pair
from eagle_export.reading.source_memory import check_memory
from eagle_export.recording.layered_recording import observe_layers, texts_to_read
from eagle_export.recording.self_calibration import Recorded, observe_source
from eagle_export.recording.shared_recording import OtherHalf
from eagle_export.recording.source_text import Asked

Way = Literal["whole", "layers"]
UNRECORDED = "weights are rounded without recorded inputs, which costs agreement: "
FOLDER = "inputs"  # for recorded inputs, in the folder of finished work


def how_to_record(pair: Pair, data: Path | None) -> tuple[Way, list[str]]:
    """Returns the way, and warnings that say why it is not the whole model on text of its own.

    data: a text that was asked for."""
    try:
        check_memory(pair.target)
    except ExportError as error:
        text = "the text that was given" if data is not None else "the package's text, not on text of the model's own"
        return "layers", [f"inputs were recorded layer by layer, on {text}: {error}"]
    return "whole", []


def recorded_inputs(
    pair: Pair,
    data: Path | None,
    way: Way,
    finished: Path,
    report: Callable[[str], None],
    asked: Asked | None = None,
    *,
    other: OtherHalf | None = None,
    weighed: bool = False,
) -> tuple[Recorded | None, list[str]]:
    """Returns what the source computes for a text, or None and a warning if it cannot run here.

    finished: a folder for what is to be read again if the export is stopped. asked: texts that the source writes
    meanwhile, if it is in the memory as a whole. other: a copy of the process that records one half. weighed: whether
    the importance of columns is measured, which takes the whole model. Raises ExportError instead if the text was
    given, and CalibrationError for one that cannot be used."""
    text = pair.text
    try:
        if other is not None:
            return other.completed(finished, report, weighed=weighed), []
        if way == "whole":
            return observe_source(pair.target, text, data, pair.head, report, asked, finished, weighed=weighed), []
        windows = texts_to_read(text, data, int(pair.config.vocab_size), int(pair.config.max_position_embeddings))
        return observe_layers(pair.target, windows, finished / FOLDER, pair.head, report), []
    except ExportError as error:
        if data is not None:
            raise
        return None, [f"{UNRECORDED}{error}"]
