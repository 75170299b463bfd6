"""Which drafter a request asks for: method, tree and sizes -> the Choice that builds it."""

from __future__ import annotations

from typing import NamedTuple

from eagle_runtime.base.arguments import checked_int, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import EAGLE1_CHOICES
from eagle_runtime.drafting.method import Choice, Loaded, Method
from eagle_runtime.drafting.methods import MISSING, NO_HEAD, TREES, default_method, method_named
from eagle_runtime.drafting.shapes import DynamicTree, StaticTree, TreeShape, chain, check_children


class Sizes(NamedTuple):
    """Sizes of a tree as a caller gives them; None takes the bundle's (manifest.TreeDefaults)."""

    total_token: int | None = None
    depth: int | None = None
    draft_top_k: int | None = None


def choose_drafter(name: str | None, tree: str | TreeShape | None, sizes: Sizes, loaded: Loaded) -> Choice:
    """The drafter of a method and a tree. Raises RequestError for a combination that no drafter serves, and for sizes
    out of range."""
    total, depth, top_k = (
        value if value is None else checked_int(size, value, least)
        for (size, value), least in zip(sizes._asdict().items(), (2, 0, 1), strict=True)
    )
    sized = total is not None or depth is not None
    method = default_method(loaded, tree not in (None, "cost-aware") or sized) if name is None else method_named(name)
    if method.drafts_nothing:
        return Choice(method, method.trees[0].build)
    limit = None if method.proposer is None else loaded.per_row.get(method.proposer)
    if method.proposer is not None and limit is None:
        raise RequestError(MISSING[method.proposer])
    if tree is not None and not isinstance(tree, str):
        return _of_own_shape(method, tree, loaded)
    defaults = loaded.defaults
    total = defaults.total_token if total is None else total
    depth = defaults.depth if depth is None else depth
    if top_k is None:
        top_k = defaults.draft_top_k if limit is None else min(defaults.draft_top_k, limit)
    elif limit is not None:
        check_children(limit, top_k)
    # Made whatever the tree, so that a wrong size never passes unnoticed.
    dynamic, line = DynamicTree(total, depth, top_k), chain(min(depth + 1, total - 1))
    shapes: dict[str | None, TreeShape] = {"dynamic": dynamic, "static": StaticTree(EAGLE1_CHOICES), "chain": line}
    own = method.trees[0].kinds or (None,)
    kind = tree or (own[0] if method.any_shape is None else "dynamic" if sized else defaults.tree)
    if kind not in (None, *TREES):
        raise RequestError(f"tree is {short_repr(kind)}, but must be one of {', '.join(TREES)}")
    for trees in method.trees:
        if kind in (trees.kinds or (None,)) and (loaded.datastore or not trees.datastore):
            return Choice(method, trees.build, shapes.get(kind), top_k if kind in ("cost-aware", "sequoia") else 0)
    raise RequestError(f"method {method.name} does not draft a {kind} tree; leave the tree to it")


def _of_own_shape(method: Method, tree: TreeShape, loaded: Loaded) -> Choice:
    if not hasattr(tree, "grow"):
        raise RequestError(f"tree is {short_repr(tree)}, but must be one of {', '.join(TREES)}")
    if method.any_shape is not None:
        return Choice(method, method.any_shape, tree)
    if method.proposer is None and "head" not in loaded.per_row:
        raise RequestError(NO_HEAD)
    raise RequestError(f"method {method.name} takes no tree shape of your own; leave tree out")
