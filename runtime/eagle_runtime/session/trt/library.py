"""TensorRT for RTX and TensorRT: two libraries with one API, and what they say while they work.

The only file that imports either of them; whatever uses one is handed the module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eagle_runtime.errors import BackendError

LIBRARIES = ("tensorrt-rtx", "tensorrt")


@dataclass(slots=True)
class Messages:
    """What a library said. errors: in order. layers: the lists of compiled kernels, which a verbose build logs.

    logger, recorder: the objects that the library talks to; they must outlive whatever was given them."""

    logger: Any = None
    recorder: Any = None
    errors: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)

    @property
    def cause(self) -> str:
        """The first error, which the others follow from, in one line."""
        return self.errors[0].strip().splitlines()[0][:300] if self.errors else "it gives no reason"


def load_library(library: str) -> Any:
    """The module of "tensorrt-rtx" or "tensorrt". Raises BackendError."""
    assert library in LIBRARIES, library
    try:
        if library == "tensorrt-rtx":
            import tensorrt_rtx as trt
        else:
            import tensorrt as trt
    except ModuleNotFoundError:
        raise BackendError(f"{library} is not installed; pip install 'eagle-edge[{library}]'") from None
    except (ImportError, OSError) as error:  # a shared library is missing or of another version
        raise BackendError(f"{library} does not load ({error}); pip install 'eagle-edge[{library}]' again") from None
    return trt


def listen(trt: Any) -> Messages:
    """Messages whose logger and error recorder belong to this library."""
    messages = Messages()

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.Severity.ERROR):
                messages.errors.append(message)
            elif message.startswith("Layers:\n"):
                messages.layers.append(message)

    class Recorder(trt.IErrorRecorder):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IErrorRecorder.__init__(self)
            self.reports: list[tuple[Any, str]] = []

        def report_error(self, code: Any, description: str) -> bool:
            self.reports.append((code, description))
            messages.errors.append(description)
            return True  # fatal: the call that failed ends, and its caller asks for the cause

        def num_errors(self) -> int:
            return len(self.reports)

        def get_error_code(self, index: int) -> Any:
            return self.reports[index][0]

        def get_error_desc(self, index: int) -> str:
            return self.reports[index][1]

        def has_overflowed(self) -> bool:
            return False

        def clear(self) -> None:
            self.reports.clear()

    messages.logger, messages.recorder = Logger(), Recorder()
    return messages
