"""A quantised target's logits are equal to the bit in any tree, on any number of threads, for any shape of heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import needs_operators
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.recipes.attention import ExactAttention
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import MAX_DEPTH, Tree
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.row_padding import RowPadding
from eagle_runtime.core.target import Target
from eagle_runtime.opening.exact_rows import RowCheck
from eagle_runtime.ort.operators import native_operators
from eagle_runtime.ort.session import OrtSession
from insides import bundle_in

LONG = 330  # more than one block of ONNX Runtime's products


def random_tree(rng: np.random.Generator, nodes: int, chain: bool) -> Tree:
    parents = np.array([-1, *(node - 1 if chain else int(rng.integers(0, node)) for node in range(1, nodes))])
    return Tree(rng.integers(0, 256, nodes), parents, np.zeros(nodes, np.float32))


def assert_equal_alone(model: EagleModel, prompt: list[int], tree: Tree) -> None:
    """Compares the last node of a tree and one in the middle with the same tokens decoded one at a time."""
    target = bundle_in(model).target
    target.prefill(prompt)
    logits, features = (np.array(rows) for rows in target.verify(tree))
    for last in {tree.num_nodes // 2, tree.num_nodes - 1}:
        path = [last]
        while path[0]:
            path.insert(0, int(tree.parents[path[0]]))
        target.prefill(prompt)
        for node in path:
            one = Tree(tree.tokens[[node]], np.array([-1]), np.zeros(1, np.float32))
            alone, feature = target.verify(one)
            target.cache.keep(np.array([0]))
            np.testing.assert_array_equal(alone[0], logits[node])
            np.testing.assert_array_equal(np.asarray(feature)[0], features[node])


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    "precision", ["int8", "int8-token", "int8-static", "int8-weight", "int4", "int4-int8", "int8+int8 cache"]
)
def test_logits_are_the_same_to_the_bit_in_any_tree(
    bundle_of: Callable[..., Path], precision: str, threads: int
) -> None:
    check_any_tree(bundle_of("eagle3", precision), "cpu", threads)


@needs_operators
@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(
    "precision", ["int8", "int8-token", "int8-static", "int8-weight", "int4", "int4-int8", "int8+int8 cache"]
)
def test_logits_of_the_native_form_are_the_same_to_the_bit_in_any_tree(
    bundle_of: Callable[..., Path], precision: str, threads: int
) -> None:
    check_any_tree(bundle_of("eagle3", precision), "native", threads)


def check_any_tree(bundle: Path, backend: str, threads: int) -> None:
    rng = np.random.default_rng(5)
    with EagleModel.load(bundle, threads=threads, backend=backend) as model:
        assert backend == "cpu" or model.row_check == RowCheck(RowPadding())
        for length in (1, 39, 70, LONG):  # past rows: the root's alone, none far enough back for fp32, a few, many
            for nodes, chain in ((2, False), (9, False), (60, False), (MAX_DEPTH + 1, True)):
                assert_equal_alone(model, rng.integers(0, 256, length).tolist(), random_tree(rng, nodes, chain))


@pytest.mark.parametrize(("kv_heads", "width"), [(4, 64), (1, 64), (2, 256), (2, 24)])
def test_heads_of_any_shape(kv_heads: int, width: int, tmp_path: Path) -> None:
    """One query head per key, one key for all, wide heads, and a width that cannot be divided."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=width,
        max_position_embeddings=512,
    )
    source = LlamaForCausalLM(config).eval()
    source.save_pretrained(tmp_path / "target")
    for precision in ("fp32", "int8"):
        export(
            tmp_path / "target", None, tmp_path / precision, Settings(precision=precision, certify=False, record=False)
        )
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 256, LONG).tolist()
    for threads in (2,) if width % 16 else (2, 8):
        for backend in ("cpu", "native") if native_operators().library else ("cpu",):
            with EagleModel.load(tmp_path / "int8", threads=threads, backend=backend) as model:
                assert_equal_alone(model, prompt, random_tree(rng, 30, chain=False))
                assert_equal_alone(model, prompt, random_tree(rng, 30, chain=True))

    folder = tmp_path / "fp32/target"
    graph = ir.load(folder / "model.onnx")
    assert len(ExactAttention().apply(graph)) == config.num_hidden_layers
    ir.save(graph, folder / "exact.onnx")
    with OrtSession(folder / "exact.onnx", read_manifest(tmp_path / "int8").target.graph, threads=1) as session:
        target = Target(session, capacity=512)
        with torch.no_grad():
            expected = source(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(target.prefill(prompt[:-1])[0], expected[-2], atol=2e-5)
        one = Tree(np.array(prompt[-1:]), np.array([-1]), np.zeros(1, np.float32))
        np.testing.assert_allclose(target.verify(one)[0][0], expected[-1], atol=2e-5)


def test_attention_without_a_cache_is_refused(bundle_of: Callable[..., Path]) -> None:
    model = ir.load(bundle_of("eagle1") / "target/model.onnx")
    attention = next(node for node in model.graph if node.op_type == "Attention")
    attention.replace_input_with(1, attention.inputs[0])
    with pytest.raises(ExportError, match="does not read its keys from the cache"):
        ExactAttention().apply(model)
