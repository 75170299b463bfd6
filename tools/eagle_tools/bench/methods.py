"""The methods of the bench by name, and their settings for EagleModel.generate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from eagle_runtime.base.errors import RequestError
from eagle_runtime.drafting.methods import METHODS, NAMES, TREES

Settings = dict[str, Any]

VANILLA = "vanilla"
DATASTORE = "datastore"  # a tree of what follows in the datastore, as in REST
BOTH = re.compile(r"([^:]+):([^:]+)")  # method : tree
SHAPE = re.compile(r"(\d+)/(\d+)/(\d+)")  # total_token / depth / draft_top_k
SWEEP = tuple((total, depth, k) for total in (8, 16, 32, 60) for depth in (2, 3, 5, 7) for k in (4, 10))


def offered() -> list[str]:
    """Returns all known names, whether or not a given bundle can run them."""
    methods = sorted(NAMES, key=lambda name: name != VANILLA)
    return list(dict.fromkeys([*methods, DATASTORE, *TREES]))


def check_names(names: Sequence[str]) -> None:
    """Raises RequestError for an unknown name or one that occurs twice."""
    for name in names:
        both = BOTH.fullmatch(name)
        known = both and both[1] in NAMES and both[2] in TREES
        if not known and name not in offered() and not SHAPE.fullmatch(name):
            raise RequestError(
                f"method {name!r} is unknown; there is {', '.join(offered())}, METHOD:TREE, and TOTAL/DEPTH/TOP_K "
                "for a dynamic tree of that size"
            )
    if len(set(names)) < len(names):
        raise RequestError(f"methods {','.join(names)} name one twice; give each once")


def takes_draft_model(name: str) -> bool:
    """Whether a method is one that a draft bundle drafts for."""
    return any(
        name.split(":")[0] == method.name and method.proposer in ("draft model", "draft models") for method in METHODS
    )


def settings_of(name: str) -> Settings:
    """Returns the settings of a method for EagleModel.generate. name: checked by `check_names`."""
    if name in NAMES:
        return {"method": name}
    if name == DATASTORE:
        return {"method": "lookup", "tree": "dynamic"}
    if name in TREES:
        return {"method": "eagle", "tree": name}
    if both := BOTH.fullmatch(name):
        return {"method": both[1], "tree": both[2]}
    total, depth, top_k = map(int, name.split("/"))
    sizes = {"total_token": total, "depth": depth, "draft_top_k": top_k}
    return {"method": "eagle", "tree": "dynamic", **sizes}


def sweep() -> Iterator[str]:
    """Yields the names of dynamic trees of many sizes. A total_token that the tree's growth cannot reach is left out,
    as it equals a smaller size."""
    for total, depth, k in SWEEP:
        if total - 1 <= k + depth * k * k:
            yield f"{total}/{depth}/{k}"
