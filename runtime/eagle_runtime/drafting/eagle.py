"""Methods eagle and eagle+lookup: drafts of the bundle's head, alone and with n-gram matches in one tree."""

from __future__ import annotations

from eagle_runtime.core.drafter import Drafter
from eagle_runtime.drafting.build import cost_aware_drafter, sequoia_drafter, shaped_drafter
from eagle_runtime.drafting.method import Choice, Method, Parts, Trees


def _shaped(choice: Choice, parts: Parts) -> Drafter:
    return shaped_drafter(choice, parts, parts.head)


def _sized(choice: Choice, parts: Parts) -> Drafter:
    return cost_aware_drafter(choice, parts, parts.head, parts.costs, lookup=choice.method is EAGLE_LOOKUP)


def _sequoia(choice: Choice, parts: Parts) -> Drafter:
    return sequoia_drafter(choice, parts, parts.head, parts.costs)


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
        Trees(("cost-aware",), SIZED, _sized),
        Trees(("dynamic",), DYNAMIC, _shaped),
        Trees(("static", "chain"), STATIC, _shaped),
        Trees(("sequoia",), SEQUOIA, _sequoia),
    ),
    proposer="head",
    any_shape=_shaped,
    default="with a head where a fixed tree is asked for",
    is_default=lambda loaded, fixed: "head" in loaded.per_row,
)
EAGLE_LOOKUP = Method(
    "eagle+lookup",
    (Trees(("cost-aware",), BOTH, _sized),),
    proposer="head",
    default="with a head",
    is_default=lambda loaded, fixed: "head" in loaded.per_row and loaded.defaults.tree == "cost-aware" and not fixed,
)
