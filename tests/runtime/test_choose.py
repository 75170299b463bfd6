"""Which drafter each combination of method and tree gives, or which error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import EAGLE1_CHOICES
from eagle_runtime.bundle.manifest import TreeDefaults
from eagle_runtime.drafting.choose import Sizes, choose_drafter
from eagle_runtime.drafting.method import Loaded, Proposer
from eagle_runtime.drafting.methods import METHODS, NAMES, TREES, default_method
from eagle_runtime.drafting.shapes import DynamicTree, StaticTree, TreeShape, chain

DEFAULTS = TreeDefaults()
ALONE: Mapping[Proposer, int] = {"habits": 64}
WITH_HEAD: Mapping[Proposer, int] = {"head": 64, **ALONE}
OWN = DynamicTree(8, 2, 2)

Chosen = tuple[TreeShape | None, int]  # shape, and children per node of a tree that costs size
NO_CHOICE: Chosen = (None, 0)
DYNAMIC: Chosen = (DynamicTree(), 0)
STATIC: Chosen = (StaticTree(EAGLE1_CHOICES), 0)
CHAIN: Chosen = (chain(6), 0)
SIZED: Chosen = (None, 10)
NO_TREE = "does not draft a {} tree"
NO_OWN = "takes no tree shape of your own"
NO_HEAD = "has no draft head"
NO_DRAFT_MODEL = "takes a draft model"
NO_DRAFT_MODELS = "takes several draft models"
NO_METHOD = "method is 'medusa', but must be one of specinfer, draft-model"
NO_SUCH_TREE = "tree is 'bush', but must be one of dynamic"

# (method, tree) -> drafter or error, of a bundle with a head and of one without; every default is the bundle's.
TABLE: list[tuple[str, Any, Any, Any]] = [
    ("vanilla", None, NO_CHOICE, NO_CHOICE),
    ("vanilla", "dynamic", NO_CHOICE, NO_CHOICE),
    ("eagle", None, SIZED, NO_HEAD),
    ("eagle", "cost-aware", SIZED, NO_HEAD),
    ("eagle", "dynamic", DYNAMIC, NO_HEAD),
    ("eagle", "static", STATIC, NO_HEAD),
    ("eagle", "chain", CHAIN, NO_HEAD),
    ("eagle", "sequoia", SIZED, NO_HEAD),
    ("eagle", OWN, (OWN, 0), NO_HEAD),
    ("eagle", "bush", NO_SUCH_TREE, NO_HEAD),
    ("eagle", 7, "tree is 7, but must be one of dynamic", NO_HEAD),
    ("eagle+lookup", None, SIZED, NO_HEAD),
    ("eagle+lookup", "cost-aware", SIZED, NO_HEAD),
    ("eagle+lookup", "dynamic", NO_TREE.format("dynamic"), NO_HEAD),
    ("eagle+lookup", "static", NO_TREE.format("static"), NO_HEAD),
    ("eagle+lookup", "chain", NO_TREE.format("chain"), NO_HEAD),
    ("eagle+lookup", "sequoia", NO_TREE.format("sequoia"), NO_HEAD),
    ("eagle+lookup", OWN, NO_OWN, NO_HEAD),
    ("lookup", None, SIZED, SIZED),
    ("lookup", "cost-aware", SIZED, SIZED),
    ("lookup", "dynamic", NO_TREE.format("dynamic"), NO_TREE.format("dynamic")),
    ("lookup", "static", NO_TREE.format("static"), NO_TREE.format("static")),
    ("lookup", "chain", CHAIN, CHAIN),
    ("lookup", OWN, NO_OWN, NO_HEAD),
    ("lookup", "bush", NO_SUCH_TREE, NO_SUCH_TREE),
    ("lookahead", None, NO_CHOICE, NO_CHOICE),
    ("lookahead", "cost-aware", NO_TREE.format("cost-aware"), NO_TREE.format("cost-aware")),
    ("lookahead", "chain", NO_TREE.format("chain"), NO_TREE.format("chain")),
    ("lookahead", OWN, NO_OWN, NO_HEAD),
    ("draft-model", None, NO_DRAFT_MODEL, NO_DRAFT_MODEL),
    ("specinfer", None, NO_DRAFT_MODELS, NO_DRAFT_MODELS),
    ("recycling", None, SIZED, SIZED),
    ("recycling", "chain", NO_TREE.format("chain"), NO_TREE.format("chain")),
    ("recycling", OWN, NO_OWN, NO_OWN),
    ("medusa", None, NO_METHOD, NO_METHOD),
]


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(("method", "tree", "with_head", "without"), TABLE)
def test_every_combination(method: Any, tree: Any, with_head: Any, without: Any, has_head: bool) -> None:
    expected, per_row = (with_head, WITH_HEAD) if has_head else (without, ALONE)
    if isinstance(expected, str):
        with pytest.raises(RequestError, match=expected):
            choose_drafter(method, tree, Sizes(), Loaded(DEFAULTS, per_row))
    else:
        assert chosen(method, tree, Sizes(), Loaded(DEFAULTS, per_row)) == (method, expected)


def chosen(method: Any, tree: Any, sizes: Sizes, loaded: Loaded) -> tuple[str, Chosen]:
    choice = choose_drafter(method, tree, sizes, loaded)
    return choice.method.name, (choice.shape, choice.top_k)


@pytest.mark.parametrize(
    ("tree", "sizes", "with_head", "without"),
    [
        (None, Sizes(), ("eagle+lookup", SIZED), ("lookup", SIZED)),
        ("cost-aware", Sizes(), ("eagle+lookup", SIZED), ("lookup", SIZED)),
        (None, Sizes(draft_top_k=3), ("eagle+lookup", (None, 3)), ("lookup", (None, 3))),
        (None, Sizes(total_token=8), ("eagle", (DynamicTree(8), 0)), ("lookup", SIZED)),
        (None, Sizes(depth=2), ("eagle", (DynamicTree(depth=2), 0)), ("lookup", SIZED)),
        ("dynamic", Sizes(16, 3, 4), ("eagle", (DynamicTree(16, 3, 4), 0)), NO_TREE.format("dynamic")),
        ("chain", Sizes(depth=2), ("eagle", (chain(3), 0)), ("lookup", (chain(3), 0))),
        ("sequoia", Sizes(), ("eagle", SIZED), NO_TREE.format("sequoia")),
        (OWN, Sizes(), ("eagle", (OWN, 0)), NO_HEAD),
    ],
)
def test_the_method_where_none_is_given(tree: Any, sizes: Sizes, with_head: Any, without: Any) -> None:
    assert chosen(None, tree, sizes, Loaded(DEFAULTS, WITH_HEAD)) == with_head
    if isinstance(without, str):
        with pytest.raises(RequestError, match=without):
            choose_drafter(None, tree, sizes, Loaded(DEFAULTS, ALONE))
    else:
        assert chosen(None, tree, sizes, Loaded(DEFAULTS, ALONE)) == without


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (Sizes(total_token=1), "total_token is 1, but must be 2 or more"),
        (Sizes(depth=-1), "depth is -1, but must be 0 or more"),
        (Sizes(draft_top_k=0), "draft_top_k is 0, but must be 1 or more"),
        (Sizes(draft_top_k=65), "asks for 65 children per node, but the bundle's head computes 64"),
        (Sizes(total_token=10**6), "total_token"),
        (Sizes(depth=10**6), "depth"),
    ],
)
@pytest.mark.parametrize("method", ["eagle", "eagle+lookup"])
def test_sizes_out_of_range_are_refused_whatever_the_tree(method: Any, sizes: Sizes, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose_drafter(method, None, sizes, Loaded(DEFAULTS, WITH_HEAD))


def test_defaults_are_the_bundles() -> None:
    defaults = TreeDefaults("dynamic", 20, 4, 8)

    def default(per_row: Mapping[Proposer, int], **more: bool) -> str:
        return default_method(Loaded(defaults, per_row, **more)).name

    assert default(WITH_HEAD) == "eagle" and default(ALONE) == "lookup"
    assert default(WITH_HEAD, habits_pay=True) == "eagle" and default({"draft model": 16, **ALONE}) == "draft-model"
    loaded = Loaded(defaults, WITH_HEAD)
    assert chosen(None, None, Sizes(), loaded) == ("eagle", (DynamicTree(20, 4, 8), 0))
    assert chosen("eagle+lookup", None, Sizes(), loaded) == ("eagle+lookup", (None, 8))
    few = chosen("eagle", "dynamic", Sizes(), Loaded(TreeDefaults(), {"head": 4}))
    assert few == ("eagle", (DynamicTree(top_k=4), 0)), "a head that returns fewer tokens limits the default"


def test_the_models_habits_are_the_default_where_passes_take_long() -> None:
    def asked(tree: Any = None, habits: bool = True, **sizes: int) -> Any:
        return chosen(None, tree, Sizes(**sizes), Loaded(DEFAULTS, ALONE, habits_pay=habits))

    assert asked() == asked("cost-aware") == ("recycling", SIZED)
    assert asked(draft_top_k=3) == ("recycling", (None, 3))
    assert asked(habits=False) == ("lookup", SIZED)
    assert asked(total_token=8) == ("lookup", SIZED)
    assert asked("chain", depth=2) == ("lookup", (chain(3), 0))
    with pytest.raises(RequestError, match=NO_HEAD):
        asked(OWN)


@pytest.mark.parametrize("per_row", [WITH_HEAD, ALONE])
def test_a_draft_model_and_a_datastore(per_row: Mapping[Proposer, int]) -> None:
    table: list[tuple[Any, Any, Any]] = [
        (None, None, ("draft-model", SIZED)),
        ("specinfer", None, NO_DRAFT_MODELS),
        (None, "chain", ("draft-model", CHAIN)),
        ("draft-model", "dynamic", ("draft-model", DYNAMIC)),
        ("draft-model", "static", ("draft-model", STATIC)),
        ("draft-model", "sequoia", ("draft-model", SIZED)),
        ("draft-model", OWN, ("draft-model", (OWN, 0))),
        ("lookup", "dynamic", ("lookup", DYNAMIC)),
        ("lookup", None, ("lookup", SIZED)),
    ]
    for method, tree, expected in table:
        loaded = Loaded(DEFAULTS, {"draft model": 16, **per_row}, datastore=True)
        if isinstance(expected, str):
            with pytest.raises(RequestError, match=expected):
                chosen(method, tree, Sizes(), loaded)
        else:
            assert chosen(method, tree, Sizes(), loaded) == expected


def test_several_draft_models() -> None:
    loaded = Loaded(DEFAULTS, {"draft model": 16, "draft models": 16, **WITH_HEAD})
    assert chosen(None, None, Sizes(), loaded) == ("specinfer", CHAIN)
    assert chosen(None, "dynamic", Sizes(), loaded) == ("specinfer", DYNAMIC)
    assert chosen("specinfer", "static", Sizes(), loaded) == ("specinfer", STATIC)
    assert chosen("draft-model", None, Sizes(), loaded) == ("draft-model", SIZED)
    for tree, message in (("cost-aware", "does not draft a cost-aware tree"), (OWN, NO_OWN)):
        with pytest.raises(RequestError, match=message):
            chosen("specinfer", tree, Sizes(), loaded)


def test_the_table_is_whole() -> None:
    """Each row has a name of its own, trees that exist, each once, and words where it says when it is the default."""
    assert len(set(NAMES)) == len(METHODS)
    bare = Loaded(DEFAULTS, {})
    full = Loaded(DEFAULTS, {"draft model": 16, "draft models": 16, **WITH_HEAD}, True, True)
    for method in METHODS:
        kinds = [kind for trees in method.trees for kind in trees.kinds]
        assert method.trees and set(kinds) <= set(TREES) and len(kinds) == len(set(kinds))
        assert all(trees.drafts for trees in method.trees)
        ever = any(method.is_default(loaded, fixed) for loaded in (bare, full) for fixed in (False, True))
        assert ever == bool(method.default)
