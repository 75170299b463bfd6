"""Inputs that are recorded from the checkpoint, embeddings in blocks, and layers that are chosen by measuring."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from conftest import GOLDEN, HEADS
from eagle_calib.calibration import Observed
from eagle_export import bundle
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.checking.limits import FidelityError
from eagle_export.checking.worst_layers import layers_of
from eagle_export.commands.cli import main
from eagle_export.graphs.pair import build_graphs, open_pair
from eagle_export.graphs.weights import num_bytes
from eagle_export.reading.families.source import load_source
from eagle_export.recipes.blocks import rounded
from eagle_export.recipes.embedding import EmbeddingBlocks
from eagle_export.recipes.graph import linears
from eagle_export.recipes.plan import INT4, INT8
from eagle_export.recording.self_calibration import KEPT, Listed, Recorded, observe_source
from eagle_export.writing.automatic import Option, Sensitivity, chosen, rows_of_all
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import EagleError
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.text.tokenizer import Text
from export_workplace import make_target
from onnx_session import open_model

TARGET = GOLDEN / "target"


def test_every_linear_layer_has_recorded_inputs_and_equal_calls_record_the_same() -> None:
    pair = open_pair(TARGET, GOLDEN / HEADS["eagle3"])
    assert pair.head is not None
    recorded = observe_source(TARGET, Text(TARGET), None, pair.head)
    again = observe_source(TARGET, Text(TARGET), None, pair.head)
    layers = [layer for graph in build_graphs(pair, "fp32", 10).values() for layer in linears(graph)]
    assert {"head.fc.weight", "head.midlayer.mlp.up_proj.weight"} < {layer.name for layer in layers}
    assert {layer.name for layer in layers} == set(recorded.inputs) - {"model.embed_tokens.weight"}
    for layer in layers:
        seen = recorded.inputs[layer.name]
        assert seen.sample.shape[1] == layer.shape[0] and len(seen.sample) > 500
        np.testing.assert_array_equal(seen.sample, again.inputs[layer.name].sample)
    q, k = (recorded.inputs[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qk")
    assert q is k, "layers that read one tensor share its record"
    assert not recorded.importance


def test_inputs_are_recorded_on_a_text_that_is_given(tmp_path: Path) -> None:
    rows = [list(range(4, 40)), list(range(50, 90))]
    data = tmp_path / "ids.jsonl"
    data.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows), encoding="utf-8")
    recorded = observe_source(TARGET, Text(TARGET), data)
    assert {seen.rows for seen in recorded.inputs.values()} == {36 + 40}
    with pytest.raises(ExportError, match="int8-weight for backend cpu records no inputs; leave the text out"):
        export(TARGET, None, tmp_path / "b", Settings(precision="int8-weight", calibrate=data))


@pytest.mark.parametrize("grid", [INT4, INT8])
def test_an_embedding_in_blocks_is_read_as_it_was_rounded(grid: object) -> None:
    table = np.random.default_rng(0).normal(size=(50, 128)).astype(np.float32)
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["T"]))
    stored = ir.Value(
        name="e", const_value=ir.tensor(table), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([50, 128])
    )
    node = ir.node("Gather", [stored, ids])
    (rows,) = node.outputs
    rows.name, rows.type, rows.shape = "y", stored.type, ir.Shape(["T", 128])
    graph = ir.Graph([ids], [rows], nodes=[node], initializers=[stored], opset_imports={"": 24}, name="lookup")
    model = ir.Model(graph, ir_version=10)
    assert grid in (INT4, INT8)
    blocks = INT4 if grid == INT4 else INT8
    EmbeddingBlocks(blocks).apply(model)
    session = open_model(model)
    tokens = np.array([0, 7, 49, 7], np.int64)
    (read,) = session.run(None, {"input_ids": tokens})
    wanted = rounded(np.ascontiguousarray(table.T), blocks).values().T[tokens]
    np.testing.assert_allclose(read, wanted, rtol=2e-3, atol=1e-4)


def test_int4_is_four_bits_in_all_and_a_tied_table_is_stored_once(tmp_path: Path) -> None:
    def tie(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]

    tied = make_target(tmp_path / "tied", tie)
    config = json.loads((tied / "config.json").read_text(encoding="utf-8"))
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    done = export(tied, None, tmp_path / "b", Settings(precision="int4", certify=False))
    weights = done.manifest.target.graph.weights
    assert [name for name in weights if name.startswith("model.embed_tokens")] == [
        f"model.embed_tokens.weight.{part}" for part in ("int4", "scale", "zero")
    ]
    layers = linears(build_graphs(open_pair(tied, None), "fp32", 1)["target"])
    numbers = sum(math.prod(layer.shape) for layer in layers)
    graph = ir.load(tmp_path / "b" / done.manifest.target.graph.file)
    assert 8 * num_bytes(graph) / numbers < 5  # 8 % of the weights are k and v, in eight bits, and 8 % the LM head's
    with EagleModel.load(tmp_path / "b", threads=1) as model:
        plain = model.generate([5, 6, 7], max_new_tokens=24, method="vanilla").token_ids
        assert model.generate([5, 6, 7], max_new_tokens=24, method="lookup", tree="chain").token_ids == plain


def test_importance_is_the_kl_that_a_small_error_of_a_layer_adds(tmp_path: Path) -> None:
    """Of random errors in one column at a time of a layer in the middle, and in all columns of the LM head."""
    data = tmp_path / "ids.jsonl"
    texts = np.random.default_rng(0).integers(0, 256, (24, 40))
    data.write_text("".join(json.dumps({"ids": row.tolist()}) + "\n" for row in texts), encoding="utf-8")
    recorded = observe_source(TARGET, Text(TARGET), data, weighed=KEPT)
    model = load_source(TARGET)
    layers = dict(model.named_modules())
    names = {each.weight: name for name, each in layers.items() if isinstance(each, torch.nn.Linear)}
    assert {f"{name}.weight" for name in names.values()} <= set(recorded.importance)

    @torch.inference_mode()
    def logits() -> Tensor:
        result: Tensor = model(input_ids=torch.tensor(texts)).logits.log_softmax(-1)
        return result

    exact, rng = logits(), torch.Generator().manual_seed(0)
    for name, columns in (("model.layers.1.self_attn.v_proj", range(0, 16, 4)), ("lm_head", [None])):
        weight, seen = layers[name].weight, recorded.inputs[f"{name}.weight"]
        measured, estimated = 0.0, 0.0
        for column in columns:
            chosen_columns = slice(None) if column is None else slice(column, column + 1)
            error = torch.zeros(weight.shape)
            error[chosen_columns] = (
                0.02 * weight.detach().std() * torch.randn(weight[chosen_columns].shape, generator=rng)
            )
            with torch.no_grad():
                weight += error
                changed = logits()
                weight -= error
            measured += float((exact.exp() * (exact - changed)).sum(-1).mean())
            squares = np.square(seen.sample.astype(np.float32) @ error.numpy().T).mean(0)
            norms = weight.detach().square().sum(1).numpy()
            estimated += float((recorded.importance[f"{name}.weight"] * squares / norms).sum())
        assert 0.5 < estimated / measured < 2


def options(*each: tuple[int, float]) -> tuple[Option, ...]:
    return tuple(Option(INT4, size, kl) for size, kl in each)


def test_layers_are_widened_by_what_they_lose_per_byte() -> None:
    rows = [
        Sensitivity("a", options((100, 0.04), (200, 0.0))),
        Sensitivity("b", options((50, 0.05), (60, 0.03), (100, 0.0))),
        Sensitivity("c", options((1, 0.0), (2, 0.01))),
        Sensitivity("d", options((10, 0.001), (20, 0.0009), (30, 0.0))),
    ]
    wide = {
        name: tuple(each.chosen for each in chosen(rows, *budget))
        for name, budget in {
            "nothing fits": (9, None),
            "one step of b": (10, None),
            "a does not fit after b": (100, None),
            "all that help": (1000, None),
            "enough for the agreement": (None, 0.95),
            "both": (60, 0.5),
        }.items()
    }
    assert wide["nothing fits"] == (0, 0, 0, 0)
    assert wide["one step of b"] == (0, 1, 0, 0)
    assert wide["a does not fit after b"] == (0, 2, 0, 2), "the step of d that gains little for its bytes is left out"
    assert wide["all that help"] == (1, 2, 0, 2)
    assert wide["enough for the agreement"] == (1, 2, 0, 0)  # 0.041 / 2 nats are 7.2 % of the tokens, 0.0005 1.1 %
    assert wide["both"] == (0, 0, 0, 0), "half of the tokens is reached with four bits everywhere"


def test_auto_keeps_to_its_size_and_prints_what_it_decided_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bundle_of: Callable[..., Path]
) -> None:
    size = num_bytes(ir.load(bundle_of("alone", "int4") / "target/model.onnx"))
    arguments = [str(TARGET), "-p", "auto", "--no-certificate", "--size", f"{size / 1e3}kB"]
    assert main([*arguments, "-o", str(tmp_path / "b")]) == 0
    out = capsys.readouterr().out
    recipe = read_manifest(tmp_path / "b").target.graph.recipe
    layers = {layer.name for layer in layers_of(build_graphs(open_pair(TARGET, None), "fp32", 1)["target"])}
    stored = {name: recipe[name].split(",")[0] for name in layers}
    assert len(set(stored.values())) > 1 and all(name in out for name in layers)
    assert size - 4000 < num_bytes(ir.load(tmp_path / "b/target/model.onnx")) <= size
    assert main([*arguments, "-o", str(tmp_path / "again"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["sensitivities"]
    grids = {row["name"]: row["options"][row["chosen"]]["grid"] for row in rows}
    assert {name: f"int{grid['bits']} in blocks of {grid['size']}" for name, grid in grids.items()} == stored
    with EagleModel.load(tmp_path / "b", threads=1) as model:
        plain = model.generate([5, 6, 7], max_new_tokens=24, method="vanilla").token_ids
        assert model.generate([5, 6, 7], max_new_tokens=24, method="lookup", tree="chain").token_ids == plain


def test_an_experts_share_is_that_of_all_rows() -> None:
    """Whichever layers are left to be measured."""
    rows = {"model.layers.0.mlp.experts.0.up_proj.weight": 3, "model.layers.0.self_attn.q_proj.weight": 8}
    empty = np.zeros(0, np.float32)
    assert rows_of_all(Recorded(Listed(rows, lambda count: Observed(count, empty, empty)))) == 8


def test_a_kept_layer_stays_and_a_tied_table_is_read_as_its_lm_head_is_stored(tmp_path: Path) -> None:
    def tie(tensors: dict[str, Tensor]) -> None:
        del tensors["lm_head.weight"]

    tied = make_target(tmp_path / "tied", tie)
    config = json.loads((tied / "config.json").read_text(encoding="utf-8"))
    (tied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    kept = "model.layers.1.mlp.up_proj.weight"
    done = export(tied, None, tmp_path / "b", Settings(precision="auto", size=10**9, keep=[kept], certify=False))
    weights, recipe = done.manifest.target.graph.weights, done.manifest.target.graph.recipe
    assert kept in weights and kept not in {each.name for each in done.sensitivities}
    assert [name for name in weights if name.startswith("model.embed_tokens")] == [
        f"model.embed_tokens.weight.{part}" for part in ("int8", "scale", "zero")
    ]
    assert recipe["model.embed_tokens.weight"] == "int8 in blocks of 64, as rounded for the LM head"


def test_a_long_export_says_before_its_weights_are_rounded_that_its_kl_will_be_too_large(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    bundle_of: Callable[..., Path],
) -> None:
    monkeypatch.setattr(bundle, "LONG", -1.0)
    with pytest.raises(FidelityError) as refused:
        export(TARGET, None, tmp_path / "b", Settings(precision="int4", max_kl=1e-6))
    said = re.search(r"the KL will be about (\S+), and 1e-06 is the limit", capsys.readouterr().err)
    assert said is not None and refused.value.certificate is not None
    assert 0.3 < float(said[1]) / refused.value.certificate.kl < 3
    done = export(TARGET, None, tmp_path / "b", Settings(precision="int4"))
    assert "the KL will be" not in capsys.readouterr().err
    graph = done.manifest.target.graph.file
    other = bundle_of("alone", "int4")
    assert (tmp_path / "b" / f"{graph}.data").read_bytes() == (other / f"{graph}.data").read_bytes()
    assert done.manifest.target.graph.recipe == read_manifest(other).target.graph.recipe


def test_any_agreement_takes_the_narrowest_grids_and_all_of_it_the_widest(tmp_path: Path) -> None:
    settings = Settings(precision="auto", max_kl=1000)
    least, most = (export(TARGET, None, tmp_path / str(at), replace(settings, min_agreement=at)) for at in (0, 1))
    assert {each.chosen for each in least.sensitivities} == {0}
    assert all(each.choice.kl == min(option.kl for option in each.options) for each in most.sensitivities)
    assert least.manifest.certificate is not None and most.manifest.certificate is not None
    assert least.manifest.certificate.kl > most.manifest.certificate.kl


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-p", "auto", "--min-agreement", "nan"], "the agreement is nan, but must be between 0 and 1"),
        (["-p", "auto"], "chooses layers by a size or a least agreement; give one of them"),
        (["-p", "int4", "--size", "5GB"], "belongs to precision auto, not int4"),
        (["-p", "auto", "--min-agreement", "98"], "the agreement is 98, but must be between 0 and 1"),
        (
            ["-p", "auto", "--size", "1GB", "--calibration", "c"],
            "measures the source itself; give it a text, not a folder",
        ),
        (["-p", "auto", "--size", "1kB"], "all layers in four bits take "),
        (["-p", "auto", "--size", "big"], "argument --size: 'big' is not a size like 2GB"),
    ],
)
def test_budgets_that_cannot_be_kept(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([str(TARGET), "-o", str(tmp_path / "b"), *arguments])
    except SystemExit as error:
        status = int(error.code or 0)
    assert status == 2 and says in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"size": 1_000}, "all layers in four bits take "),
        ({"keep": ["foo"]}, "no linear layer of the target is named 'foo'"),
        ({"calibrate": Path("one.jsonl")}, "one.jsonl holds no text of two tokens"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_recorded(
    changed: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.jsonl").write_text(json.dumps({"ids": [1]}))
    monkeypatch.setattr(bundle, "recorded_inputs", None)
    with pytest.raises(EagleError, match=says):
        export(TARGET, None, tmp_path / "b", precision="auto", **{"size": 10**9, **changed})


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_in_four_bits_is_rounded_for_inputs_that_were_recorded(kind: str, tmp_path: Path) -> None:
    done = export(TARGET, GOLDEN / HEADS[kind], tmp_path / "b", Settings(precision="int8", certify=False))
    assert done.manifest.head is not None
    recipe = done.manifest.head.graph.recipe
    blocks = {name: how for name, how in recipe.items() if "blocks" in how}
    table = blocks.pop("model.embed_tokens.weight")
    assert all(how.endswith("errors compensated") for how in blocks.values())
    wide = [name for name, how in blocks.items() if not how.startswith("int4 in blocks of")]
    assert [name.endswith("lm_head.weight") for name in wide] == [True]
    assert table == blocks[wide[0]].split(",")[0] == "int8 in blocks of 64"
    # q, k, v, o, gate, up, down, and EAGLE-1's fc: EAGLE-3's is in the target's graph
    assert len(blocks) - 1 == {"eagle1": 8, "eagle3": 7}[kind]
