"""The native form of a head's graph proposes what the portable one does, level by level, over the same cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import needs_operators
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.head import Proposal
from eagle_runtime.drafting.head import Head, Scratch
from fakes import observed
from insides import sessions_of


def proposals(bundle: Path, backend: str) -> list[Proposal]:
    """Of a text that is read in two pieces, and of two levels of a tree."""
    rng = np.random.default_rng(3)
    with EagleModel.load(bundle, backend=backend, threads=2, context=128) as model:
        session = sessions_of(model)[1]
        head = Head(session, 128, 32)
        features = rng.standard_normal((43, int(session.inputs["features"].shape[2]))).astype(np.float32)
        tokens = rng.integers(0, 256, 43).tolist()
        found = [observed(head, tokens[:40], features[:40]), observed(head, tokens[40:], features[40:])]
        with Scratch(head) as scratch:
            rows = np.zeros(3, np.int64)
            ids = rng.integers(0, 256, 3)
            found.append(scratch.feed(ids, found[-1].hidden[rows], rows - 1))
            rows = np.array([0, 2])
            found.append(scratch.feed(ids[rows], found[-1].hidden[rows], rows))
        return [Proposal(one.tokens, one.log_probs, np.array(one.hidden), one.position) for one in found]


@needs_operators
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_both_forms_of_a_head_propose_the_same(bundle_of: Callable[..., Path], kind: str) -> None:
    bundle = bundle_of(kind, "int4")
    head = read_manifest(bundle).head
    assert head is not None and head.graph.native is not None
    assert "RowExactSteps" in head.graph.native.used
    for mine, other in zip(proposals(bundle, "native"), proposals(bundle, "cpu"), strict=True):
        assert mine.position == other.position
        # An input on the border of two levels may fall on either side.
        np.testing.assert_allclose(mine.hidden, other.hidden, atol=0.02 * float(np.abs(other.hidden).max()))
        np.testing.assert_allclose(mine.log_probs[:, :4], other.log_probs[:, :4], atol=0.05)
        assert (mine.tokens[:, 0] == other.tokens[:, 0]).mean() >= 0.6


def test_heads_without_whole_products_have_no_native_form(bundle_of: Callable[..., Path]) -> None:
    head = read_manifest(bundle_of("eagle3")).head
    assert head is not None and head.graph.native is None
