"""How the inputs of a target's layers are recorded where no calibration is given: with the whole model in the memory,
or layer by layer.

On a machine of few cores two processes share the whole model's: each lets the source write one half of the texts.
Threads of one product wait for each other in each of some thousand small operations, and where other programs run for
many times as long as they compute. Two processes of one thread each do not wait; one of them also traces the graphs.
The source is loaded before there are two, so that its weights are in the memory once.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from eagle_calib.calibration import Observed
from eagle_calib.folder import claimed
from eagle_calib.observe import SampleFile
from eagle_export.base.beside import Copy, meanwhile
from eagle_export.base.errors import ExportError
from eagle_export.base.memory import check_memory
from eagle_export.graphs.pair import Pair
from eagle_export.recording.layered_recording import Spilled, observe_layers, texts_to_read
from eagle_export.recording.packed import load_packed
from eagle_export.recording.self_calibration import SEQUENCES, Listed, Recorded, observe_source
from eagle_export.recording.source_text import Asked
from eagle_runtime.machine.host import cores, free_memory, threads_allowed

Way = Literal["whole", "layers"]
UNRECORDED = "weights are rounded without recorded inputs, which costs agreement: "
FEW = 3  # cores of a machine whose processes share a recording; more are used by the products of one
LEAST = 10**7  # numbers of a source for which a copy of the process is made
LARGE = 5 * 10**8  # numbers of a source whose texts take much longer than tracing, which is 8 to 12 s at any size
FOLDER = "inputs"  # for recorded inputs, in the folder of finished work


def shared_texts(numbers: int) -> tuple[list[int], list[int]]:
    """Returns the texts of this process, which also traces and measures the importance of columns, and of its copy,
    which also writes what is asked: so many that both end together, as measured with 135 M and 1.2 B numbers."""
    own, of = ((0, 2, 4, 6), 7) if numbers >= LARGE else ((0, 3), 5)
    first = [number for number in range(SEQUENCES) if number % of in own]
    return first, [number for number in range(SEQUENCES) if number not in first]


def how_to_record(pair: Pair, data: Path | None) -> tuple[Way, list[str]]:
    """Returns the way, and warnings that say why it is not the whole model on text of its own.

    data: a text that was asked for. Raises CalibrationError for one that cannot be used."""
    if data is not None:
        _windows(pair, data)
    try:
        check_memory(4 * pair.target.numbers)
    except ExportError as error:
        text = "the text that was given" if data is not None else "the package's text, not on text of the model's own"
        return "layers", [f"inputs were recorded layer by layer, on {text}: {error}"]
    return "whole", []


def recorded_inputs(
    pair: Pair,
    data: Path | None,
    way: Way,
    finished: Path,
    file: SampleFile,
    report: Callable[[str], None],
    asked: Asked | None = None,
    *,
    other: OtherHalf | None = None,
    weighed: int = 0,
) -> tuple[Recorded | None, list[str]]:
    """Returns what the source computes for a text, or None and a warning if it cannot run here.

    finished: a folder for what is to be read again if the export is stopped. file: for what is not, open as long as the
    inputs are read. asked: texts that the source writes meanwhile, if it is in the memory as a whole. other: a copy of
    the process that records one half. weighed: on about how many tokens the importance of columns is measured, which
    takes the whole model; 0 for none. Raises ExportError instead if the text was given, and CalibrationError for one
    that cannot be used."""
    text = pair.text
    try:
        if other is not None:
            return other.completed(finished, file, report, weighed=weighed), []
        if way == "whole":
            return observe_source(pair.target, text, data, pair.torch_head, report, asked, file, weighed=weighed), []
        return observe_layers(pair.target, _windows(pair, data), finished / FOLDER, pair.torch_head, report), []
    except ExportError as error:
        if data is not None:
            raise
        return None, [f"{UNRECORDED}{error}"]


def _windows(pair: Pair, data: Path | None) -> list[list[int]]:
    """As texts_to_read, of the pair's target."""
    return texts_to_read(pair.text, data, int(pair.config.vocab_size), int(pair.config.max_position_embeddings))


