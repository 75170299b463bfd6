"""The memory of traces that tests share: what it gives is what a trace gives, and its key covers what a trace reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from eagle_export.bundle import export
from eagle_export.graphs import trace
from eagle_export.graphs.pair import Pair, _draft_module, _target_module, open_pair
from eagle_export.writing.settings import Settings
from export_workplace import make_target
from trace_memory import TraceMemory, UndescribedError, describe, describe_module


@pytest.fixture
def pair(golden: Path) -> Pair:
    return open_pair(golden / "target", golden / "head_eagle3_dv44")


def test_a_remembered_trace_gives_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remembered by this process, or by another of the same run."""
    target = make_target(tmp_path / "target")
    (tmp_path / "traces").mkdir()
    ours, theirs = TraceMemory(tmp_path / "traces"), TraceMemory(tmp_path / "traces")
    bundles = []
    for number, (memory, enabled, traced) in enumerate(
        [(ours, False, 1), (ours, True, 2), (ours, True, 2), (theirs, True, 0)]
    ):
        memory.enabled = enabled
        monkeypatch.setattr("eagle_export.graphs.pair.trace_target", memory.around(trace.trace_target))
        export(target, None, folder := tmp_path / str(number), Settings(certify=False))
        bundles.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*/model*")})
        assert memory.traced == traced
    assert len(bundles[0]) == 2 and all(each == bundles[0] for each in bundles)


def test_keys_are_those_of_other_processes(pair: Pair) -> None:
    """They hold no addresses and no order of sets."""
    assert pair.head is not None
    modules = _target_module(pair, torch.float32), _draft_module(pair, pair.head, torch.float32, 8)
    assert all(" at 0x" not in describe_module(module) for module in modules)
    texts = set()
    for _ in range(2):  # a function in a function has an address, and in the order of a set's values hashes take part
        names: dict[str, Any] = {}
        exec("def outer(x):\n return [(lambda: y)() for y in x if y in {'a', 'b', 'c'}]", names)
        texts.add(describe(names["outer"].__code__))
    (text,) = texts
    assert " at 0x" not in text and "{'a', 'b', 'c'}" in text


def other_config(**changes: Any) -> Callable[[Pair], Pair]:
    def changed(pair: Pair) -> Pair:
        config = type(pair.config).from_dict({**pair.config.to_dict(), **changes})
        return replace(pair, config=config)

    return changed


def other_head(**changes: Any) -> Callable[[Pair], Pair]:
    def changed(pair: Pair) -> Pair:
        assert pair.head is not None
        return replace(pair, head=replace(pair.head, config=replace(pair.head.config, **changes)))

    return changed


def other_ids(pair: Pair) -> Pair:
    assert pair.head is not None and pair.head.d2t is not None
    return replace(pair, head=replace(pair.head, d2t=pair.head.d2t + 1))


@pytest.mark.parametrize(
    ("changed", "graphs"),
    [
        (other_config(rms_norm_eps=1e-3), {"target"}),
        (other_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), {"target"}),
        (other_config(intermediate_size=192), {"target"}),
        (other_config(hidden_act="gelu"), {"target"}),
        (lambda pair: replace(pair, family=replace(pair.family, windows=lambda config: (9,) * 8)), {"target"}),
        (other_head(taps=(1, 2, 3)), {"target"}),
        (other_head(rms_norm_eps=1e-3), {"draft"}),
        (other_ids, {"draft"}),
    ],
)
def test_the_key_covers_what_a_trace_reads(pair: Pair, changed: Callable[[Pair], Pair], graphs: set[str]) -> None:
    def keys(pair: Pair, dtype: torch.dtype = torch.float32, top_k: int = 8) -> dict[str, str]:
        assert pair.head is not None
        modules = {"target": _target_module(pair, dtype), "draft": _draft_module(pair, pair.head, dtype, top_k)}
        return {name: describe_module(module) for name, module in modules.items()}

    first = keys(pair)
    assert keys(pair) == first
    assert {name for name, key in keys(changed(pair)).items() if key != first[name]} == graphs
    assert keys(pair, top_k=9)["draft"] != first["draft"]
    assert all(key != first[name] for name, key in keys(pair, torch.float16).items())


def test_arguments_are_in_the_key_if_the_function_reads_them() -> None:
    def read_none(config: dict[str, int], logits: int) -> int:
        return logits

    def read_in_a_function(config: dict[str, int], logits: int) -> int:
        return sum(each * config["scale"] for each in [logits])

    def read_both(config: dict[str, int], logits: int) -> int:
        return logits * config["scale"]

    for function, keys in ((read_none, 1), (read_in_a_function, 2), (read_both, 2), (print, 2)):
        assert len({describe(partial(function, {"scale": scale})) for scale in (1, 2)}) == keys


def test_heads_of_targets_that_differ_in_depth_share_a_trace(golden: Path, tmp_path: Path) -> None:
    def key(target: Path) -> str:
        pair = open_pair(target, golden / "head_eagle1")
        assert pair.head is not None
        return describe_module(_draft_module(pair, pair.head, torch.float32, 8))

    assert key(make_target(tmp_path / "target")) == key(golden / "target")


def test_an_unknown_value_is_not_remembered() -> None:
    with pytest.raises(UndescribedError):
        describe(object())


def test_another_exporter_traces_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of tests with one folder share traces until the exporter's source changes, or a package."""

    def trace_nothing(module: torch.nn.Module) -> ir.Model:
        return ir.Model(ir.Graph([], [], nodes=[], name="nothing"), ir_version=10)

    for made_by, traced in (("one", 1), ("one", 0), ("another", 1), ("one", 0)):
        monkeypatch.setattr("trace_memory.exporter", lambda made_by=made_by: made_by)
        memory = TraceMemory(tmp_path)
        memory.around(trace_nothing)(torch.nn.Identity())
        assert memory.traced == traced
