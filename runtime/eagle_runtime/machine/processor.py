"""The processor at hand, in words: what is measured or checked on one says nothing about another."""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # where Linux describes it, one block of "key : value" lines for each core
NAMES = ("model name", "Hardware", "CPU part")  # the last stands alone on most ARM machines
FEATURES = ("flags", "Features")  # on x86 and on ARM


@functools.cache
def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """Returns what the system calls the processor; the mere architecture where it does not say."""
    told = dict(_told(cpuinfo))
    return next((told[key] for key in NAMES if told.get(key)), None) or platform.processor() or platform.machine()


@functools.cache
def processor_features(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Returns the names of the instruction sets that programs may use, in order, the architecture among them: those
    that Linux lists, and those that NumPy found when it asked the processor itself, in capitals. An emulator shows
    programs the system's own list, and a processor of its own where they ask; other systems have no list."""
    told = dict(_told(cpuinfo))
    listed = {word for key in FEATURES for word in told.get(key, "").split()}
    return tuple(sorted({platform.machine(), *listed, *_asked()}))


def _told(path: Path) -> Iterator[tuple[str, str]]:
    """Keys and values of the last core's block; nothing where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), " ".join(value.split())


def _asked() -> set[str]:
    """NumPy tells it in a module that is its own affair and has moved once; without it the system's list is left."""
    modules = (sys.modules.get(f"numpy.{core}._multiarray_umath") for core in ("_core", "core"))
    found = next((getattr(module, "__cpu_features__", {}) for module in modules if module is not None), {})
    return {str(name) for name, has in found.items() if has}
