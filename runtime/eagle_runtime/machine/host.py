"""The processor's name and instruction sets, by which results of measurements and checks are stored, and what this
process may have of the machine: memory, so that caches that can never fit are refused before they are allocated, and
threads. In a container it is the smaller of the machine's and the container's."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from eagle_runtime.machine.container import memory_left, memory_limit, processors, swap_limit

CPUS = Path("/sys/devices/system/cpu")  # Linux: a folder for each logical processor
CPUINFO = Path("/proc/cpuinfo")  # Linux: a block of "key : value" lines for each core
NAMES = ("model name", "Hardware", "CPU part")  # the last stands alone on most ARM machines
FEATURES = ("flags", "Features")  # on x86 and on ARM


@functools.cache
def processor_name(cpuinfo: Path = CPUINFO) -> str:
    """Returns the system's name of the processor, or its architecture if the system gives none."""
    fields = dict(_fields(cpuinfo))
    return next((fields[key] for key in NAMES if fields.get(key)), None) or platform.processor() or platform.machine()


@functools.cache
def processor_features(cpuinfo: Path = CPUINFO) -> tuple[str, ...]:
    """Returns the architecture and the instruction sets that programs may use, sorted: those that Linux lists, and, in
    capitals, those that NumPy detected with the processor's own instructions. Both are needed: under an emulator the
    list is the host's while detection shows the emulated processor, and other systems have no list."""
    fields = dict(_fields(cpuinfo))
    listed = {word for key in FEATURES for word in fields.get(key, "").split()}
    return tuple(sorted({platform.machine(), *listed, *_detected()}))


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the keys and values of all cores, the last core's at the end; nothing where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), " ".join(value.split())


def _detected() -> set[str]:
    """Returns the instruction sets that NumPy detected; none if its private module for this has moved again."""
    modules = (sys.modules.get(f"numpy.{core}._multiarray_umath") for core in ("_core", "core"))
    features = next((getattr(module, "__cpu_features__", {}) for module in modules if module is not None), {})
    return {str(name) for name, has in features.items() if has}


def free_memory() -> int | None:
    """Returns the bytes of memory that can still be used: on other systems than Linux and Windows, all physical memory;
    None if unknown."""
    if sys.platform == "win32":
        return (_windows_memory() or [0] * 3)[2] or None
    return _least(_meminfo().get("MemAvailable", _physical_memory()), memory_left())


def total_memory() -> int | None:
    """Returns the bytes of memory and swap together; None if the system does not report them. On systems other than
    Linux and Windows, whose swap grows as needed, twice the memory."""
    if sys.platform == "win32":
        status = _windows_memory()
        return None if status is None else status[3]  # bytes that all processes together may commit
    memory, swap = (_meminfo().get(name) for name in ("MemTotal", "SwapTotal"))
    if memory is not None and swap is not None:
        return (_least(memory, memory_limit()) or 0) + (_least(swap, swap_limit()) or 0)
    return None if (physical := _physical_memory()) is None else 2 * physical


def _meminfo() -> dict[str, int]:
    """The bytes that Linux reports by their names; nothing elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return {name: 1024 * int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    except (OSError, ValueError, IndexError):
        return {}


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def threads_allowed() -> int | None:
    """Returns the most threads that a process should have which may not use the whole machine, 1 at least: one for each
    core that it may run on, and no more than a container's quota of processor time pays for. None where it may."""
    quota, machine = processors(), os.cpu_count() or 1
    if cores() >= machine and (quota is None or quota >= machine):
        return None
    return max(1, int(min(quota or machine, physical_cores())))


def cores() -> int:
    """Returns how many logical processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_cores() -> int:
    """Returns how many cores these are; logical ones where Linux does not say which are of one core."""
    if not hasattr(os, "sched_getaffinity"):
        return cores()
    siblings = set()
    for number in os.sched_getaffinity(0):
        try:
            siblings.add((CPUS / f"cpu{number}/topology/thread_siblings_list").read_text(encoding="ascii"))
        except OSError:
            siblings.add(str(number))
    return len(siblings)


def _least(*sizes: int | None) -> int | None:
    """The smallest size that is known."""
    return min((size for size in sizes if size is not None), default=None)


def _windows_memory() -> list[int] | None:
    """The fields of MEMORYSTATUSEX: its own size, then physical memory, what is free of it, the limit of all
    processes, ..."""
    status = (ctypes.c_uint64 * 8)(64)
    known = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return list(status) if known else None
