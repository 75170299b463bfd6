"""Several draft models: the union of their trees, the acceptance of each, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_tokenizer
from eagle_runtime import Constraint, EagleModel, RequestError
from eagle_runtime.base.tree import Tree, chain_of, node_depths
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.specinfer import MergingDrafter, followed, merged
from insides import bundle_in


def random_tree(random: np.random.Generator, nodes: int) -> Tree:
    """A tree of few tokens, so that siblings may be equal, as a drafter of one's own may make them."""
    parents = np.array([-1, *(int(random.integers(node)) for node in range(1, nodes))], np.int64)
    tokens = random.integers(0, 4, nodes)
    tokens[0] = 9
    return Tree(tokens, parents, np.r_[0, -random.random(nodes - 1)].astype(np.float32))


def paths(tree: Tree) -> set[tuple[int, ...]]:
    found = [(9,)]
    for token, parent in list(zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True))[1:]:
        found.append((*found[parent], token))
    return set(found)


@pytest.mark.parametrize("seed", range(20))
def test_the_union_has_every_path_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = [random_tree(random, int(random.integers(1, 12))) for _ in range(int(random.integers(1, 5)))]
    union = merged(trees)
    every = set().union(*map(paths, trees))
    assert paths(union) == every and union.num_nodes == len(every), "no path is missing, none is there twice"
    assert (union.parents[1:] < np.arange(1, union.num_nodes)).all() and union.parents[0] == -1
    assert union.scores[0] == 0
    for tree in trees:
        for path in paths(tree):
            assert followed(merged([tree]), path[1:]) == len(path) - 1
        assert followed(tree, [7]) == 0 == followed(tree, [])


class Fixed(Drafter):
    def __init__(self, drafted: list[int]) -> None:
        self.drafted = drafted
        self.most: list[int] = []

    def grow(self, tokens: Any, max_nodes: int) -> Tree:
        self.most.append(max_nodes)
        return chain_of(tokens[-1], self.drafted[: max_nodes - 1])

    def learn(self, step: Step) -> None:
        pass


def test_each_drafter_has_a_share_of_the_nodes_and_what_it_had_right_is_counted() -> None:
    accepted = [0, 0, 0]
    drafters = [Fixed([1, 2, 3]), Fixed([1, 5, 6]), Fixed([8])]
    drafter = MergingDrafter(drafters, accepted)
    tree = drafter.grow([4, 9], 20)
    assert tree.tokens.tolist() == [9, 1, 2, 3, 5, 6, 8] and [one.most for one in drafters] == [[7], [7], [7]]
    drafter.learn(Step(np.array([0, 1, 2]), np.array([1, 2, 7])))
    assert accepted == [2, 1, 0]
    for most in range(2, 12):
        tree = drafter.grow([4, 9], most)
        assert 2 <= tree.num_nodes <= most


@pytest.fixture(scope="module")
def drafted(bundle_of: Callable[..., Path]) -> Iterator[EagleModel]:
    drafts = [bundle_of("alone", "fp32"), bundle_of("alone", "int4")]
    with EagleModel.load(
        bundle_of("alone", "int8"), draft_bundle=drafts, threads=1, context=256, check_hashes=False
    ) as model:
        yield model


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_union_accepts_as_much_as_the_best_of_both(
    temperature: float, tree: str, drafted: EagleModel, prompts: list[list[int]]
) -> None:
    assert drafted.default_method == "specinfer"
    settings: dict[str, Any] = {
        "max_new_tokens": 40,
        "ignore_eos": True,
        "temperature": temperature,
        "seed": 3,
        "tree": tree,
        "total_token": 12,
        "depth": 3,
    }
    cycles: list[Cycle] = []
    result = drafted.generate(prompts[0], method="specinfer", on_cycle=cycles.append, **settings)
    vanilla = drafted.generate(prompts[0], method="vanilla", **settings)
    assert result.token_ids == vanilla.token_ids and vanilla.usage.accepted_per_draft == ()
    accepted = sum(cycle.step.num_accepted for cycle in cycles)
    each = result.usage.accepted_per_draft
    assert len(each) == 2 and 0 < max(each) <= accepted <= sum(each)
    for cycle in cycles:
        edges = list(zip(cycle.tree.parents.tolist(), cycle.tree.tokens.tolist(), strict=True))
        assert len(set(edges)) == len(edges), "a node stands once"
        assert node_depths(cycle.tree.parents).max() <= 6
    alone = drafted.generate(prompts[0], method="draft-model", **settings)
    assert alone.token_ids == vanilla.token_ids


def test_twins_conversations_and_constraints(
    drafted: EagleModel, prompts: list[list[int]], bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "temperature": 0.7, "seed": 6}
    vanilla = drafted.generate(prompts[0], method="vanilla", **settings)
    assert drafted.twin().generate(prompts[0], **settings).token_ids == vanilla.token_ids
    with drafted.conversation() as chat:
        text = list(prompts[0])
        for _ in range(2):
            answer = [token for piece in chat.complete(text, **settings) for token in piece.token_ids]
            assert tuple(answer) == drafted.generate(text, method="vanilla", **settings).token_ids
            text += [*answer, 7]
    bundles = []
    for precision in ("int8", "fp32", "int4"):
        bundles.append(shutil.copytree(bundle_of("alone", precision), tmp_path / precision))
        put_tokenizer(bundles[-1])
    constraint = Constraint.json_schema(
        {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 2, "maxItems": 4}
    )
    with EagleModel.load(bundles[0], draft_bundle=bundles[1:], threads=1, context=256) as model:
        for temperature in (0.0, 1.0):
            own: dict[str, Any] = {"constraint": constraint, "temperature": temperature, "seed": 3}
            plain = model.generate(prompts[0], method="vanilla", **own)
            for tree in ("chain", "dynamic"):
                assert model.generate(prompts[0], tree=tree, **own).token_ids == plain.token_ids
            assert 2 <= len(json.loads(plain.text or "")) <= 4


def test_what_cannot_draft_is_refused(bundle_of: Callable[..., Path], text_bundle: Path, tmp_path: Path) -> None:
    one, other = bundle_of("alone", "int8"), bundle_of("alone", "fp32")
    again = shutil.copytree(other, tmp_path / "again")
    for drafts, message in (
        ([other, again], r"the draft bundles .* and .*again are the same, .*; give each once"),
        ([other] * 9, "there are 9 draft bundles, but at most 8 can draft"),
        ([other, 7], r"draft_bundle is \[.*7\], but must be a folder or a list of folders"),
        ({"a": 1}, "draft_bundle is .*, but must be a folder or a list of folders"),
    ):
        with pytest.raises(RequestError, match=message):
            EagleModel.load(one, draft_bundle=drafts, threads=1)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="has no tokenizer, so nothing says that its tokens are those of the bundle"):
        EagleModel.load(text_bundle, draft_bundle=[other], threads=1)
    with EagleModel.load(one, draft_bundle=[], threads=1) as model:
        assert bundle_in(model).drafts == ()
        with pytest.raises(RequestError, match="method specinfer takes several draft models; load the bundle with a"):
            model.generate([1, 2], method="specinfer")
        assert dataclasses.asdict(model.generate([1, 2], max_new_tokens=2).usage)["accepted_per_draft"] == ()
