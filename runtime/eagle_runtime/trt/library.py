"""Loads TensorRT for RTX or TensorRT, two libraries with one API, and collects the messages they report.

A logger or an error recorder in Python runs under the interpreter's lock. A thread of the library that reports waits
for the lock, and would wait for ever if the caller held it while waiting for that thread. So engines are run with the
library's own logger, silent but for failures of the library itself (it writes to stdout). The recorder stays, because
the calls in which other threads work release the lock (deserialize_cuda_engine, create_execution_context,
execute_async_v3); `release` takes it away before objects are freed, which keeps the lock. Only builds, which happen in
a thread of their own, have a logger in Python: the log has the list of kernels.

The only file that imports either; other code gets the module as an argument `trt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle_runtime.base.errors import BackendError

LIBRARIES = ("tensorrt-rtx", "tensorrt")


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of a library. errors: in order.

    logger, recorder: the library's objects that receive them; they must outlive every object that they are given to."""

    logger: Any
    recorder: Any
    errors: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Forget the errors of earlier calls."""
        self.errors.clear()

    @property
    def cause(self) -> str:
        """The first line of the first error, which usually causes the others."""
        return self.errors[0].strip().splitlines()[0][:300] if self.errors else "it gives no reason"


def load_library(library: str) -> Any:
    """Returns the module of "tensorrt-rtx" or "tensorrt". Raises BackendError."""
    assert library in LIBRARIES, library
    try:
        if library == "tensorrt-rtx":
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt
    except ModuleNotFoundError:
        raise BackendError(f"{library} is not installed; pip install 'eagle-edge[{library}]'") from None
    except (ImportError, OSError) as error:  # a shared library is missing or has another version
        raise BackendError(f"{library} does not load ({error}); pip install 'eagle-edge[{library}]' again") from None
    return trt


def record(trt: Any) -> Messages:
    """Returns Messages with the library's own logger and an error recorder, for running engines."""
    errors: list[str] = []
    return Messages(trt.Logger(trt.ILogger.Severity.INTERNAL_ERROR), recorder(trt, errors), errors)


def release(*objects: Any) -> None:
    """Let these objects of the library report no more errors, so that they can be freed under the interpreter's
    lock."""
    for one in objects:
        if one is not None:
            one.error_recorder = None


def recorder(trt: Any, errors: list[str]) -> Any:
    """Returns an error recorder that adds the descriptions to `errors`."""
    reports: list[tuple[Any, str]] = []  # codes and descriptions, until the library clears them

    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
        def report_error(self, code: Any, description: str) -> bool:
            reports.append((code, description))
            errors.append(description)
            return True  # fatal: the failing call ends, and its caller reads the cause

        def num_errors(self) -> int:
            return len(reports)

        def get_error_code(self, index: int) -> Any:
            return reports[index][0]

        def get_error_desc(self, index: int) -> str:
            return reports[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            reports.clear()

    return Recorder()
