"""Experts that are computed for their rows alone: the same bits as the dense form, whatever rows share the pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from conftest import GOLDEN
from eagle_calib import observe
from eagle_calib.calibration import LEAST_ROWS
from eagle_export.base import data_file
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import Pair, build_graphs, open_pair
from eagle_export.graphs.weights import graph_spec, save
from eagle_export.inspection.sizes import graph_bytes, target_shapes
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.recipes.plan import apply, plan
from eagle_export.recipes.routed_experts import RoutedExperts, mixtures
from eagle_export.recording import recording, self_calibration
from eagle_export.recording.layered_recording import observe_layers, texts_to_read
from eagle_export.writing.settings import Settings
from eagle_runtime.base.tree import Tree
from eagle_runtime.core.target import Target
from eagle_runtime.opening.exact_rows import find_padding
from eagle_runtime.ort.session import OrtSession
from eagle_runtime.text.tokenizer import Text
from tiny_families import HIDDEN as NARROW
from tiny_families import ROWS, save_source

VOCAB, HIDDEN, LAYERS, EXPERTS, CHOSEN = 64, 64, 2, 4, 2
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "intermediate_size": 48},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 48, "intermediate_size": 64},
    "olmoe": {"num_experts": EXPERTS, "intermediate_size": 48},
}
RENORMALISED: dict[str, dict[str, Any]] = {  # families that divide a row's shares by their sum
    "Qwen3-MoE, one layer without experts": {"num_experts": 8, "num_experts_per_tok": 6},
    "ERNIE 4.5, with experts": {"moe_num_experts": 8, "moe_k": 6, "moe_layer_start_index": 0, "moe_layer_end_index": 0},
    "GLM-4.5-Air": {"n_routed_experts": 8, "num_experts_per_tok": 6, "first_k_dense_replace": 0},
    "Gemma-4, with experts": {
        "num_experts": 8,
        "top_k_experts": 6,
        "num_hidden_layers": 2,  # of both kinds
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
PRECISIONS = ("int8", "int4", "int8-token", "int8-weight", "int4-int8")


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """model_type -> a random target."""
    opened: dict[str, Pair] = {}

    def pair(model_type: str) -> Pair:
        if model_type not in opened:
            torch.manual_seed(5)
            cls = FAMILIES[model_type].model_class()
            sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
            ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "initializer_range": 0.15}
            settings = {**sizes, **heads, **ends, **CONFIGS[model_type], "num_experts_per_tok": CHOSEN}
            folder = tmp_path_factory.mktemp("experts") / model_type
            cls(cls.config_class(**settings)).save_pretrained(folder)
            opened[model_type] = open_pair(folder, None)
        return opened[model_type]

    return pair


def session_of(pair: Pair, precision: str, folder: Path, *, routed: bool) -> OrtSession:
    """The target's graph at a precision."""
    recipe = plan("cpu", precision, None, None)
    graph = build_graphs(pair, recipe.traced, 1, routed=routed)["target"]
    done = apply(recipe.passes["target"], graph)
    folder.mkdir()
    save(graph, folder / "model.onnx")
    return OrtSession(folder / "model.onnx", graph_spec("model.onnx", graph, done), threads=2)


def random_tree(rng: np.random.Generator, nodes: int, root: int) -> Tree:
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))])
    tokens = rng.integers(0, VOCAB, nodes)
    tokens[0] = root
    return Tree(tokens, parents, np.zeros(nodes, np.float32))


