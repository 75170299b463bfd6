"""Values that two processes compute: equal to those of one, also where the copy ends early."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_export.base import beside
from eagle_export.base.beside import in_two, shared_out, worth_it
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


def test_a_copy_computes_a_half_and_whole_layers() -> None:
    values = model()
    theirs = shared_out(values)
    sizes = [value.const_value.nbytes for value in values if value.const_value is not None]
    given = sum(size for size, to_copy in zip(sizes, theirs, strict=True) if to_copy)
    assert 0.35 < given / sum(sizes) < 0.65
    layers = [theirs[first : first + 3] for first in range(0, 27, 3)]
    assert all(len(set(layer)) == 1 for layer in layers) and {layer[0] for layer in layers} == {False, True}


def test_what_the_copy_computes_is_not_computed_here(tmp_path: Path) -> None:
    values, here = model(), list[str]()

    def content(tensor: ir.TensorProtocol) -> memoryview:
        here.append(str(tensor.name))
        return memoryview(tensor.tobytes())

    cores = os.sched_getaffinity(0)
    with in_two(values, content, tmp_path) as content_of:
        made = [bytes(content_of(value.const_value)) for value in values if value.const_value is not None]
    assert made == [value.const_value.tobytes() for value in values if value.const_value is not None]
    assert here == [value.name for value, to_copy in zip(values, shared_out(values), strict=True) if not to_copy]
    assert os.sched_getaffinity(0) == cores
