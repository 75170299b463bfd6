"""All drafting methods. Where a request names none, the first one that is its default is taken."""

from __future__ import annotations

import typing
from collections.abc import Mapping

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import TreeKind
from eagle_runtime.drafting.draft_model import DRAFT_MODEL
from eagle_runtime.drafting.eagle import EAGLE, EAGLE_LOOKUP
from eagle_runtime.drafting.jacobi import LOOKAHEAD
from eagle_runtime.drafting.lookup import LOOKUP
from eagle_runtime.drafting.method import Loaded, Method, Proposer
from eagle_runtime.drafting.recycling import RECYCLING
from eagle_runtime.drafting.specinfer import SPECINFER
from eagle_runtime.drafting.vanilla import VANILLA

METHODS = (SPECINFER, DRAFT_MODEL, EAGLE_LOOKUP, EAGLE, RECYCLING, LOOKUP, LOOKAHEAD, VANILLA)
NAMES = tuple(method.name for method in METHODS)
TREES: tuple[TreeKind, ...] = typing.get_args(TreeKind)
ALONE = tuple(method.name for method in METHODS if method.proposer in (None, "habits"))  # need nothing but the target
HELP = "default, the first that applies: " + ", ".join(f"{one.name} {one.default}" for one in METHODS if one.default)
NO_HEAD = (
    f"the bundle has no draft head; use method {', '.join(ALONE[:-1])} or {ALONE[-1]}, or export the target with a head"
)
NO_DRAFT_MODEL = "method draft-model takes a draft model; load the bundle with draft_bundle (--draft-bundle FOLDER)"
NO_DRAFT_MODELS = (
    "method specinfer takes several draft models; load the bundle with a list as draft_bundle (--draft-bundle FOLDER "
    "for each)"
)
# What a request is told for whose method the proposer is not there; habits are there always.
MISSING: Mapping[Proposer, str] = {"head": NO_HEAD, "draft model": NO_DRAFT_MODEL, "draft models": NO_DRAFT_MODELS}


def method_named(name: str) -> Method:
    """The method of a name. Raises RequestError for one that no method has."""
    for method in METHODS:
        if method.name == name:
            return method
    raise RequestError(f"method is {short_repr(name)}, but must be one of {', '.join(NAMES)}")


def default_method(loaded: Loaded, fixed: bool = False) -> Method:
    """The method of a request that names none. fixed: whether it asks for a fixed tree, by name or by size."""
    return next(method for method in METHODS if method.is_default(loaded, fixed))
