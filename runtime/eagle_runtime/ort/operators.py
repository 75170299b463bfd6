"""The native operators: loaded from the installed package eagle-edge-kernels and from nowhere else, since a library is
code, and checked before a bundle is run with them.

The checks are the version that bundles are made for, the processor's instruction sets, and one small graph whose
results are known."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_runtime.base.errors import BackendError
from eagle_runtime.bundle.graph import OPERATORS
from eagle_runtime.machine.kernels import INSTALL, PACKAGE, installed_kernels
from eagle_runtime.ort.texts import Announcement

WIDTH = 8  # of the head in the graph that is tried
OTHER = INSTALL.replace("installs it", "installs the one of this version")
KEY, VALUE, QUERY = 0.5, 2.0, 1.5  # exact in every type, so that the result is known


@dataclass(frozen=True, slots=True)
class Operators:
    """library: the shared library's path; None where it cannot be used, and then `reason` says why and what to do.
    instructions: the instruction set that it uses here. announce_texts: see Announcement; None without the library."""

    library: Path | None
    instructions: str = ""
    reason: str = ""
    announce_texts: Announcement | None = None


@functools.cache
def native_operators() -> Operators:
    """Returns the installed operators, checked once per process."""
    if (installed := installed_kernels()) is None:
        return Operators(None, reason=f"{PACKAGE} is not installed; {INSTALL}")
    if installed.damaged:
        return Operators(None, reason=f"{installed.library} is not the file that was installed; {INSTALL}")
    if installed.version != OPERATORS:
        return Operators(
            None,
            reason=f"{PACKAGE} has operators of version {installed.version}, and this runtime needs {OPERATORS}; "
            f"{OTHER}",
        )
    path = installed.library
    try:
        library = ctypes.CDLL(str(path))
        library.eagle_instruction_set.restype = ctypes.c_char_p
        instructions = library.eagle_instruction_set().decode()
        if instructions == "plain":
            return Operators(None, reason=f"{PACKAGE} has no kernels for this processor's instruction sets")
        announce, known = Announcement(library), _gives_known_numbers(path)
    except (OSError, AttributeError) as error:
        return Operators(None, reason=f"{PACKAGE} cannot be loaded ({str(error).splitlines()[0][:200]}); {OTHER}")
    except BackendError as error:
        return Operators(None, reason=f"{PACKAGE} does not run here ({error}); {OTHER}")
    if not known:
        return Operators(None, reason=f"{PACKAGE} computes other numbers than it should here; {OTHER}")
    return Operators(path, instructions, announce_texts=announce)


def _gives_known_numbers(library: Path) -> bool:
    """Whether a graph of one attention node does: a row that sees one committed key, a new one and itself."""
    from eagle_runtime.ort import small_graphs as graphs
    from eagle_runtime.ort.library import open_graph

    names = ["q", "k", "v", "keys", "values", "positions", "mask"]
    ranks = dict(zip(names, (3, 3, 3, 3, 4, 2, 4), strict=True))
    inputs = {name: (graphs.INT64 if name == "positions" else graphs.FLOAT, rank) for name, rank in ranks.items()}
    node = graphs.node(
        "ExactTreeAttention", names, ["out", "k2", "v2"], "eagle", heads=1, kv_heads=1, width=WIDTH, scale=1.0
    )
    outputs = {"out": (graphs.FLOAT, 3), "k2": (graphs.FLOAT, 4), "v2": (graphs.FLOAT, 4)}
    session = open_graph(
        Path("one_operator"), threads=1, model=graphs.model([node], inputs, outputs), operators=library
    )
    rows = np.ones((1, 2, WIDTH), np.float32)
    feeds = {
        "q": rows * np.array([0, QUERY], np.float32)[:, None],
        "k": rows * np.array([KEY, -KEY], np.float32)[:, None],
        "v": rows * np.array([VALUE, -VALUE], np.float32)[:, None],
        "keys": np.zeros((1, 1, WIDTH), np.float32),
        "values": np.ones((1, 1, 1, WIDTH), np.float32),
        "positions": np.array([[1, 2]]),
        "mask": np.array([[0, -1e9], [0, 0]], np.float32)[None, None],
    }
    (out, *_) = session.run(None, feeds)
    scores = np.exp(QUERY * WIDTH * np.array([0, KEY, -KEY]))
    last = scores @ np.array([1, VALUE, -VALUE]) / scores.sum()
    expected = np.array([[(1 + VALUE) / 2], [last]]) * np.ones(WIDTH)
    return bool(np.allclose(out[0], expected, rtol=1e-5, atol=0))
