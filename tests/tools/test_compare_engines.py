"""Engines side by side: equal ones, ones of other precision, and broken ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.session import Session
from eagle_runtime.ort.buffers import OrtMemory
from eagle_runtime.ort.device_session import OrtDeviceSession
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.session import OrtSession
from eagle_tools.compare_engines import compare_sessions

PROMPTS = [[5, 17, 3, 60], list(range(40, 70)), [9]]
OUTPUTS = [("target", "logits"), ("target", "features"), ("draft", "log_probs"), ("draft", "hidden")]


def on_host(bundle: Path) -> tuple[Session, Session]:
    manifest = read_manifest(bundle)
    target, head = (model.graph for model in manifest.models.values())
    return OrtSession(bundle / target.file, target, 1), OrtSession(bundle / head.file, head, 1)


def on_device(bundle: Path) -> tuple[Session, Session]:
    manifest, memory = read_manifest(bundle), OrtMemory()
    target, head = (
        OrtDeviceSession(open_graph(bundle / graph.file, threads=1), bundle / graph.file, graph, memory)
        for graph in (model.graph for model in manifest.models.values())
    )
    return target, head


@pytest.mark.parametrize(("kind", "precision"), [("eagle1", "fp32"), ("eagle3", "fp16")])
def test_host_and_device_say_the_same(kind: str, precision: str, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of(kind, precision)
    differences = compare_sessions(on_host(bundle), on_device(bundle), 256, PROMPTS)
    assert [(each.graph, each.output) for each in differences] == OUTPUTS
    for each in differences:
        assert each.largest <= 2e-3 * each.scale and each.scale > 1
        assert each.agreement == (1 if each.output in ("logits", "log_probs") else None)


def test_another_precision_differs_everywhere(bundle_of: Callable[..., Path]) -> None:
    differences = compare_sessions(on_host(bundle_of("eagle1")), on_host(bundle_of("eagle1", "int8")), 256, PROMPTS)
    for each in differences:
        assert 1e-3 * each.scale < each.largest < 0.5 * each.scale
    logits = differences[0]
    assert logits.agreement is not None and 0.5 < logits.agreement <= 1


class Broken:
    """A session of which one output comes out wrong in passes of several rows."""

    def __init__(self, session: Session, output: str, wrong: float) -> None:
        self._session, self._output, self._wrong = session, output, wrong
        self.inputs, self.outputs = session.inputs, session.outputs
        self.new_cache, self.joined = session.new_cache, session.joined

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        results = dict(self._session.run(feeds, cache))
        if len(feeds["input_ids"]) > 1:
            results[self._output] = np.full_like(results[self._output], self._wrong)
        return results


@pytest.mark.parametrize("wrong", [7.0, np.nan])
@pytest.mark.parametrize(("graph", "output"), OUTPUTS)
def test_a_wrong_output_is_detected(graph: str, output: str, wrong: float, bundle_of: Callable[..., Path]) -> None:
    """And no other is blamed for it: heads are fed the reference's features."""
    bundle = bundle_of("eagle1")
    target, head = on_host(bundle)
    pair: Any = (Broken(target, output, wrong), head) if graph == "target" else (target, Broken(head, output, wrong))
    differences = compare_sessions(on_host(bundle), pair, 256, PROMPTS)
    for each in differences:
        if (each.graph, each.output) != (graph, output):
            assert each.largest < 1e-4
        elif np.isnan(wrong):
            assert each.largest == np.inf
        else:
            assert each.largest > 1
