"""Every drafting method of the table, in each of its trees: the output is that of decoding without drafts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import EagleModel
from eagle_runtime.drafting.datastore import Datastore
from eagle_runtime.drafting.methods import METHODS
from insides import bundle_in, turns_of

SETTINGS: list[dict[str, Any]] = [{"temperature": 0.0, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 2}]
WAYS = [
    pytest.param(method.name, kind, id=f"{method.name}-{kind}")
    for method in METHODS
    for trees in method.trees
    for kind in trees.kinds or (None,)
]


@pytest.fixture(scope="module", params=["fp32", "int8"])
def model(request: pytest.FixtureRequest, bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    """A pair with all that methods may ask for: two draft models, a text of its own, and habits."""
    drafts = [
        bundle_of("alone", precision)
        for precision in {"fp32": ("int8", "int4"), "int8": ("fp32", "int4")}[request.param]
    ]
    with EagleModel.load(
        bundle_of("eagle1", request.param), draft_bundle=drafts, threads=1, context=128, check_hashes=False
    ) as loaded:
        texts = [loaded.generate([5, 6, 7], method="vanilla", max_new_tokens=60, ignore_eos=True).token_ids]
        turns_of(loaded).bundle = dataclasses.replace(bundle_in(loaded), datastore=Datastore(texts))
        yield loaded


@pytest.mark.parametrize(("method", "tree"), WAYS)
def test_the_output_is_that_of_decoding_without_drafts(
    method: str, tree: Any, model: EagleModel, prompts: list[list[int]]
) -> None:
    nodes: list[int] = []
    for prompt, sampling in zip(([5, 6, 7, 8] * 4, prompts[5]), SETTINGS, strict=True):
        settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
        plain = model.generate(prompt, method="vanilla", **settings)
        result = model.generate(
            prompt, method=method, tree=tree, on_cycle=lambda cycle: nodes.append(cycle.tree.num_nodes), **settings
        )
        assert result.token_ids == plain.token_ids and result.usage.method == method
    assert (max(nodes) > 1) == (method != "vanilla"), "equal because nothing was drafted shows nothing"
