"""What a comparison asks of another engine, and the names of the engines and their formats.

V: vocabulary. R: rows of a forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import RequestError

LLAMA_CPP, GENAI, OPENVINO = "llama.cpp", "onnxruntime-genai", "openvino"
PLAIN, LOOKUP = "plain", "lookup"
MODES = {LLAMA_CPP: (PLAIN, LOOKUP), GENAI: (PLAIN, LOOKUP), OPENVINO: (PLAIN,)}
MODULES = {
    LLAMA_CPP: ("llama_cpp", "gguf", "safetensors", "torch"),
    GENAI: ("onnxruntime_genai", "transformers", "torch"),
    OPENVINO: ("openvino", "nncf", "transformers", "torch"),
}
INSTALL = "pip install 'eagle-edge[cpu,export,bench,peers]'"

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Format:
    """A way in which an engine stores weights. name: as the engine calls it."""

    engine: str
    name: str

    def __str__(self) -> str:
        return f"{self.engine}/{self.name}"


FORMATS = (
    *(Format(LLAMA_CPP, name) for name in ("q8_0", "q4_0", "q4_K_M")),
    *(Format(engine, name) for engine in (GENAI, OPENVINO) for name in ("int8", "int4")),
)
# Those of comparisons of precision: slower forms of four bits that are closer to the source are among them.
ALL_FORMATS = (*FORMATS, Format(LLAMA_CPP, "iq4_nl"), Format(LLAMA_CPP, "iq4_xs"))


class Decoding(Protocol):
    """One greedy generation, which end-of-sequence tokens do not end. passes: number of forward passes after the
    prompt's."""

    @property
    def passes(self) -> int: ...

    def advance(self) -> list[int]:
        """Returns the tokens of the next forward pass, the first time of the prompt's. With a draft of the engine's own
        these may be several, or, where the engine hides its passes, one of several that it computed before."""


class Engine(Protocol):
    """A loaded model in one format."""

    def decoding(self, mode: str, token_ids: Sequence[int], max_new_tokens: int) -> Decoding:
        """Returns a generation. Those of one engine may take turns. mode: one of the engine's MODES."""

    def score(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        """Yields the logits after each token in arrays [R, V]."""

    def pass_seconds(self, context: int, rows: int, count: int) -> list[float]:
        """Returns the seconds of each of `count` forward passes of `rows` tokens after `context` tokens."""


def format_of(name: str) -> Format:
    """Returns the format called ENGINE/FORMAT. Raises RequestError for an unknown name."""
    for known in ALL_FORMATS:
        if str(known) == name:
            return known
    raise RequestError(f"peer {name!r} is unknown; there is {', '.join(map(str, ALL_FORMATS))}")


def formats_of(names: Sequence[str] | None, usual: Sequence[Format], command: str) -> tuple[Format, ...]:
    """Returns the formats that a command compares: those of `names`, or the usual ones that are installed;
    those left out are said on stderr. Raises RequestError for an unknown name."""
    if names is not None:
        return tuple(dict.fromkeys(format_of(name) for name in names))
    return installed_formats(usual, lambda line: print(f"{command}: {line}", file=sys.stderr))


def installed_formats(formats: Sequence[Format], say: Callable[[str], None]) -> tuple[Format, ...]:
    """Returns the formats of engines that are installed, and says which engines are not. Where none is, returns all, of
    which check_installed names what is missing."""
    there = tuple(form for form in formats if missing(form.engine) is None)
    left_out = dict.fromkeys(form.engine for form in formats if form not in there)
    for engine in left_out if there else ():
        say(f"{engine} is not compared: it needs {missing(engine)!r}; {INSTALL}")
    return there or tuple(formats)


def check_installed(engine: str) -> None:
    """Raises RequestError unless an engine's modules are installed."""
    if (module := missing(engine)) is not None:
        raise RequestError(f"the comparison with {engine} needs {module!r}; {INSTALL}")


def missing(engine: str) -> str | None:
    """Returns the first module that is not installed of those that convert to an engine's formats and decode."""
    return next((module for module in MODULES[engine] if find_spec(module) is None), None)
