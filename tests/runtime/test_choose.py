"""Which drafter each combination of method and tree gives, or which error."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_runtime.bundle.manifest import TreeDefaults
from eagle_runtime.drafting.choose import (
    CostAware,
    DatastoreTree,
    FixedTree,
    LookupChain,
    Sizes,
    Vanilla,
    choose_drafter,
    default_method,
)
from eagle_runtime.drafting.jacobi import Window
from eagle_runtime.drafting.shapes import DynamicTree, StaticTree, chain
from eagle_runtime.errors import RequestError
from eagle_runtime.tree import EAGLE1_CHOICES

DEFAULTS = TreeDefaults()
HEAD_TOP_K = 64
OWN = DynamicTree(8, 2, 2)

DYNAMIC, STATIC, CHAIN = FixedTree(DynamicTree()), FixedTree(StaticTree(EAGLE1_CHOICES)), FixedTree(chain(6))
HEAD, BOTH, LOOKUP = CostAware(True, False, 10), CostAware(True, True, 10), CostAware(False, True, 10)
NO_TREE = "does not draft a {} tree"
NO_OWN = "takes no tree shape of your own"
NO_HEAD = "has no draft head"
NO_DRAFT_MODEL = "takes a draft model"
NO_METHOD = "method is 'medusa', but must be one of eagle"
NO_SUCH_TREE = "tree is 'bush', but must be one of dynamic"

# (method, tree) -> drafter or error, of a bundle with a head and of one without; every default is the bundle's.
TABLE: list[tuple[str, Any, Any, Any]] = [
    ("vanilla", None, Vanilla(), Vanilla()),
    ("vanilla", "dynamic", Vanilla(), Vanilla()),
    ("eagle", None, HEAD, NO_HEAD),
    ("eagle", "cost-aware", HEAD, NO_HEAD),
    ("eagle", "dynamic", DYNAMIC, NO_HEAD),
    ("eagle", "static", STATIC, NO_HEAD),
    ("eagle", "chain", CHAIN, NO_HEAD),
    ("eagle", OWN, FixedTree(OWN), NO_HEAD),
    ("eagle", "bush", NO_SUCH_TREE, NO_HEAD),
    ("eagle", 7, "tree is 7, but must be one of dynamic", NO_HEAD),
    ("eagle+lookup", None, BOTH, NO_HEAD),
    ("eagle+lookup", "cost-aware", BOTH, NO_HEAD),
    ("eagle+lookup", "dynamic", NO_TREE.format("dynamic"), NO_HEAD),
    ("eagle+lookup", "static", NO_TREE.format("static"), NO_HEAD),
    ("eagle+lookup", "chain", NO_TREE.format("chain"), NO_HEAD),
    ("eagle+lookup", OWN, NO_OWN, NO_HEAD),
    ("lookup", None, LOOKUP, LOOKUP),
    ("lookup", "cost-aware", LOOKUP, LOOKUP),
    ("lookup", "dynamic", NO_TREE.format("dynamic"), NO_TREE.format("dynamic")),
    ("lookup", "static", NO_TREE.format("static"), NO_TREE.format("static")),
    ("lookup", "chain", LookupChain(6), LookupChain(6)),
    ("lookup", OWN, NO_OWN, NO_HEAD),
    ("lookup", "bush", NO_SUCH_TREE, NO_SUCH_TREE),
    ("lookahead", None, Window(), Window()),
    ("lookahead", "cost-aware", NO_TREE.format("cost-aware"), NO_TREE.format("cost-aware")),
    ("lookahead", "chain", NO_TREE.format("chain"), NO_TREE.format("chain")),
    ("lookahead", OWN, NO_OWN, NO_HEAD),
    ("draft-model", None, NO_DRAFT_MODEL, NO_DRAFT_MODEL),
    ("recycling", None, BOTH, BOTH),
    ("recycling", "chain", NO_TREE.format("chain"), NO_TREE.format("chain")),
    ("recycling", OWN, NO_OWN, NO_OWN),
    ("medusa", None, NO_METHOD, NO_METHOD),
]


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize(("method", "tree", "with_head", "without"), TABLE)
def test_every_combination(method: Any, tree: Any, with_head: Any, without: Any, has_head: bool) -> None:
    expected, head_top_k = (with_head, HEAD_TOP_K) if has_head else (without, None)
    if isinstance(expected, str):
        with pytest.raises(RequestError, match=expected):
            choose_drafter(method, tree, Sizes(), DEFAULTS, head_top_k)
    else:
        assert choose_drafter(method, tree, Sizes(), DEFAULTS, head_top_k) == (method, expected)


@pytest.mark.parametrize(
    ("tree", "sizes", "with_head", "without"),
    [
        (None, Sizes(), ("eagle+lookup", BOTH), ("lookup", LOOKUP)),
        ("cost-aware", Sizes(), ("eagle+lookup", BOTH), ("lookup", LOOKUP)),
        (None, Sizes(draft_top_k=3), ("eagle+lookup", CostAware(True, True, 3)), ("lookup", CostAware(False, True, 3))),
        (None, Sizes(total_token=8), ("eagle", FixedTree(DynamicTree(8))), ("lookup", LOOKUP)),
        (None, Sizes(depth=2), ("eagle", FixedTree(DynamicTree(depth=2))), ("lookup", LOOKUP)),
        ("dynamic", Sizes(16, 3, 4), ("eagle", FixedTree(DynamicTree(16, 3, 4))), NO_TREE.format("dynamic")),
        ("chain", Sizes(depth=2), ("eagle", FixedTree(chain(3))), ("lookup", LookupChain(3))),
        (OWN, Sizes(), ("eagle", FixedTree(OWN)), NO_HEAD),
    ],
)
def test_the_method_where_none_is_given(tree: Any, sizes: Sizes, with_head: Any, without: Any) -> None:
    assert choose_drafter(None, tree, sizes, DEFAULTS, HEAD_TOP_K) == with_head
    if isinstance(without, str):
        with pytest.raises(RequestError, match=without):
            choose_drafter(None, tree, sizes, DEFAULTS, None)
    else:
        assert choose_drafter(None, tree, sizes, DEFAULTS, None) == without


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
        choose_drafter(method, None, sizes, DEFAULTS, HEAD_TOP_K)


def test_defaults_are_the_bundles() -> None:
    defaults = TreeDefaults("dynamic", 20, 4, 8)
    assert default_method(defaults, True) == "eagle" and default_method(defaults, False) == "lookup"
    assert default_method(defaults, True, habits=True) == "eagle"
    assert default_method(defaults, False, True) == "draft-model"
    assert choose_drafter(None, None, Sizes(), defaults, HEAD_TOP_K) == ("eagle", FixedTree(DynamicTree(20, 4, 8)))
    assert choose_drafter("eagle+lookup", None, Sizes(), defaults, HEAD_TOP_K)[1] == CostAware(True, True, 8)
    few = choose_drafter("eagle", "dynamic", Sizes(), TreeDefaults(), 4)[1]
    assert few == FixedTree(DynamicTree(top_k=4)), "a head that returns fewer tokens limits the default"


def test_the_models_habits_are_the_default_where_passes_take_long() -> None:
    def chosen(tree: Any = None, habits: bool = True, **sizes: int) -> Any:
        return choose_drafter(None, tree, Sizes(**sizes), DEFAULTS, None, habits=habits)

    assert chosen() == chosen("cost-aware") == ("recycling", BOTH)
    assert chosen(draft_top_k=3) == ("recycling", CostAware(True, True, 3))
    assert chosen(habits=False) == ("lookup", LOOKUP)
    assert chosen(total_token=8) == ("lookup", LOOKUP)
    assert chosen("chain", depth=2) == ("lookup", LookupChain(3))
    with pytest.raises(RequestError, match=NO_HEAD):
        chosen(OWN)


@pytest.mark.parametrize("head_top_k", [HEAD_TOP_K, None])
def test_a_draft_model_and_a_datastore(head_top_k: int | None) -> None:
    table: list[tuple[Any, Any, Any]] = [
        (None, None, ("draft-model", HEAD)),
        (None, "chain", ("draft-model", CHAIN)),
        ("draft-model", "dynamic", ("draft-model", DYNAMIC)),
        ("draft-model", "static", ("draft-model", STATIC)),
        ("draft-model", OWN, ("draft-model", FixedTree(OWN))),
        ("lookup", "dynamic", ("lookup", DatastoreTree(60, 6))),
        ("lookup", None, ("lookup", LOOKUP)),
    ]
    for method, tree, expected in table:
        assert choose_drafter(method, tree, Sizes(), DEFAULTS, head_top_k, 16, datastore=True) == expected
