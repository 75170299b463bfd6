"""The memory of traces that tests share: what it gives is what a trace gives, and its key covers what a trace reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_export.bundle import export
from eagle_export.pair import Pair, _draft_module, _target_module, open_pair
from trace_memory import TraceMemory, UndescribedError, describe, describe_module


@pytest.fixture
def pair(golden: Path) -> Pair:
    return open_pair(golden / "target", golden / "head_eagle3_dv44")


def test_a_remembered_trace_gives_the_same_bytes(golden: Path, tmp_path: Path, trace_memory: TraceMemory) -> None:
    enabled, folders = trace_memory.enabled, []
    try:
        for number, trace_memory.enabled in enumerate((False, True, True)):
            folders.append(tmp_path / str(number))
            export(golden / "target", None, folders[-1], certify=False)
    finally:
        trace_memory.enabled = enabled
    fresh, *remembered = ({path.name: path.read_bytes() for path in each.rglob("*/model*")} for each in folders)
    assert remembered == [fresh, fresh]


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


def test_an_unknown_value_is_not_remembered() -> None:
    with pytest.raises(UndescribedError):
        describe(object())
