"""Which drafter a request asks for: method, tree and sizes -> a description that EagleModel builds the drafter from."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal, NamedTuple

from eagle_runtime.arguments import checked_int, short_repr
from eagle_runtime.bundle.manifest import TreeDefaults, TreeKind
from eagle_runtime.drafting.habits import SUCCESSORS
from eagle_runtime.drafting.jacobi import Window
from eagle_runtime.drafting.shapes import DynamicTree, StaticTree, TreeShape, chain, check_children
from eagle_runtime.errors import RequestError
from eagle_runtime.tree import EAGLE1_CHOICES

Method = Literal["eagle", "eagle+lookup", "lookup", "recycling", "draft-model", "lookahead", "vanilla"]

NO_HEAD = "the bundle has no draft head; use method recycling, lookup or vanilla, or export the target with a head"
NO_DRAFT_MODEL = "method draft-model takes a draft model; load the bundle with draft_bundle (--draft-bundle FOLDER)"


class Sizes(NamedTuple):
    """Sizes of a tree as a caller gives them; None takes the bundle's (manifest.TreeDefaults)."""

    total_token: int | None = None
    depth: int | None = None
    draft_top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Vanilla:
    """No drafts."""


@dataclass(frozen=True, slots=True)
class FixedTree:
    """The head's proposals in a tree of a fixed shape."""

    shape: TreeShape


@dataclass(frozen=True, slots=True)
class LookupChain:
    """A chain of `length` tokens that followed an earlier n-gram match."""

    length: int


@dataclass(frozen=True, slots=True)
class DatastoreTree:
    """A tree of the most frequent continuations in a datastore. nodes: the root included; depth: levels below it."""

    nodes: int
    depth: int


@dataclass(frozen=True, slots=True)
class CostAware:
    """A tree sized by what forward passes cost, of the head's proposals, of n-gram matches, or of both."""

    head: bool
    lookup: bool
    top_k: int


Choice = Vanilla | FixedTree | LookupChain | DatastoreTree | Window | CostAware


def default_method(
    defaults: TreeDefaults,
    has_head: bool,
    has_draft_model: bool = False,
    habits: bool = False,
) -> Method:
    """The method where neither method nor tree is given: a draft model that was loaded; else the head's proposals with
    n-gram matches, or the head alone where the bundle's default tree is one that only a head grows. Without a head the
    matches, with the model's habits where these pay (habits)."""
    if has_draft_model:
        return "draft-model"
    if not has_head:
        return "recycling" if habits else "lookup"
    return "eagle+lookup" if defaults.tree == "cost-aware" else "eagle"


def choose_drafter(
    method: Method | None,
    tree: TreeKind | TreeShape | None,
    sizes: Sizes,
    defaults: TreeDefaults,
    head_top_k: int | None,
    model_top_k: int | None = None,
    *,
    datastore: bool = False,
    habits: bool = False,
) -> tuple[Method, Choice]:
    """The method that is meant, and the drafter.

    head_top_k: tokens that the bundle's head returns per row; None: it has no head. model_top_k: the same of a draft
    model. datastore: whether there is one. habits: as in default_method. Raises RequestError for a combination that no
    drafter serves and for sizes out of range."""
    total, depth, top_k = (
        value if value is None else checked_int(name, value, least)
        for (name, value), least in zip(sizes._asdict().items(), (2, 0, 1), strict=True)
    )
    sized = total is not None or depth is not None
    if method is None:
        fixed = tree not in (None, "cost-aware") or sized
        method = default_method(defaults, head_top_k is not None, model_top_k is not None, habits)
        if fixed:
            method = "eagle" if method == "eagle+lookup" else "lookup" if method == "recycling" else method
    if method == "vanilla":
        return method, Vanilla()
    if method not in typing.get_args(Method):
        raise RequestError(f"method is {short_repr(method)}, but must be one of {', '.join(typing.get_args(Method))}")
    if method == "draft-model":
        if model_top_k is None:
            raise RequestError(NO_DRAFT_MODEL)
        head_top_k = model_top_k
    elif method == "recycling":
        head_top_k = SUCCESSORS
    elif method not in ("lookup", "lookahead") and head_top_k is None:
        raise RequestError(NO_HEAD)
    grown = method in ("eagle", "draft-model")  # by what proposes tokens level by level, without n-gram matches
    if tree is not None and not isinstance(tree, str):
        if not hasattr(tree, "grow"):
            raise RequestError(f"tree is {short_repr(tree)}, but must be one of {', '.join(typing.get_args(TreeKind))}")
        if head_top_k is None:
            raise RequestError(NO_HEAD)
        if not grown:
            raise RequestError(f"method {method} takes no tree shape of your own; leave tree out")
        return method, FixedTree(tree)
    total = defaults.total_token if total is None else total
    depth = defaults.depth if depth is None else depth
    limit = None if method in ("lookup", "lookahead") else head_top_k
    if top_k is None:
        top_k = defaults.draft_top_k if limit is None else min(defaults.draft_top_k, limit)
    elif limit is not None:
        check_children(limit, top_k)
    # Checked whatever the tree, so that a wrong number never passes unnoticed.
    dynamic, line = DynamicTree(total, depth, top_k), chain(min(depth + 1, total - 1))
    if method == "lookahead" and tree is None:
        return method, Window()
    kind = tree or ("cost-aware" if not grown else "dynamic" if sized else defaults.tree)
    if kind not in typing.get_args(TreeKind):
        raise RequestError(f"tree is {short_repr(kind)}, but must be one of {', '.join(typing.get_args(TreeKind))}")
    if kind == "cost-aware" and method != "lookahead":
        return method, CostAware(method != "lookup", not grown, top_k)
    if method == "lookup" and kind == "chain":
        return method, LookupChain(len(line.choices))
    if method == "lookup" and kind == "dynamic" and datastore:
        return method, DatastoreTree(dynamic.num_nodes, dynamic.depth + 1)
    if not grown:
        raise RequestError(f"method {method} does not draft a {kind} tree; leave the tree to it")
    shapes: dict[str, TreeShape] = {"dynamic": dynamic, "static": StaticTree(EAGLE1_CHOICES), "chain": line}
    return method, FixedTree(shapes[kind])