INPUTS, NAMES = "other half", "names.json"  # in the copy's folder: recorded inputs, and layer -> file there


@dataclass(frozen=True, slots=True)
class OtherHalf:
    """The copy of the process. pair: what it records. source: the loaded model, in a list that is emptied when it is no
    longer needed. asked: what the copy writes besides."""

    pair: Pair
    source: list[Any]
    copy: Copy
    asked: Asked | None

    def completed(self, finished: Path, file: SampleFile, report: Callable[[str], None], *, weighed: int) -> Recorded:
        """Records this half on one thread, and joins both. finished: for the other half's inputs; file: for this one's.
        Raises what observe_source does."""
        threads, (own, others) = torch.get_num_threads(), shared_texts(self.pair.target.numbers)
        torch.set_num_threads(1)
        try:
            first = _half(self.pair, self.source[0], own, file, report, weighed=weighed)
            report("waiting for the other half of the recording")
            folder = self.copy.result()
            if folder is None:  # it met an error, which this process meets again
                second = _half(self.pair, self.source[0], others, file, report, weighed=0).inputs
            else:
                shutil.rmtree(finished / INPUTS, ignore_errors=True)  # of an export that was stopped
                (folder / INPUTS).rename(finished / INPUTS)
                names = json.loads((folder / NAMES).read_text(encoding="utf-8"))
                second = Spilled(finished / INPUTS, names).listed()
                if self.asked is not None:
                    self.asked.take(folder)
        finally:
            self.source.clear()
            torch.set_num_threads(threads)
        return Recorded(_joined(first.inputs, second), first.importance)


@contextmanager
def other_half(pair: Pair, place: Path, asked: Asked | None) -> Iterator[OtherHalf | None]:
    """Starts a copy of the process, which records one half of a whole model's inputs and writes what is asked besides.

    place: of the bundle, next to which the copy writes. Yields None where one process is to record all: for a small
    source, on one core or many, or with too little memory for two."""
    numbers = pair.target.numbers
    few = sys.platform == "linux" and 2 <= (threads_allowed() or cores()) <= FEW
    free = free_memory()
    if not few or numbers < LEAST or (free is not None and free < 8 * numbers):
        yield None
        return

    try:
        source = [load_packed(pair.target)]
    except Exception:  # transformers raises many kinds; `observe_source` meets it again and says what it is
        yield None
        return

    def work(folder: Path) -> None:
        file = SampleFile(folder)  # until the copy ends
        inputs = _half(pair, source[0], shared_texts(numbers)[1], file, lambda step: None, asked, weighed=0).inputs
        spilled, files = Spilled(folder / INPUTS), dict[Any, str]()
        spilled.folder.mkdir()
        for name, origin in inputs.names.items():
            if origin not in files:
                spilled.add({name: inputs[name]})
                files[origin] = spilled.names[name]
            spilled.names[name] = files[origin]
        (folder / NAMES).write_text(json.dumps(spilled.names), encoding="utf-8")
        if asked is not None:
            asked.leave(folder)

    with claimed(place.with_name(f"{place.name}-recording")) as claim:
        (claim / "new").mkdir()
        with meanwhile(work, claim / "new") as copy:
            yield OtherHalf(pair, source, copy, asked)


def _half(
    pair: Pair,
    source: Any,
    share: Collection[int],
    file: SampleFile,
    report: Callable[[str], None],
    asked: Asked | None = None,
    *,
    weighed: int,
) -> Recorded:
    return observe_source(
        pair.target, pair.text, None, pair.torch_head, report, asked, file, weighed=weighed, share=share, model=source
    )


def _joined(*recorded: Mapping[str, Observed]) -> Listed:
    """Inputs of which two processes recorded one half each. A layer that one of them lacks, an expert that it hardly
    asked, has the other's."""

    def read(name: str) -> Observed:
        parts = [each[name] for each in recorded if name in each]
        return Observed(
            sum(each.rows for each in parts),
            np.max([each.channel_absmax for each in parts], axis=0),
            np.concatenate([each.sample for each in parts]),
        )

    return Listed({name: name for each in recorded for name in each}, read)
