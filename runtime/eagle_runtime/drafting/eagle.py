"""Methods eagle and eagle+lookup: drafts of the bundle's head, alone and with n-gram matches in one tree."""

from __future__ import annotations

from functools import partial

from eagle_runtime.drafting.build import cost_aware_drafter, sequoia_drafter, shaped_drafter
from eagle_runtime.drafting.method import Method, Trees

SIZED = "the head's proposals, in a tree as deep and as large as pays on this machine"
BOTH = "the head's proposals and n-gram matches in one such tree"
DYNAMIC = (
    "EAGLE-2's tree: `--depth` growth passes, `--draft-top-k` beam, the `--total-token` likeliest nodes (60/5/10); "
    "taken if `--total-token` or `--depth` is given"
)
SEQUOIA = "the static tree with the most expected tokens per second, by acceptance and costs measured here"
STATIC = "EAGLE-1's 25 choices; one token after the other"

EAGLE = Method(
    "eagle",
    (
        Trees(("cost-aware",), SIZED, cost_aware_drafter),
        Trees(("dynamic",), DYNAMIC, shaped_drafter),
        Trees(("static", "chain"), STATIC, shaped_drafter),
        Trees(("sequoia",), SEQUOIA, sequoia_drafter),
    ),
    proposer="head",
    any_shape=shaped_drafter,
    default="with a head where a fixed tree is asked for",
    is_default=lambda loaded, fixed: "head" in loaded.per_row,
)
EAGLE_LOOKUP = Method(
    "eagle+lookup",
    (Trees(("cost-aware",), BOTH, partial(cost_aware_drafter, lookup=True)),),
    proposer="head",
    default="with a head",
    is_default=lambda loaded, fixed: "head" in loaded.per_row and loaded.defaults.tree == "cost-aware" and not fixed,
)
