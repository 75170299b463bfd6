"""The worst layers that a refused export names: one after another is made exact, and the KL is measured again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from eagle_calib.calibration import read_calibration
from eagle_calib.cli import main as calib_main
from eagle_export.bundle import export
from eagle_export.checking.worst_layers import Layer, LayerError, layer_errors, layers_of, progress, worst_layers
from eagle_export.graphs.pair import build_graphs, open_pair
from eagle_export.graphs.weights import save
from eagle_export.recipes.graph import linears
from eagle_export.recipes.multipliers import Multipliers
from eagle_export.recipes.smooth import Smooth, factors_of
from eagle_export.writing.settings import Settings
from eagle_runtime.bundle.manifest import read_manifest
from export_workplace import LAYERS, make_target
from source_continuations import continuations
from tiny_families import LAYERS as TINY_LAYERS
from tiny_families import ROWS, save_source

DOWN, LM_HEAD = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"
PROMPT = [5, 17, 3, 60, 8, 101, 44]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("worst") / "target")


def wrong_layers(bundle: Path, layers: Sequence[Layer], source: Path, everything: bool = False) -> list[LayerError]:
    (expected,) = continuations(source, [PROMPT], (), 12)
    graph = read_manifest(bundle).target.graph
    errors = layer_errors(bundle / graph.file, graph, layers, [*PROMPT, *expected.tokens[:-1]], expected.logits)
    return errors if everything else worst_layers(errors)


@pytest.mark.parametrize(
    ("name", "precision", "backend"),
    [
        (DOWN, "fp32", "cpu"),
        ("model.layers.0.self_attn.q_proj.weight", "int8", "cpu"),
        (LM_HEAD, "int4", "cuda"),
        ("model.layers.0.mlp.up_proj.weight", "int8-weight", "tensorrt"),
    ],
)
def test_a_layer_that_is_wrong_is_named_first(
    name: str, precision: str, backend: str, plain: Path, tmp_path: Path
) -> None:
    """The bundle is made from a checkpoint in which this weight's channels are permuted."""

    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].roll(3, 1).contiguous()

    wrong = make_target(tmp_path / "wrong", shuffle)
    export(wrong, None, tmp_path / "b", Settings(precision=precision, backend=backend, certify=False))
    traced = "fp32" if backend == "cpu" else "fp16"
    layers = layers_of(build_graphs(open_pair(plain, None), traced, 1)["target"])
    assert len(layers) == 7 * LAYERS + 1 and [layer.name for layer in layers if layer.is_lm_head] == [LM_HEAD]
    first, *others = wrong_layers(tmp_path / "b", layers, plain)
    assert first.layer.name == name and first.summary.startswith(f"{name} (output off by ")
    assert first.error > 0.5 > max([0.0, *(each.error for each in others)])
    assert first.exact < first.kl / 4
    if precision == "fp32":
        assert first.exact < 1e-9 and others == [], "nothing else is wrong"


def test_a_long_search_says_how_long_it_still_takes() -> None:
    said = [progress(done, 211, 2.0 * done) for done in (0, 1, 180, 210)]
    counts = "0 of 211", "1 of 211, 7 min left", "180 of 211, 2 min left", "210 of 211, 1 min left"
    assert said == [f"looking for the worst layers ({count})" for count in counts]


def test_layers_that_are_wrong_together_are_both_named(plain: Path, tmp_path: Path) -> None:
    names = {DOWN, LM_HEAD}

    def shuffle(tensors: dict[str, Tensor]) -> None:
        for name in names:
            tensors[name] = tensors[name].roll(3, 1).contiguous()

    wrong = make_target(tmp_path / "wrong", shuffle)
    export(wrong, None, tmp_path / "b", Settings(certify=False))
    layers = layers_of(build_graphs(open_pair(plain, None), "fp32", 1)["target"])
    worst = wrong_layers(tmp_path / "b", layers, plain)
    assert {each.layer.name for each in worst[:2]} == names


def test_layers_that_were_scaled_are_not_taken_for_wrong(plain: Path, tmp_path: Path) -> None:
    """Smoothing moves factors from a layer's input into its weight, and from v_proj into o_proj: a layer's error is
    measured against its scaled weight."""
    export(plain, None, tmp_path / "fp32", Settings(certify=False))
    assert calib_main([str(tmp_path / "fp32"), "-o", str(tmp_path / "c"), "--threads", "1", "--tokens", "200"]) == 0
    graph = build_graphs(open_pair(plain, None), "fp32", 1)["target"]
    layers = layers_of(graph)
    stored = {layer.name: layer.read() for layer in layers}
    # An error that depends on uneven channels alone, so that every layer that can be smoothed is.
    observed = read_calibration(tmp_path / "c").target
    Smooth(observed, lambda x, weight: x @ weight + np.abs(x).max(0).std()).apply(graph)
    factors = {one.name for one in linears(graph) if factors_of(one) is not None}
    parts = {name.rpartition("_proj")[0].rpartition(".")[2] for name in factors}
    assert parts == {"q", "k", "v", "o", "gate", "up", "down"}
    assert {layer.name for layer in layers if not np.array_equal(layer.read(), stored[layer.name])} == factors
    for file in (tmp_path / "fp32/target").iterdir():
        file.unlink()
    save(graph, tmp_path / "fp32/target/model.onnx")
    errors = wrong_layers(tmp_path / "fp32", layers, plain, everything=True)
    assert len(errors) == len(layers) and max(each.error for each in errors) < 1e-5


def test_layers_whose_multiplier_became_a_part_of_them_are_still_known(tmp_path: Path) -> None:
    save_source(ROWS["Granite"], tmp_path)
    graph = build_graphs(open_pair(tmp_path, None), "fp32", 1)["target"]
    layers = layers_of(graph)
    assert len(Multipliers().apply(graph)) == 2 * TINY_LAYERS
    weights = {layer.node.outputs[0].name: layer.reader()() for layer in linears(graph)}
    assert weights.keys() == {layer.y for layer in layers}
    for layer in layers:
        np.testing.assert_array_equal(layer.read(), weights[layer.y])


def test_the_kl_of_an_exact_layer_is_that_of_a_bundle_that_keeps_it(plain: Path, tmp_path: Path) -> None:
    """A bundle in which one layer is wrong, and one in which it is right."""

    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN] = tensors[DOWN].roll(3, 1).contiguous()

    target = make_target(tmp_path / "wrong", shuffle)
    layers = layers_of(build_graphs(open_pair(plain, None), "fp32", 1)["target"])
    errors = {}
    for folder, source in (("b", target), ("good", plain)):
        export(source, None, tmp_path / folder, Settings(precision="int8-weight", certify=False))
        errors[folder] = wrong_layers(tmp_path / folder, layers, plain)
    by_name = {each.layer.name: each for each in errors["good"]}
    wrong, right = errors["b"][0], errors["good"][0]
    assert wrong.layer.name == DOWN and wrong.exact == pytest.approx(right.kl, rel=0.5) and wrong.kl > 10 * right.kl
    assert all(each.exact <= each.kl for each in by_name.values())
