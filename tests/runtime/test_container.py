"""Limits of memory and processor time that control groups of both versions set, in folders that stand for theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle_runtime.machine import host
from eagle_runtime.machine.container import memory_left, memory_limit, processors, swap_limit

MB = 1 << 20


def groups(root: Path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Writes /sys/fs/cgroup, and /proc/self/cgroup with this content."""
    for name, content in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    (root / "own").write_text(own)
    return root / "cgroup", root / "own"


def test_version_2(tmp_path: Path) -> None:
    """The smallest limit on the way to the root counts."""
    files = {
        "cgroup.controllers": "cpu memory",
        "memory.stat": "anon 1",
        "a/memory.max": str(500 * MB),
        "a/memory.current": str(300 * MB),
        "a/memory.stat": f"anon 5\ninactive_file {100 * MB}",
        "a/memory.swap.max": "0",
        "a/cpu.max": "400000 100000",
        "a/b/memory.max": "max",
        "a/b/memory.high": str(600 * MB),
        "a/b/memory.current": str(200 * MB),
        "a/b/cpu.max": "150000 100000",
    }
    place = groups(tmp_path, "0::/a/b\n", files)
    assert (memory_limit(*place), memory_left(*place), swap_limit(*place)) == (500 * MB, 300 * MB, 0)
    assert processors(*place) == 1.5


@pytest.mark.parametrize("named", ["cpu,cpuacct", "cpu"])
def test_version_1(tmp_path: Path, named: str) -> None:
    files = {
        "memory/memory.limit_in_bytes": str(2**63 - 4096),
        "memory/docker/x/memory.limit_in_bytes": str(600 * MB),
        "memory/docker/x/memory.usage_in_bytes": str(250 * MB),
        "memory/docker/x/memory.stat": f"inactive_file 1\ntotal_inactive_file {50 * MB}",
        "memory/docker/x/memory.memsw.limit_in_bytes": str(700 * MB),
        f"{named}/docker/x/cpu.cfs_quota_us": "50000",
        f"{named}/docker/x/cpu.cfs_period_us": "100000",
        f"{named}/cpu.cfs_quota_us": "-1",
        f"{named}/cpu.cfs_period_us": "100000",
    }
    place = groups(tmp_path, "4:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n", files)
    assert (memory_limit(*place), memory_left(*place), swap_limit(*place)) == (600 * MB, 400 * MB, 100 * MB)
    assert processors(*place) == 0.5


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """/proc/self/cgroup may name a group of the machine that the container does not see."""
    files = {"memory/memory.limit_in_bytes": str(600 * MB), "memory/memory.usage_in_bytes": str(100 * MB)}
    place = groups(tmp_path, "4:memory:/kubepods/pod1/x\n2:cpu:/../x\n", files)
    assert (memory_limit(*place), memory_left(*place), processors(*place)) == (600 * MB, 500 * MB, None)


def test_no_limit(tmp_path: Path) -> None:
    files = {
        "cgroup.controllers": "cpu memory",
        "a/memory.max": "max",
        "a/cpu.max": "max 100000",
        "a/memory.current": "5",
    }
    for number, own in enumerate(("0::/a\n", "", "nonsense\n")):
        (tmp_path / str(number)).mkdir()
        place = groups(tmp_path / str(number), own, files)
        assert (memory_limit(*place), memory_left(*place), processors(*place)) == (None, None, None)
    nowhere = tmp_path / "x", tmp_path / "y"
    assert (memory_limit(*nowhere), swap_limit(*nowhere), processors(*nowhere)) == (None, None, None)


@pytest.mark.parametrize(
    ("runs_on", "quota", "threads"),
    [
        ({0, 1, 2, 3, 4, 5, 6, 7}, None, None),
        ({0, 1, 2, 3, 4, 5, 6, 7}, 9.0, None),
        ({0, 1, 2, 3, 4, 5, 6, 7}, 2.5, 2),
        ({0, 1, 2, 3, 4, 5, 6, 7}, 0.5, 1),
        ({0, 1, 2, 3, 4, 5, 6, 7}, 6.0, 4),
        ({0, 1}, 2.0, 1),
        ({0, 2, 3}, None, 2),
        ({6}, None, 1),
    ],
)
def test_threads_are_of_the_cores_that_a_process_may_use(
    runs_on: set[int], quota: float | None, threads: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of four cores with two logical processors each; None leaves the number to the engine."""
    for number in range(8):
        folder = tmp_path / f"cpu{number}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{number // 2 * 2}-{number // 2 * 2 + 1}\n")
    monkeypatch.setattr(host, "CPUS", tmp_path)
    monkeypatch.setattr(host, "processors", lambda: quota)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: runs_on, raising=False)
    assert host.threads_allowed() == threads