@pytest.mark.parametrize("model_type", CONFIGS)
@pytest.mark.parametrize("precision", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_a_row_has_its_bits_with_any_neighbours(
    model_type: str, precision: str, pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    with session_of(pair_of(model_type), precision, tmp_path / "routed", routed=True) as session:
        assert find_padding(session).padding is not None
        target = Target(session, 200)
        target.prefill(rng.integers(0, VOCAB, 90).tolist())
        for root in range(4):
            seen = []
            for rows in (1, 2, 7, 7, 30, 30):
                logits, features = target.verify(random_tree(rng, rows, root))
                seen.append((logits[0].copy(), np.array(features)[0]))
            for logits, features in seen[1:]:
                np.testing.assert_array_equal(logits, seen[0][0])
                np.testing.assert_array_equal(features, seen[0][1])


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_row_of_one_mixture_has_its_bits_in_fp32(
    model_type: str, pair_of: Callable[[str], Pair], tmp_path: Path
) -> None:
    """The mixture of the first layer alone: attention in fp32 is equal to some 1e-6 only, with and without experts."""
    graph = build_graphs(pair_of(model_type), "fp32", 1, routed=False)["target"]
    mixture = mixtures(graph)[0]
    total, x = str(mixture.total.outputs[0].name), str(mixture.x.name)
    answers = {}
    rng = np.random.default_rng(6)
    some = rng.normal(size=(1, 64, HIDDEN)).astype(np.float32)
    for form in ("dense", "routed"):
        if form == "routed":
            assert len(RoutedExperts().apply(graph)) == LAYERS * EXPERTS
        ir.save(graph, tmp_path / "whole.onnx")
        onnx.utils.extract_model(tmp_path / "whole.onnx", tmp_path / f"{form}.onnx", [x], [total])
        session = onnxruntime.InferenceSession(tmp_path / f"{form}.onnx", providers=["CPUExecutionProvider"])

        def run(rows: Any, session: Any = session) -> Any:
            return session.run(None, {x: rows})[0][0]

        answers[form] = run(some)
    alone = np.concatenate([run(some[:, row : row + 1]) for row in range(64)])
    np.testing.assert_array_equal(answers["routed"], alone)
    np.testing.assert_array_equal(answers["routed"], answers["dense"])
    for count in (2, 7, 30):
        for _ in range(5):
            picked = rng.choice(64, count, replace=False)
            np.testing.assert_array_equal(run(some[:, picked]), alone[picked])


@pytest.mark.parametrize("name", RENORMALISED)
def test_shares_of_a_row_do_not_depend_on_the_rows_before_it(name: str, tmp_path: Path) -> None:
    """Reductions of five to seven numbers add up a row in another order where its place in memory is another."""
    row = ROWS[name]
    save_source(replace(row, config={**row.config, "num_hidden_layers": 1, **RENORMALISED[name]}), tmp_path / "source")
    graph = build_graphs(open_pair(tmp_path / "source", None), "fp32", 1, routed=False)["target"]
    mixture = mixtures(graph)[0]
    norm = mixture.x.producer()  # whose input Gemma-4's router reads
    assert norm is not None and norm.op_type == "RMSNormalization" and norm.inputs[0] is not None
    x, shares = str(norm.inputs[0].name), str(mixture.shares.name)
    ir.save(graph, tmp_path / "whole.onnx")
    onnx.utils.extract_model(tmp_path / "whole.onnx", tmp_path / "shares.onnx", [x], [shares])
    session = onnxruntime.InferenceSession(tmp_path / "shares.onnx", providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(6).normal(size=(1, 64, NARROW)).astype(np.float32)
    whole: Any = session.run(None, {x: rows})[0]
    alone = [session.run(None, {x: rows[:, row : row + 1]})[0] for row in range(64)]
    np.testing.assert_array_equal(whole, np.concatenate(alone, axis=1))
    assert ((whole != 0).sum(-1) == 6).all()


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=() if name in ("int8", "int4") else pytest.mark.slow) for name in PRECISIONS]
)
def test_routed_equals_dense(precision: str, pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    """To the bit: the experts without rows add zeros to the dense sum."""
    outputs = []
    for routed in (False, True):
        rng = np.random.default_rng(8)
        with session_of(pair_of("olmoe"), precision, tmp_path / str(routed), routed=routed) as session:
            assert find_padding(session).padding is not None
            target = Target(session, 200)
            target.prefill(rng.integers(0, VOCAB, 90).tolist())
            outputs.append([np.array(part) for part in target.verify(random_tree(rng, 17, 3))])
    for dense, routed_part in zip(*outputs, strict=True):
        np.testing.assert_array_equal(dense, routed_part)


def test_an_expert_without_rows_is_not_computed(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    """A single row has CHOSEN experts in each layer, each with a padding row."""
    pair = pair_of("mixtral")
    done = export(pair.target.folder, None, tmp_path / "bundle", Settings(certify=False))
    assert not [line for line in done.warnings if "row" in line]
    path = tmp_path / "bundle/target/model.onnx"
    model = onnx.load(path)
    down = [node for node in model.graph.node if any("down_proj" in name for name in node.input)]
    assert len(down) == LAYERS * EXPERTS
    model.graph.output.extend(onnx.ValueInfoProto(name=node.output[0]) for node in down)
    onnx.save(model, tmp_path / "wider.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "wider.onnx", providers=["CPUExecutionProvider"])
    feeds = {
        "input_ids": np.array([[3]]),
        "position_ids": np.array([[0]]),
        "tree_mask": np.zeros((1, 1, 1, 1), np.float32),
        "logit_rows": np.array([0]),
    }
    for name, spec in done.manifest.target.graph.inputs.items():
        if name.startswith("past_key_values"):
            feeds[name] = np.zeros([0 if isinstance(size, str) else size for size in spec.shape], np.float32)
    rows = [out.shape[1] for out in session.run([node.output[0] for node in down], feeds)]
    for layer in range(LAYERS):
        assert sorted(rows[layer * EXPERTS : (layer + 1) * EXPERTS]) == [0] * (EXPERTS - CHOSEN) + [2] * CHOSEN


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rng = np.random.default_rng(9)
    lengths = (120, 3, 77)
    path.write_text("".join(json.dumps({"ids": rng.integers(0, VOCAB, n).tolist()}) + "\n" for n in lengths))
    return path


@pytest.mark.parametrize("model_type", CONFIGS)
def test_an_expert_is_recorded_with_the_rows_that_are_routed_to_it(
    model_type: str, pair_of: Callable[[str], Pair], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same in three ways: transformers' whole model, layer by layer, and the exported graph."""
    for module in (self_calibration, observe):
        monkeypatch.setattr(module, "LEAST_ROWS", 1)
    pair = pair_of(model_type)
    text = Text(GOLDEN / "target")
    windows = texts_to_read(text, texts, VOCAB, 256)
    whole = self_calibration.observe_source(pair.target.folder, text, texts).inputs
    layered = observe_layers(pair.target, windows, tmp_path / "inputs").inputs
    done = export(pair.target.folder, None, tmp_path / "bundle", Settings(certify=False))
    with observe.ObservingSession(tmp_path / "bundle/target/model.onnx", done.manifest.target.graph, 1) as session:
        for window in windows:
            Target(session, 256).prefill(window)
        graph = {weight: item.observed for item in session.observed() for weight in item.weights}
    assert set(whole) == set(layered) == set(graph)
    experts = [name for name in whole if ".experts." in name]
    total = sum(map(len, windows))
    assert sum(whole[name].rows for name in experts if "up_proj" in name) == LAYERS * CHOSEN * total
    for name in experts:
        one, seen = whole[name], graph[name]
        # In fp16, of sums in another order: packed weights are those of the whole model alone.
        np.testing.assert_allclose(one.sample, layered[name].sample, rtol=2.0**-9, atol=1e-4)
        assert one.rows == layered[name].rows and 0 <= seen.rows - one.rows <= len(windows)  # a padding row per pass
        np.testing.assert_allclose(seen.channel_absmax, one.channel_absmax, rtol=1e-4)
        for row in one.sample:
            rounding = 2.0**-11 * np.abs(row.astype(np.float32))  # of the row, which is kept in fp16
            assert (np.abs(seen.sample - row) - rounding).max(-1).min() < 1e-4 * np.abs(row).max()


def test_experts_with_few_rows_are_rounded_to_nearest(
    pair_of: Callable[[str], Pair], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of("qwen3_moe")
    seen = observe_layers(pair.target, texts_to_read(Text(GOLDEN / "target"), texts, VOCAB, 256), tmp_path / "inputs")
    experts = {f"model.layers.{layer}.mlp.experts.{number}" for layer in range(LAYERS) for number in range(EXPERTS)}
    recorded = {name.rpartition(".")[0].rpartition(".")[0] for name in seen.inputs if ".experts." in name}
    assert recorded and recorded < experts, "some have fewer rows than LEAST_ROWS"
    assert all(each.rows >= LEAST_ROWS for each in seen.inputs.values())
    for precision in ("int8", "int4", "int8-token", "int4-int8"):
        recipe = plan("cpu", precision, None, None, recorded=seen.inputs)
        done = apply(recipe.passes["target"], build_graphs(pair, recipe.traced, 1)["target"])
        blocks = {name: how for name, how in done.items() if ".experts." in name and "blocks" in how}
        for name, how in blocks.items():
            assert ("compensated" in how) == (name in seen.inputs), name
        assert blocks or precision == "int8-token"
    attention = {name: each for name, each in seen.inputs.items() if ".experts." not in name}
    del attention["model.layers.0.self_attn.q_proj.weight"]
    recipe = plan("cpu", "int8-token", None, None, recorded=attention)
    graph = build_graphs(pair, recipe.traced, 1)["target"]
    with pytest.raises(ExportError, match=r"lacks layer 'model\.layers\.0\.self_attn\.q_proj\.weight'"):
        apply(recipe.passes["target"], graph)


@pytest.mark.usefixtures("fresh_traces")
def test_a_stopped_export_goes_on(
    pair_of: Callable[[str], Pair], texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With inputs recorded layer by layer, and with the whole model: the same bytes."""
    target = pair_of("olmoe").target.folder

    def exported(name: str) -> dict[str, str]:
        return export(
            target, None, tmp_path / name, Settings(precision="int4", certify=False, calibrate=texts)
        ).manifest.files

    def refuse(*_: object) -> None:
        raise ExportError("comparing takes 40.0 GB of memory and 3.0 GB are free")

    whole = exported("whole")
    monkeypatch.setattr(recording, "check_memory", refuse)
    write = data_file._write
    sizes: list[int] = []

    def writing(file: Any, content: memoryview) -> None:
        if len(sizes) == 40:
            raise KeyboardInterrupt
        write(file, content)
        sizes.append(content.nbytes)

    monkeypatch.setattr(data_file, "_write", writing)
    with pytest.raises(KeyboardInterrupt):
        exported("stopped")
    monkeypatch.setattr(data_file, "_write", write)
    assert exported("stopped") == whole
    assert not [path for path in tmp_path.iterdir() if path.name not in ("whole", "stopped")]


def test_other_backends_compute_all_experts_and_say_so(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    folder = pair_of("mixtral").target.folder
    done = export(folder, None, tmp_path / "bundle", Settings(precision="fp16", backend="tensorrt-rtx", certify=False))
    assert f"all {EXPERTS} experts of a layer are computed for every row" in str(done.warnings)
    assert len(mixtures(ir.load(tmp_path / "bundle/target/model.onnx"))) == LAYERS


@pytest.mark.parametrize("model_type", CONFIGS)
def test_inspect_counts_the_experts_of_one_row(model_type: str, pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of(model_type)
    shapes = target_shapes(pair.family, pair.target, None, None)
    experts = 4 * LAYERS * EXPERTS * 3 * HIDDEN * 48  # bytes in fp32
    table = 4 * VOCAB * HIDDEN
    cpu, card = graph_bytes(shapes, "cpu", "fp32", "target"), graph_bytes(shapes, "cuda", "fp32", "target")
    assert cpu.stored == card.stored
    assert card.stored - card.read == table
    assert cpu.stored - cpu.read == pytest.approx(table + experts * (1 - CHOSEN / EXPERTS), abs=8)
