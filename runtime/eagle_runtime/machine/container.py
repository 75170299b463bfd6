"""What a container leaves of the machine: memory and processor time that its control groups (cgroup v1 and v2) allow.

/proc/meminfo and the number of cores are those of the whole machine in a container too. A process that takes more
memory than its group has is killed, and one with more threads than its quota pays for is stopped for a part of every
period. A limit holds for a group and all below it, so that of every group from the process's own to the root counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60  # version 1 writes such a number where there is no limit


def memory_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes that the process's groups allow at most; None without a limit."""
    limits = [limit for folder in _groups("memory", root, own) if (limit := _memory_limit(folder)) is not None]
    return min(limits, default=None)


def memory_left(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes that can still be taken within these limits; None without a limit. Copies of files that are not
    in use count as free, as the kernel drops them first."""
    left = []
    for folder in _groups("memory", root, own):
        limit = _memory_limit(folder)
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            left.append(max(0, limit - max(0, used - _unused_files(folder))))
    return min(left, default=None)


def swap_limit(root: Path = ROOT, own: Path = OWN) -> int | None:
    """Returns the bytes of swap that the groups allow at most; None without a limit."""
    limits = []
    for folder in _groups("memory", root, own):
        swap, both, memory = (
            _number(folder / name)
            for name in ("memory.swap.max", "memory.memsw.limit_in_bytes", "memory.limit_in_bytes")
        )
        if swap is None and both is not None and memory is not None:  # version 1 limits memory and swap together
            swap = both - memory
        if swap is not None and swap < UNLIMITED:
            limits.append(max(0, swap))
    return min(limits, default=None)


def processors(root: Path = ROOT, own: Path = OWN) -> float | None:
    """Returns how many processors' time the groups allow, as 1.5; None without a limit."""
    quotas = []
    for folder in _groups("cpu", root, own):
        quota, period = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        both = _text(folder / "cpu.max").split()
        if len(both) == 2 and all(part.isdecimal() for part in both):
            quota, period = int(both[0]), int(both[1])
        if quota is not None and period and quota > 0:  # -1 where there is no limit
            quotas.append(quota / period)
    return min(quotas, default=None)


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yields the folders of the process's group and of those above it that this machine shows. In a container that does
    not see the groups above its own, the root is its own."""
    for line in _text(own).splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers == "":
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            base = next(
                (root / name for name in (controllers, controller) if (root / name).is_dir()), root / controller
            )
        else:
            continue
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            if ".." not in part.parts and (base / part).is_dir():
                yield base / part


def _memory_limit(folder: Path) -> int | None:
    limits = [_number(folder / name) for name in ("memory.max", "memory.high", "memory.limit_in_bytes")]
    known = [limit for limit in limits if limit is not None and limit < UNLIMITED]
    return min(known, default=None)


def _unused_files(folder: Path) -> int:
    """Bytes of copies of files that no process used lately."""
    fields = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    value = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return int(value) if value.isdecimal() else 0


def _number(*files: Path) -> int | None:
    """The number in the first of these files that is there; None without one, and for "max"."""
    for file in files:
        if (text := _text(file).strip()).lstrip("-").isdecimal():
            return int(text)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
