"""Every family of targets, tiny and random: its bundles compute what transformers computes, and decode losslessly."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file

from conftest import needs_operators
from eagle_calib.calibration import Observed
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import build_graphs, open_pair
from eagle_export.graphs.weights import graph_spec
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.reading.families.source import load_source
from eagle_export.reading.families.target import open_target
from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.convolutions import Convolutions
from eagle_export.recipes.delta_nets import DeltaNets
from eagle_export.recipes.graph import WINDOW, linears
from eagle_export.recipes.plan import INT8
from eagle_export.recipes.smooth import Smooth, groups
from eagle_export.recipes.weight_blocks import simulated_blocks
from eagle_export.recording.layered import LayeredModel
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import Tree
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.target import Target
from eagle_runtime.opening.exact_rows import equal_rows
from eagle_runtime.ort.session import OrtSession
from insides import bundle_in
from tiny_families import CONTEXT, HIDDEN, LAYERS, ROWS, VOCAB, WIDE_PHI, Row, save_source, source_of

# Whose heads read the last hidden states, so that one trace of the target serves all precisions; others read taps.
UNTAPPED = (
    "Qwen3.5",
    "Granite 4",
    "Gemma-2",
    "Gemma-4, with layers that use others' keys",
    "Gemma-4, with values that are keys",
    "Gemma-4, with experts",
    "LFM2",
    "LFM2, with biases and wide convolutions",
    "LFM2, with experts",
    "Qwen3.5, with experts",
    "Mixtral",
    "gpt-oss",
)


def save_head(folder: Path, tapped: bool) -> None:
    """A random EAGLE-3 head of two taps, or an EAGLE-1 head."""
    torch.manual_seed(11)
    layer, width = ("midlayer", 2 * HIDDEN) if tapped else ("layers.0", HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN)}
    for name in "qkv":
        shapes[f"{layer}.self_attn.{name}_proj.weight"] = (HIDDEN, width)
    shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HIDDEN)
    for name, shape in (("gate", (40, HIDDEN)), ("up", (40, HIDDEN)), ("down", (HIDDEN, 40))):
        shapes[f"{layer}.mlp.{name}_proj.weight"] = shape
    shapes[f"{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "vocab_size": VOCAB, "bias": False}
    if tapped:
        shapes |= {"norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
        shapes |= {f"{layer}.{name}.weight": (HIDDEN,) for name in ("hidden_norm", "input_layernorm")}
        sizes["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2]}
    folder.mkdir()
    save_file(
        {name: torch.randn(shape) * 0.3 + ("norm" in name) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(sizes))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """row -> checkpoint of its model."""
    base = tmp_path_factory.mktemp("families")

    @cache
    def folder_of(name: str) -> Path:
        folder = base / str(list(ROWS).index(name)) / "source"
        save_source(ROWS[name], folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def bundles(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """row, precision -> bundle of the row's model, with a random head unless it is fp32 or to be the target alone."""
    heads = tmp_path_factory.mktemp("heads")
    for tapped in (False, True):
        save_head(heads / str(tapped), tapped)
    texts = heads / "texts.jsonl"  # a model takes a second to write its own, as it does in test_source_text.py
    ids = np.random.default_rng(4).integers(0, VOCAB, (4, CONTEXT)).tolist()
    texts.write_text("".join(json.dumps({"ids": text}) + "\n" for text in ids))

    @cache
    def bundle(name: str, precision: str, alone: bool = False) -> Path:
        source = sources(name)
        folder = source.with_name(f"{precision} alone" if alone else precision)
        head = None if alone or precision == "fp32" else heads / str(name not in UNTAPPED)
        calibrate = None if precision == "fp32" else texts
        export(source, head, folder, Settings(precision=precision, certify=False, calibrate=calibrate))
        return folder

    return bundle


def random_tree(rng: np.random.Generator, nodes: int) -> Tree:
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, nodes))])
    return Tree(rng.integers(0, VOCAB, nodes), parents, np.zeros(nodes, np.float32))


