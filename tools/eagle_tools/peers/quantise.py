"""Quantisation of a GGUF file by llama.cpp itself, in a process of its own, whose messages are kept back.

python -m eagle_tools.peers.quantise IN OUT FORMAT THREADS
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle_tools.own_python import run_python

FILE_TYPES = {
    "f32": "LLAMA_FTYPE_ALL_F32",
    "q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0",
    "q4_0": "LLAMA_FTYPE_MOSTLY_Q4_0",
    "q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    "iq4_nl": "LLAMA_FTYPE_MOSTLY_IQ4_NL",
    "iq4_xs": "LLAMA_FTYPE_MOSTLY_IQ4_XS",
}


def quantise(path: Path, out: Path, name: str, threads: int) -> None:
    """Write a file in the format `name`, a key of FILE_TYPES, with llama.cpp's own choices of which tensors it keeps in
    more bits. Raises RequestError."""
    own = ["-m", "eagle_tools.peers.quantise", str(path), str(out), name, str(threads)]
    run_python(own, f"llama.cpp could not quantise the model to {name}")


def main(argv: Sequence[str]) -> int:
    """Quantise in this process; returns the exit status."""
    import llama_cpp

    path, out, name, threads = argv
    params: Any = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(llama_cpp, FILE_TYPES[name]), int(threads)
    params.allow_requantize = True  # of a source that is quantised itself
    return int(llama_cpp.llama_model_quantize(path.encode(), out.encode(), ctypes.byref(params)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
