"""A source's greedy continuations of a few prompts, with their logits: what a bundle is compared with.

The source is the checkpoint, run by transformers on the CPU in fp32. Shapes: n tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from eagle_calib.errors import CalibrationError
from eagle_export.base.errors import ExportError
from eagle_export.base.quiet import quiet
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.recording.packed import load_packed
from eagle_export.recording.source_text import Asked, Writer
from eagle_runtime.base.errors import first_line
from eagle_runtime.base.tree import Float


@contextmanager
def run_errors(source: Path | Checkpoint, how: str = "", passing: type[Exception] = ExportError) -> Iterator[None]:
    """Raises ExportError for what transformers raises while it runs a checkpoint, and silences what it says of kernels
    that are not installed. how: in which way it runs, for the error. passing: errors that are left as they are."""
    try:
        with quiet("transformers"):
            yield
    except (ExportError, CalibrationError, passing):
        raise
    except Exception as error:  # transformers, safetensors and a full memory raise many kinds
        folder = source if isinstance(source, Path) else source.folder
        what = f"{type(error).__name__}: {first_line(error)}"
        raise ExportError(f"transformers does not run {folder}{how} ({what})") from None


def ask(source: Checkpoint, asked: Asked) -> None:
    """Lets a checkpoint write the texts that are asked for. Raises ExportError if transformers cannot run it, and what
    `asked.look` raises."""
    with run_errors(source):
        model = load_packed(source)
        _, written = Writer(model).write([], 0, (), asked.texts, asked.taps)
        asked.look(model, written)


def check_finite(source: Checkpoint, logits: Float) -> None:
    """Raises ExportError for logits of a source that are not finite."""
    if not np.isfinite(logits).all():
        raise ExportError(f"the logits of {source.folder} are not finite")
