"""ONNX Runtime: opens graphs, runs them and reports what the library says. The only file that imports onnxruntime."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime.base.errors import BackendError, first_line
from eagle_runtime.bundle.listed_files import at_places, external_files
from eagle_runtime.ort import small_graphs

# Version 1.32 and newer sends usage data by default, with an id of the machine from the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import onnxruntime as ort
except ImportError:
    raise BackendError("onnxruntime is not installed; pip install 'eagle-edge[cpu]'") from None

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
ASSIGNMENT = "session.record_ep_graph_assignment_info"
# Every session has its own threads, which spin for about 50 ms after a forward pass and take cores from the other
# graph's: verifying right after drafting took 1.4 times as long.
STOP_SPINNING = "session.force_spinning_stop"

Providers = Sequence[tuple[str, Mapping[str, str]]]
CPU: Providers = (("CPUExecutionProvider", {}),)
MEMORY_ADVICE = "choose a smaller context, export the bundle in int4, or close the process that holds the memory"
VERSION = f"onnxruntime {ort.__version__}"


def open_graph(
    path: Path,
    providers: Providers = CPU,
    threads: int | None = None,
    model: bytes | None = None,
    config: Mapping[str, str] | None = None,
    operators: Path | None = None,
) -> Any:
    """Returns an InferenceSession on these providers and no others. threads: of one forward pass; None leaves the
    number to ONNX Runtime (physical cores). model: the graph's content, used instead of the file at `path`, whose
    folder holds its weights. config: further entries of the session's configuration. operators: a shared library of
    operators that the graph uses. Raises BackendError."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # a failure is described in the exception too
    options.add_session_config_entry(STOP_SPINNING, "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if model is not None:
        folder, model = _unlinked(path.parent, model)
        options.add_session_config_entry(WEIGHTS_FOLDER, str(folder))
    if len(providers) > 1:
        options.add_session_config_entry(ASSIGNMENT, "1")
    for name, value in (config or {}).items():
        options.add_session_config_entry(name, value)
    try:
        if operators is not None:
            options.register_custom_ops_library(str(operators))
        # The fallback would print to stdout and continue on the CPU alone.
        return ort.InferenceSession(model or str(path), options, providers=list(providers), enable_fallback=False)
    except Exception as error:  # onnxruntime raises a dozen types without a common base
        raise engine_error(f"load {path}", error) from None


def _unlinked(folder: Path, model: bytes) -> tuple[Path, bytes]:
    """Returns the folder of the files of weights and the graph that reads them there. In the hub's cache they are links
    out of the graph's folder, which ONNX Runtime does not follow."""
    real = {name: (folder / name).resolve() for name in set(external_files(model))}
    if all(file.parent == (folder / name).parent.resolve() for name, file in real.items()):
        return folder, model
    common = Path(os.path.commonpath([file.parent for file in real.values()]))
    return common, at_places(model, {name: file.relative_to(common).as_posix() for name, file in real.items()})


@functools.cache
def byte_products_saturate() -> bool:
    """Returns whether products of unsigned by signed bytes are wrong on this processor: x86 processors without VNNI add
    pairs of them in 16 bits. Tries one product of the largest values."""
    matrices = {"a": (small_graphs.UINT8, 2), "b": (small_graphs.INT8, 2)}
    node = small_graphs.node("MatMulInteger", ["a", "b"], ["y"])
    product = small_graphs.model([node], matrices, {"y": (small_graphs.INT32, 2)})
    feeds = {"a": np.full((4, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)}
    (sums,) = open_graph(Path("byte_product"), threads=1, model=product).run(None, feeds)
    return bool(np.any(sums != 255 * 127 * 64))


def run_graph(session: Any, binding: Any) -> None:
    """Run one forward pass over the bound tensors. Raises BackendError."""
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        raise engine_error("run a forward pass", error) from None


def engine_error(action: str, error: Exception) -> BackendError:
    """Returns the error for a failed action ("load ..."): the first line of ONNX Runtime's message, or advice where
    memory ran out."""
    text = str(error).strip()
    if not re.search(r"out of memory|allocate memory|bad allocation|bad_alloc", text, re.IGNORECASE):
        return BackendError(f"onnxruntime cannot {action}: {first_line(error)}")
    asked = re.search(r"requested buffer of size (\d+)", text)
    size = f" ({int(asked[1]) / 1e6:.1f} MB more were asked for)" if asked else ""
    return BackendError(f"onnxruntime cannot {action}: the memory is full{size}; {MEMORY_ADVICE}")


def operators(session: Any) -> list[tuple[str, str]]:
    """Returns (provider, operator) of every node of a graph that was opened with several providers."""
    parts = session.get_provider_graph_assignment_info()
    return [(part.ep_name, node.op_type) for part in parts for node in part.get_nodes()]


def available_providers() -> list[str]:
    """Returns the providers that this onnxruntime was built with."""
    return list(ort.get_available_providers())


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Within the block ONNX Runtime's process-wide logger prints errors only."""
    ort.set_default_logger_severity(3)
    try:
        yield
    finally:
        ort.set_default_logger_severity(2)  # the default; the current value cannot be read


def preload_libraries() -> list[str]:
    """Load the CUDA libraries that pip installed. Returns the lines that onnxruntime prints about those it cannot
    load."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        ort.preload_dlls()
    return printed.getvalue().splitlines()