def path_to(tree: Tree, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return path


@torch.no_grad()
def assert_equals_source(source: Any, target: Target) -> None:
    """Compares rows after an empty past, two trees after some past, and a chunk in between."""

    def assert_rows(texts: list[list[int]], logits: Any, features: Any) -> None:
        """Compares the last row of each text; texts are filled up to the longest, which no row before sees."""
        last = [len(text) - 1 for text in texts]
        ids = torch.tensor([text + [0] * (max(last) + 1 - len(text)) for text in texts])
        out = source(ids, output_hidden_states=True)
        rows = range(len(texts)), last
        np.testing.assert_allclose(logits, out.logits[rows].numpy(), atol=1e-4)
        np.testing.assert_allclose(features, out.hidden_states[-1][rows].numpy(), atol=1e-4)

    rng = np.random.default_rng(3)
    text = rng.integers(0, VOCAB, 90).tolist()
    logits, features = target.prefill(text)
    out = source(torch.tensor([text]), output_hidden_states=True)
    np.testing.assert_allclose(np.asarray(features), out.hidden_states[-1][0].numpy(), atol=1e-4)
    assert_rows([text], logits[None], np.asarray(features)[-1:])
    for _ in range(2):
        tree = random_tree(rng, 24)
        logits, features = (np.array(rows) for rows in target.verify(tree))
        paths = [path_to(tree, node) for node in range(tree.num_nodes)]
        assert_rows([text + tree.tokens[path].tolist() for path in paths], logits, features)
        target.cache.keep(np.array(paths[-1]))
        text += tree.tokens[paths[-1]].tolist()
    whole = np.concatenate(list(target.score(text)))
    np.testing.assert_allclose(whole, source(torch.tensor([text])).logits[0].numpy(), atol=1e-4)


def test_a_release_of_transformers_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FAMILIES["ministral3"].model_class() and FAMILIES["llama"].model_class()
    monkeypatch.setattr("transformers.__version__", "5.9.1")
    assert FAMILIES["llama"].model_class()
    with pytest.raises(ExportError, match=r"Ministral-3 needs transformers 5\.24\.0 or newer; 5\.9\.1 is installed"):
        FAMILIES["ministral3"].model_class()


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "no rotation": ("SmolLM3", {"no_rope_layers": [0] * LAYERS}, {}, "no layer rotates its keys"),
    "an unknown family": ("Llama", {"model_type": "gpt2"}, {}, "model_type is 'gpt2', but only 'llama', 'mistral'"),
    "images": ("Gemma-3", {"model_type": "idefics3", "text_config": {}}, {}, "'idefics3' reads more than text"),
    "quantised": ("Qwen3", {"quantization_config": {"bits": 4}}, {}, "the weights are quantised already"),
    "rope by length": ("Mistral", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "'dynamic' depends on"),
    "rope by length, Phi-3": ("Phi-4-mini", {"rope_parameters": {"rope_type": "dynamic"}}, {}, "'dynamic' depends on"),
    "rope by length, one table of two": (
        "Gemma-3",
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}}},
        {},
        "'dynamic' depends on",
    ),
    "rope by length, OLMo-3": (
        "OLMo-3",
        {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "rope_theta": 1e4}, "sliding_attention": {}}},
        {},
        "'dynamic' depends on",
    ),
    "both directions": ("Gemma-3", {"use_bidirectional_attention": True}, {}, "use_bidirectional_attention is set"),
    "a window in bytes": ("Mistral", {}, {"cache_precision": "int8"}, "layers with a sliding window, which an int8"),
    "experts in groups": ("GLM-4.5-Air", {"n_group": 2}, {}, "n_group is 2, but experts are chosen from one group"),
    "norms of GLM-4.5": ("GLM-4.5-Air", {"use_qk_norm": True}, {}, "use_qk_norm is set, which is not supported"),
    "a convolution in bytes": (
        "LFM2",
        {},
        {"cache_precision": "int8"},
        "a convolution in the place of attention, which",
    ),
    "a convolution on GPUs": (
        "LFM2",
        {},
        {"backend": "cuda", "precision": "fp16"},
        "a convolution in the place of attention, which backend cuda cannot run; export it for backend cpu",
    ),
    "a layer of another kind": (
        "LFM2",
        {"layer_types": ["conv", "mamba", "conv", "full_attention"]},
        {},
        "a layer is of type 'mamba', not 'conv' or 'full_attention'",
    ),
    "a state on GPUs": (
        "Qwen3.5",
        {},
        {"backend": "cuda", "precision": "fp16"},
        "a state in the place of attention, which backend cuda cannot run; export it for backend cpu",
    ),
    "a state space on GPUs": (
        "Granite 4",
        {},
        {"backend": "cuda", "precision": "fp16"},
        "a state in the place of attention, which backend cuda cannot run; export it for backend cpu",
    ),
    "a layer of another kind than linear attention": (
        "Qwen3.5",
        {"layer_types": ["linear_attention", "mamba", "full_attention", "linear_attention"]},
        {},
        "a layer is of type 'mamba', not 'linear_attention' or 'full_attention'",
    ),
    "states alone": (
        "Qwen3.5",
        {"layer_types": ["linear_attention"] * LAYERS},
        {},
        "no layer is of type 'full_attention'",
    ),
    "values that share no keys": ("Qwen3.5", {"linear_num_value_heads": 3}, {}, "3 heads of values cannot share 2"),
    "no attention in layers": ("Granite 4", {"layer_types": None}, {}, "layer_types is no list, so that no layer has"),
    "limited steps": ("Granite 4", {"time_step_limit": [0.0, 1.0]}, {}, r"time_step_limit is \[0\.0, 1\.0\], but only"),
    "a state space with biases": ("Granite 4", {"mamba_proj_bias": True}, {}, "mamba_proj_bias is True, but only"),
    "a state space of other sizes": ("Granite 4", {"mamba_d_state": 8}, {}, r"conv1d.bias' has shape \[96\], but"),
    "experts without a correction": ("LFM2, with experts", {"use_expert_bias": False}, {}, "use_expert_bias is false"),
    "experts of an unknown number": ("Gemma-4, with experts", {"num_experts": None}, {}, "num_experts is None"),
    "an odd number of heads": (
        "LFM2",
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {},
        "even number of heads",
    ),
    "a bound in TensorRT": (
        "Gemma-2",
        {},
        {"backend": "tensorrt-rtx", "precision": "fp16"},
        "bounded scores, which TensorRT cannot run",
    ),
    "a bound in bytes": (
        "Gemma-2",
        {"sliding_window": CONTEXT},
        {"cache_precision": "int8"},
        "bounded scores, which an int8 cache cannot have",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_before_any_work(
    case: str, sources: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, changes, settings, message = REFUSED[case]
    source = shutil.copytree(sources(name), tmp_path / "source")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "rope_scaling" in changes:
        del config["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.setattr("eagle_export.bundle.build_graphs", None)
    with pytest.raises(ExportError, match=message) as refusal:
        export(source, None, tmp_path / "bundle", Settings(certify=False, **{"precision": "int8", **settings}))
    assert "\n" not in str(refusal.value) and not (tmp_path / "bundle").exists()


def test_a_family_that_transformers_lacks_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source_of(ROWS["SmolLM3"]).save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__="5.0"))
    with pytest.raises(ExportError, match=r"transformers 5\.0 has no SmolLM3ForCausalLM.*install a newer"):
        open_pair(tmp_path, None)


def test_a_window_as_long_as_the_context_adds_nothing(bundles: Callable[[str, str], Path], tmp_path: Path) -> None:
    row = Row("mistral", {"sliding_window": CONTEXT})
    source_of(row).save_pretrained(tmp_path / "source")
    export(tmp_path / "source", None, tmp_path / "bundle", Settings(certify=False))
    nodes = [
        len(ir.load(folder / "target/model.onnx").graph) for folder in (tmp_path / "bundle", bundles("Llama", "fp32"))
    ]
    assert nodes[0] == nodes[1]


def test_masks_fit_layers_whose_keys_serve_more_heads(bundles: Callable[[str, str], Path]) -> None:
    """As with a window that is as long as the context: without windows, over a text that is shorter than they are."""
    name = "Gemma-4, with values that are keys"
    folder = bundles(name, "fp32") / "target"
    graph = ir.load(folder / "model.onnx")
    for node in graph.graph:
        node.metadata_props.pop(WINDOW, None)
    ExactAttention().apply(graph)
    ir.save(graph, folder / "whole.onnx")
    text = np.random.default_rng(3).integers(0, VOCAB, 60).tolist()
    with OrtSession(folder / "whole.onnx", graph_spec("whole.onnx", graph, {}), threads=1) as session:
        logits = np.concatenate(list(Target(session, CONTEXT).score(text)))
    with torch.no_grad():
        expected = source_of(ROWS[name])(torch.tensor([text])).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_smoothing_moves_factors_into_the_bias_of_v(bundles: Callable[[str, str], Path]) -> None:
    """The graph computes the same with and without."""
    name = "Qwen2.5, tied, upper layers with a window"
    fp32 = bundles(name, "fp32") / "target"
    graph = ir.load(fp32 / "model.onnx")
    rng = np.random.default_rng(2)
    seen = {}
    for linear in linears(graph):
        sample = rng.normal(size=(64, linear.shape[0])).astype(np.float32) * rng.uniform(0.1, 9, linear.shape[0])
        seen[linear.name] = Observed(64, np.abs(sample).max(0).astype(np.float32), sample.astype(np.float32))
    with_bias = [group for group in groups(graph) if group.bias is not None]
    assert len(with_bias) == LAYERS

    def biases() -> list[Any]:
        values = [group.bias.const_value for group in with_bias if group.bias is not None]
        return [value.numpy().copy() for value in values if value is not None]

    before = biases()
    Smooth(seen, partial(simulated_blocks, INT8)).apply(graph)
    assert any(not np.array_equal(*pair) for pair in zip(before, biases(), strict=True))
    ir.save(graph, fp32 / "smooth.onnx", external_data="smooth.onnx.data")
    spec = read_manifest(fp32.parent).target.graph
    with OrtSession(fp32 / "smooth.onnx", spec, threads=1) as session:
        assert_equals_source(source_of(ROWS[name]), Target(session, CONTEXT))


@pytest.mark.parametrize("name", ROWS)
def test_logits_and_features_equal_transformers(
    name: str, sources: Callable[[str], Path], bundles: Callable[[str, str], Path]
) -> None:
    """The traced graph, and the same graph with the attention of quantised targets."""
    source, fp32 = source_of(ROWS[name]), bundles(name, "fp32")
    with EagleModel.load(fp32, threads=1) as model:
        assert_equals_source(source, bundle_in(model).target)
    graph = build_graphs(open_pair(sources(name), None), "fp32", top_k=1)["target"]
    changed = (step.apply(graph) for step in (ExactAttention(), Convolutions(in_heads=True), DeltaNets()))
    assert sum(map(len, changed)) == LAYERS
    ir.save(graph, fp32 / "target/exact.onnx")
    spec = graph_spec("exact.onnx", graph, {})
    with OrtSession(fp32 / "target/exact.onnx", spec, threads=1) as session:
        assert_equals_source(source, Target(session, CONTEXT))


@pytest.mark.parametrize("name", ROWS)
def test_layer_by_layer_equals_the_whole(name: str, sources: Callable[[str], Path]) -> None:
    texts = [list(range(3, 40)), [9, 9, 1]]
    model = LayeredModel(open_target(sources(name)), texts)
    for _ in range(LAYERS):
        assert list(model.run_layer()) == [0, 1]
    whole = load_source(sources(name))
    for number, text in enumerate(texts):
        with torch.inference_mode():
            ids = torch.tensor([text])
            hidden, logits = whole.model(input_ids=ids).last_hidden_state, whole(input_ids=ids).logits
        end = model.last_hidden(number)
        np.testing.assert_array_equal(end.numpy(), hidden.numpy())
        np.testing.assert_allclose(model.logits(end[0]).numpy(), logits[0].numpy(), atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ROWS)
def test_drafts_change_no_token_and_no_bit(name: str, precision: str, bundles: Callable[[str, str], Path]) -> None:
    prompt = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()
    methods = ["lookup"] if precision == "fp32" else ["eagle", "eagle+lookup"]
    with EagleModel.load(bundles(name, precision), threads=1) as model:
        ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
        for settings in ways:
            plain = model.generate(prompt, method="vanilla", max_new_tokens=60, **settings)
            for method in methods:
                drafted = model.generate(prompt, method=method, max_new_tokens=60, **settings)
                assert drafted.token_ids == plain.token_ids
        assert precision == "fp32" or equal_rows(bundle_in(model).target)


# Families with norms of heads or of rows after a product, products that are cut into parts, or multipliers.
ONE_NODE = (
    "Qwen3",
    "Qwen3.5",
    "Granite 4",
    "Gemma-2",
    "Gemma-3",
    "OLMo-2",
    "Granite",
    "Phi-3, with a window",
    "Phi-4-mini",
    WIDE_PHI,
    "ERNIE 4.5",
)
BIASED = "Qwen2.5, tied, upper layers with a window"
# Rotations before norms, or of heads of this width, queries that grow, MLPs without a gate and multipliers after layers
# are steps of their own.
CONVOLVED = ("LFM2", "LFM2, with biases and wide convolutions")
GEMMA4 = ("Gemma-4, with layers that use others' keys", "Gemma-4, with values that are keys")
APART = ("Hunyuan", "GLM-4", "GLM-4-0414", "OLMo-3", "Ministral-3", "EXAONE 4.0", "AFM", *GEMMA4, *CONVOLVED)
MIXTURES = (
    "Mixtral",
    "Qwen3-MoE, one layer without experts",
    "OLMoE",
    "gpt-oss",
    "ERNIE 4.5, with experts",
    "GLM-4.5-Air",
    "Granite, with experts",
    "LFM2, with experts",
    "Qwen3.5, with experts",
    "Gemma-4, with experts",
    "Granite 4, with experts and rotation",
)
# Whose bits no processor changes. Routers, a cap of logits and norms between products are ONNX Runtime's, and so are
# rotations of heads of width 8, which no published model has.
SAME_EVERYWHERE = ("Qwen3", "Qwen3.5", "Granite 4", "Gemma-3", WIDE_PHI, "ERNIE 4.5")
# Exported as targets alone, which other tests have traced; the others' native forms give a head its taps.
ALONE = ("Gemma-3", "Phi-4-mini", WIDE_PHI, "ERNIE 4.5", "ERNIE 4.5, with experts", "Hunyuan")


@needs_operators
@pytest.mark.parametrize("name", [BIASED, *ONE_NODE, *MIXTURES, *APART])
def test_the_native_form_computes_the_same(name: str, bundles: Callable[..., Path]) -> None:
    """With biases, norms, sums and the experts of a mixture as steps of the layers' node."""
    folder = bundles(name, "int8", alone=name in ALONE)
    text = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()
    logits = {}
    for backend in ("cpu", "native"):
        with EagleModel.load(folder, backend=backend, threads=1) as model:
            logits[backend] = np.concatenate(list(bundle_in(model).target.score(text)))
    apart = np.abs(logits["native"] - logits["cpu"]).mean() / logits["cpu"].std()
    assert apart < 0.02
    operators = [node.op_type for node in ir.load(folder / "target/native.onnx").graph]
    assert "MatMulNBits" not in operators
    native = read_manifest(folder).target.graph.native
    assert native is not None and native.same_everywhere is (name in SAME_EVERYWHERE)
    if name in MIXTURES:
        assert "NonZero" not in operators  # which finds an expert's rows
        return
    if name in APART:
        return
    assert "RMSNormalization" not in operators
    if name in (
        "Qwen3",
        "Qwen3.5",
        "Granite 4",
        "Gemma-2",
        WIDE_PHI,
    ):  # the others' heads of width 8 are not rotated by the operator
        assert operators.count("RowExactSteps") < LAYERS - 1
