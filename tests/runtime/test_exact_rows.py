"""The check of rows: kernels that treat some numbers of rows in another way are noticed, and padded or gone without."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel, RequestError
from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.base.tree import MAX_DEPTH, Tree, node_depths
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.row_padding import RowPadding
from eagle_runtime.core.session import Array
from eagle_runtime.core.target import Target
from eagle_runtime.opening.exact_rows import CHECKED, PADDINGS, RowCheck, check_rows, find_padding, repeated_chain
from eagle_runtime.ort.library import byte_products_saturate
from eagle_runtime.ort.session import AnyCache, OrtSession
from insides import bundle_in, sessions_of, turns_of


class Uneven(OrtSession):
    """The engine itself, but the last bit of what a forward pass of some numbers of rows computes is another."""

    def __init__(self, bundle: Path, odd: Callable[[int], bool]) -> None:
        graph = read_manifest(bundle).target.graph
        super().__init__(bundle / graph.file, graph, threads=1)
        self._odd = odd
        self.fed: list[int] = []

    def run(self, feeds: Any, cache: AnyCache) -> dict[str, Array]:
        out = super().run(feeds, cache)
        rows = self.padding.rows(len(feeds["input_ids"]))
        self.fed.append(rows)
        if self._odd(rows):
            logits = out["logits"]
            logits[...] = np.nextafter(logits, np.float32(np.inf))
        return out


@pytest.mark.parametrize(
    ("odd", "padding"),
    [
        (lambda rows: False, RowPadding()),
        (lambda rows: rows == 1, RowPadding(2)),  # 4-bit products with AVX2
        (lambda rows: rows % 2 == 1, RowPadding(2, 2)),  # those in blocks of 64 with AVX-512 VNNI
        (lambda rows: rows % 4 > 0, RowPadding(4, 4)),
        (lambda rows: rows < 16, RowPadding(16, 16)),
        (lambda rows: rows > 60, None),
    ],
)
def test_the_least_padding_is_found(
    bundle_of: Callable[..., Path], odd: Callable[[int], bool], padding: RowPadding | None
) -> None:
    with Uneven(bundle_of("alone", "int8"), odd) as session:
        assert find_padding(session) == RowCheck(padding)


def test_what_is_found_is_kept_and_said_once(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    bundle = bundle_of("alone", "int8")
    manifest = read_manifest(bundle)
    with Uneven(bundle, lambda rows: rows % 4 > 0) as session:
        with pytest.warns(EagleWarning, match="whole multiples of 4; others are padded"):
            first = check_rows(session, manifest, 1)
        assert first == RowCheck(RowPadding(4, 4)) and session.padding == RowPadding(4, 4)
        passes = len(session.fed)
        session.padding = RowPadding()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert check_rows(session, manifest, 1) == first
        assert len(session.fed) == passes and session.padding == RowPadding(4, 4)
        with pytest.warns(EagleWarning):  # other threads may divide sums in another way
            assert check_rows(session, manifest, 2) == first
        assert len(session.fed) > passes
    for padding in ("7", '"x"', '{"least": 1}', '{"least": 1000000000, "multiple": 1}', '{"least": 1, "multiple": 0}'):
        for file in (tmp_path / "cache").iterdir():
            file.write_text(f'{{"padding": {padding}}}', encoding="utf-8")
        with Uneven(bundle, lambda rows: False) as session:
            assert check_rows(session, manifest, 1) == RowCheck(RowPadding())


def test_padding_to_two_rows_is_not_worth_a_warning(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of("alone", "int8")
    for odd, padding in ((lambda rows: rows == 1, RowPadding(2)), (lambda rows: rows % 2 == 1, RowPadding(2, 2))):
        monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / str(padding.multiple)))
        with warnings.catch_warnings(), Uneven(bundle, odd) as session:
            warnings.simplefilter("error")
            assert check_rows(session, read_manifest(bundle), 3) == RowCheck(padding)


def test_without_equal_rows_drafts_are_off(bundle_of: Callable[..., Path], prompts: list[list[int]]) -> None:
    bundle = bundle_of("eagle1", "int8")
    with EagleModel.load(bundle, threads=1) as model:
        vanilla = model.generate(prompts[0], method="vanilla", max_new_tokens=12)
        assert model.generate(prompts[0], tree="dynamic", max_new_tokens=12).usage.tau > 1
        turns_of(model).bundle = dataclasses.replace(bundle_in(model), row_check=RowCheck(None))
        drafted = model.generate(prompts[0], tree="dynamic", max_new_tokens=12)
        assert drafted.token_ids == vanilla.token_ids and drafted.usage.tau == 1


@pytest.mark.parametrize("precision", ["int8", "int8-weight", "int4"])
@pytest.mark.parametrize("padding", PADDINGS[1:])
def test_padding_changes_no_bit(bundle_of: Callable[..., Path], precision: str, padding: RowPadding) -> None:
    """Padding changes nothing in trees whose rows are equal without it: 16 and 48 rows, after a prompt whose last chunk
    is padded too."""
    rng = np.random.default_rng(3)
    with EagleModel.load(bundle_of("eagle3", precision), threads=1, backend="cpu") as model:
        session = sessions_of(model)[0]
        assert isinstance(session, OrtSession)
        outputs = []
        for used in (session.padding, padding):
            session.padding = used
            target = Target(session, 200)
            rng = np.random.default_rng(3)
            target.prefill(rng.integers(0, 256, 80).tolist())
            for nodes in (48, 5, 16):
                parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))])
                logits, features = target.verify(
                    Tree(rng.integers(0, 256, nodes), parents, np.zeros(nodes, np.float32))
                )
                assert len(logits) == len(features) == nodes
                target.cache.keep(np.zeros(1, np.int64))
            outputs.append((logits.copy(), np.array(features)))
        np.testing.assert_array_equal(outputs[0][0], outputs[1][0])
        np.testing.assert_array_equal(outputs[0][1], outputs[1][1])


@pytest.mark.parametrize(
    "precision", ["int8", "int8-token", "int8-static", "int8-weight", "int4", "int4-int8", "int8+int8 cache"]
)
def test_every_quantised_precision_passes_here(bundle_of: Callable[..., Path], precision: str) -> None:
    with EagleModel.load(bundle_of("eagle3", precision), threads=2, backend="cpu") as model:
        assert model.row_check is not None and model.row_check.padding is not None


def test_fp32_is_promised_nothing(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("alone"), threads=1) as model:
        assert model.row_check is None


def test_a_repeated_chain() -> None:
    chain = np.array([5, 6, 7, 8])
    for nodes in CHECKED:
        tree = repeated_chain(chain, nodes)
        assert tree.num_nodes == nodes
        assert tree.tokens.tolist() == chain[node_depths(tree.parents)].tolist()
    assert repeated_chain(chain, 6).parents.tolist() == [-1, 0, 1, 2, 0, 4]


def test_byte_products_of_this_processor() -> None:
    """Exact on ARM and with VNNI; elsewhere the sessions ask for the exact ones (see tests/processors)."""
    assert byte_products_saturate() in (False, True)


def test_no_tree_is_deeper_than_exact_attention_allows(model_of: Callable[..., EagleModel]) -> None:
    """A drafter of one's own may return anything; a chain of 80 tokens would be summed in another order than alone."""
    model = model_of("eagle1", "int8")
    bundle_in(model).target.prefill([1, 2, 3])
    chain = Tree(np.zeros(81, np.int64), np.arange(-1, 80), np.zeros(81, np.float32))
    with pytest.raises(RequestError, match=f"80 levels deep.* and {MAX_DEPTH}"):
        bundle_in(model).target.verify(chain)
    wrong: list[dict[str, Any]] = [
        {"tree": "chain", "depth": 80, "total_token": 82},
        {"method": "lookup", "tree": "chain", "depth": 80},
        {"tree": "dynamic", "total_token": 5000},
    ]
    for settings in wrong:
        with pytest.raises(RequestError, match="must be"):
            model.generate([1, 2, 3], **settings)
