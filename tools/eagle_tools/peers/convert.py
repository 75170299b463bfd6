"""Conversions of a source to the peers' formats, kept in a work folder under the source's sum."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from eagle_runtime.base.errors import RequestError
from eagle_tools.peers.engine import GENAI, LLAMA_CPP, OPENVINO, Format
from eagle_tools.peers.source import Source

PACKAGES = {LLAMA_CPP: "llama-cpp-python", GENAI: "onnxruntime-genai", OPENVINO: "openvino"}
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
    folder.mkdir(parents=True, exist_ok=True)
    plain = folder / "source.gguf"
    try:
        return [_converted(source, form, folder, plain, threads, say) for form in formats]
    finally:
        plain.unlink(missing_ok=True)  # as large as the source, and quickly written again


def _converted(
    source: Source, form: Format, folder: Path, plain: Path, threads: int, say: Callable[[str], None]
) -> Converted:
    out = folder / f"{form.engine}-{metadata.version(PACKAGES[form.engine])}-{form.name}"
    path = out / "model.gguf" if form.engine == LLAMA_CPP else out
    if not out.is_dir():
        with _written(out) as part:
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
    stored = sum(file.stat().st_size for file in out.rglob("*") if file.suffix in WEIGHTS)
    return Converted(form, path, stored)


@contextmanager
def _written(out: Path) -> Iterator[Path]:
    """Yields a new folder that takes the name `out` when the block ends without an error."""
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        yield part
        part.rename(out)
    except OSError as error:
        raise RequestError(f"{out} cannot be written ({error.strerror}); give another --peer-folder") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
