"""Conversions of a source to the peers' formats, kept in a work folder under the source's sum."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from eagle_runtime.base.errors import RequestError, why
from eagle_tools.peers.engine import GENAI, LLAMA_CPP, OPENVINO, Format
from eagle_tools.peers.source import Source

PACKAGES = {LLAMA_CPP: "llama-cpp-python", GENAI: "onnxruntime-genai", OPENVINO: "openvino"}
MAKING, DAY = "making-", 86400.0  # name of a folder of one process; seconds
WEIGHTS = (".gguf", ".onnx", ".data", ".bin", ".xml")  # of the files that count as the model's size


@dataclass(frozen=True, slots=True)
class Converted:
    """A source in a format. path: what the engine loads. stored: bytes of its weights and graph."""

    format: Format
    path: Path
    stored: int


def convert(
    source: Source, formats: Sequence[Format], work: Path, threads: int, say: Callable[[str], None]
) -> list[Converted]:
    """Returns the source in each format; what is in the work folder already is not made again. say: called with a
    sentence before each longer step. Raises RequestError."""
    folder = work / source.digest()
    with _own_folder(folder) as own:
        return [_converted(source, form, folder, own, threads, say) for form in formats]


def _converted(
    source: Source, form: Format, folder: Path, own: Path, threads: int, say: Callable[[str], None]
) -> Converted:
    """own: a folder of this process, for what is not whole yet, and for the source as GGUF."""
    out = folder / f"{form.engine}-{metadata.version(PACKAGES[form.engine])}-{form.name}"
    path = out / "model.gguf" if form.engine == LLAMA_CPP else out
    if not out.is_dir():
        part, plain = own / out.name, own / "source.gguf"
        part.mkdir()
        if form.engine == LLAMA_CPP:
            from eagle_tools.peers.gguf_file import write_gguf
            from eagle_tools.peers.quantise import quantise

            if not plain.exists():
                say(f"writing {source.folder} as GGUF")
                if source.is_gguf:
                    quantise(source.folder, plain, "f32", threads)
                else:
                    write_gguf(source, plain)
            say(f"quantising to {form}")
            quantise(plain, part / path.name, form.name, threads)
        else:
            from eagle_tools.peers import genai_build, openvino_build

            say(f"converting {source.folder} to {form}")
            (genai_build if form.engine == GENAI else openvino_build).build(source, part, form.name)
        try:
            part.rename(out)
        except OSError:
            if not out.is_dir():  # else another process was first
                raise
    stored = sum(file.stat().st_size for file in out.rglob("*") if file.suffix in WEIGHTS)
    return Converted(form, path, stored)


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """Yields a new folder in `folder`, which is gone at the end; those of processes that were killed go after a day."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{MAKING}*"):
            with suppress(FileNotFoundError):  # another process has ended meanwhile
                if time.time() - left.stat().st_mtime > DAY:
                    shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=MAKING, dir=folder, ignore_cleanup_errors=True) as own:
            yield Path(own)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written ({why(error)}); give another --peer-folder") from None
