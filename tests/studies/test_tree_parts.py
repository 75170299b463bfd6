"""EAGLE-2's tree with parts left out: valid, as the paper says, and lossless like any other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_tokenizer
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import node_depths
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.shapes import DynamicTree, TreeShape
from studies.harness import main
from studies.tree_parts import AblatedTree, ablations, connected

SIZE = (24, 3, 4)


def cycles_of(model: EagleModel, prompt: list[int], tree: TreeShape, temperature: float = 0.0) -> list[Cycle]:
    cycles: list[Cycle] = []
    model.generate(prompt, tree=tree, max_new_tokens=24, temperature=temperature, seed=3, on_cycle=cycles.append)
    return cycles


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_with_nothing_left_out_it_is_the_dynamic_tree(
    kind: str, model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    model = model_of(kind)
    for prompt in prompts[:3]:
        whole, same = (cycles_of(model, prompt, shape(*SIZE)) for shape in (DynamicTree, AblatedTree))
        assert len(whole) == len(same) > 1
        for one, other in zip(whole, same, strict=True):
            np.testing.assert_array_equal(one.tree.tokens, other.tree.tokens)
            np.testing.assert_array_equal(one.tree.parents, other.tree.parents)
            np.testing.assert_array_equal(one.tree.scores, other.tree.scores)


@pytest.mark.parametrize(("name", "shape"), ablations(*SIZE))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ablated_trees_are_trees_and_lossless(
    name: str, shape: AblatedTree, temperature: float, model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    model = model_of("eagle1")
    for prompt in prompts[:3]:
        settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        plain = model.generate(prompt, method="vanilla", **settings)
        ablated = model.generate(prompt, tree=shape, **settings)
        assert ablated.token_ids == plain.token_ids
        for cycle in cycles_of(model, prompt, shape, temperature):
            tree = cycle.tree
            assert 2 <= tree.num_nodes <= SIZE[0]
            assert tree.parents[0] == -1 and np.all(tree.parents[1:] < np.arange(1, tree.num_nodes))
            assert np.all(tree.parents[1:] >= 0)
            assert np.all(tree.scores[1:] <= tree.scores[tree.parents[1:]])
            siblings = {(parent, token) for parent, token in zip(tree.parents, tree.tokens, strict=True)}
            assert len(siblings) == tree.num_nodes


def test_each_part_left_out_changes_the_tree(model_of: Callable[..., EagleModel], prompts: list[list[int]]) -> None:
    model = model_of("eagle1")
    trees = {name: cycles_of(model, prompts[0], shape)[0].tree for name, shape in ablations(*SIZE)}
    trees["whole"] = cycles_of(model, prompts[0], DynamicTree(*SIZE))[0].tree
    seen = {name: (tuple(tree.parents.tolist()), tuple(tree.tokens.tolist())) for name, tree in trees.items()}
    assert len(set(seen.values())) == 4
    # Without reranking every level keeps the top_k that were grown, and no more, whatever they are worth.
    for name in ("no-rerank", "no-value-no-rerank"):
        assert np.bincount(node_depths(trees[name].parents)).tolist() == [1, 4, 4, 4, 4]
    # Of trees of one size, the whole one holds the likeliest paths.
    assert trees["whole"].num_nodes == trees["no-value"].num_nodes == SIZE[0]
    assert np.exp(trees["whole"].scores).sum() > np.exp(trees["no-value"].scores).sum()


def test_a_node_ranked_high_brings_its_ancestors() -> None:
    #        0 -> 2 -> 4,  1 -> 3;  5 stands alone under the root
    parents = np.array([-1, -1, 0, 1, 2, -1])
    assert connected(np.array([4, 5, 1, 3, 0, 2]), parents, 3).tolist() == [0, 2, 4]
    assert connected(np.array([5, 4, 1, 3, 0, 2]), parents, 3).tolist() == [1, 3, 5]  # 4 does not fit with 2 and 0
    assert connected(np.array([0, 1, 2, 3, 4, 5]), parents, 9).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_tree_without_room_keeps_its_top(model_of: Callable[..., EagleModel], prompts: list[list[int]]) -> None:
    """Near the end of the context trees shrink."""
    model = model_of("eagle1")
    prompt = (prompts[0] * (model.context // len(prompts[0]) + 1))[: model.context - 12]
    plain = model.generate(prompt, method="vanilla", ignore_eos=True)
    for _, shape in ablations(*SIZE):
        assert model.generate(prompt, tree=shape, ignore_eos=True).token_ids == plain.token_ids
    assert len(plain.token_ids) == 12


def test_the_table_has_a_line_per_tree(
    bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle")
    put_tokenizer(bundle)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"turns": ["one two"]}) + "\n", encoding="utf-8")
    options = ["--prompts", str(prompts), "--max-new-tokens", "12", "--threads", "1", "--temperature", "1"]
    assert main(["tree_parts", str(bundle), *options]) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == ["plain", "no-value-no-rerank", "no-value", "no-rerank", "whole"]
    assert lines[0][1:] == ["1.00", "1.00x"] and all(float(line[1]) >= 1 for line in lines)
