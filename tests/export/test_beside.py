"""Values that two processes compute: equal to those of one, also where the copy ends early."""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_export.base import beside
from eagle_export.base.beside import MOST, Claims, fit_twice, groups, in_two, meanwhile, worth_it
from eagle_export.base.data_file import write
from eagle_export.base.parted import Array

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no fork that this may use")


def lazy(name: str, size: int, pid: int | None = None) -> ir.Value:
    """Values that are computed when they are written; by a copy of process `pid` they are not."""

    def values() -> Array:
        if pid not in (None, os.getpid()):
            raise ValueError
        return np.arange(size, dtype=np.float32) + len(name)

    tensor = ir.LazyTensor(lambda: ir.tensor(values()), dtype=ir.DataType.FLOAT, shape=ir.Shape([size]), name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([size]))


def model(pid: int | None = None) -> list[ir.Value]:
    layers = [f"model.layers.{number}.{part}" for number in range(9) for part in ("q.int4", "q.scale", "down.int4")]
    return [
        lazy(name, 100 + len(name), pid) for name in (*layers, "model.norm.weight", "lm_head.int4", "lm_head.scale")
    ]


@pytest.mark.parametrize("copy_fails", [False, True])
def test_two_processes_write_what_one_writes(copy_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = model()
    one = write(values, tmp_path / "one.data", tmp_path / "one.journal", lambda name, done: None)
    monkeypatch.setattr(beside, "LEAST", 1)
    monkeypatch.setattr("eagle_export.base.data_file.threads_allowed", lambda: 2)
    again = model(os.getpid() if copy_fails else None)
    assert worth_it(again, 2) and not worth_it(again, 1)
    two = write(again, tmp_path / "two.data", tmp_path / "two.journal", lambda name, done: None)
    assert one == two
    assert (tmp_path / "one.data").read_bytes() == (tmp_path / "two.data").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"one.data", "one.journal", "two.data", "two.journal"}


def test_each_group_of_values_is_computed_once_by_one_of_both(tmp_path: Path) -> None:
    """Those of a layer are a group, since they share what is recorded."""
    values, here = model(), list[str]()

    def content(tensor: ir.TensorProtocol) -> memoryview:
        here.append(str(tensor.name))
        return memoryview(tensor.tobytes())

    cores = os.sched_getaffinity(0)
    with in_two(values, content, tmp_path) as content_of:
        made = []
        for number, value in enumerate(values):
            assert value.const_value is not None
            made.append(bytes(content_of(value.const_value)))
            while number == 0 and len(list(next(tmp_path.iterdir()).glob("group *"))) < 9:
                time.sleep(0.01)  # until the copy has taken the groups that this process leaves
    assert made == [value.const_value.tobytes() for value in values if value.const_value is not None]
    names = [str(value.name) for value in values]
    ours = [[name in here for name in names[start:stop]] for start, stop in groups(values)]
    assert all(len(set(group)) == 1 for group in ours) and {group[0] for group in ours} == {False, True}
    assert here[:3] == names[:3] and len(here) == len(set(here)) < len(names)
    assert os.sched_getaffinity(0) == cores


def test_the_copy_leaves_the_next_groups_and_begins_with_the_largest(tmp_path: Path) -> None:
    claims = Claims([(number, number + 1) for number in range(6)], [1, 1, 1, 1, 9, 1], tmp_path)
    assert claims.take(0) and not claims.take(0)
    taken = claims.of_the_copy()
    assert [next(taken), next(taken), next(taken)] == [4, 3, 5]
    assert claims.take(1)
    assert list(taken) == [2]


def test_large_layers_have_one_process() -> None:
    """down_proj in int8: what it is made of is there twice for Llama-3.1-8B, not for a model of 70 B parameters."""
    assert fit_twice(14336 * 4096, 2) == (sys.platform == "linux")
    assert not fit_twice(28672 * 8192, 2) and not fit_twice(MOST, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no copy")
def test_a_copy_has_its_objects_in_common_with_the_process() -> None:
    objects = [[number] for number in range(400_000)]  # some 40 MB

    def own_memory() -> int:
        found = re.search(r"Private_Dirty: *(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
        return int(found[1]) * 1024 if found else 0

    def look(folder: Path) -> None:
        before = own_memory()
        gc.collect()
        (folder / "more").write_text(str(own_memory() - before))

    with meanwhile(look) as copy:
        folder = copy.result()
        assert folder is not None
        assert int((folder / "more").read_text()) < len(objects) * sys.getsizeof([0]) // 4
    assert gc.get_freeze_count() == 0
