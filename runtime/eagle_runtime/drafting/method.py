"""What a drafting method is. Its row stands beside its drafter, and methods.py lists the rows.

A request's method and tree become a Choice (choose.py), whose `build` makes the drafter of a generation from its Parts.
Nothing else asks which method it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eagle_runtime.bundle.manifest import TreeDefaults, TreeKind
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import DraftHead
from eagle_runtime.drafting.acceptance import Acceptance
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.datastore import Datastore
from eagle_runtime.drafting.habits import Habits
from eagle_runtime.drafting.matches import PredictedText
from eagle_runtime.drafting.rank_acceptance import Ranks
from eagle_runtime.drafting.shapes import TreeShape
from eagle_runtime.sampling.grammar_matcher import Lookahead
from eagle_runtime.sampling.sampler import Sampler

# Of tokens, level by level; "draft models": there are several.
Proposer = Literal["head", "draft model", "draft models", "habits"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a model was loaded with, as far as it decides between methods. defaults: the bundle's trees. per_row: tokens
    that each proposer that is there returns for a row. habits_pay: whether habits are expected to draft faster than
    matches alone."""

    defaults: TreeDefaults
    per_row: Mapping[Proposer, int]
    datastore: bool = False
    habits_pay: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """What the drafter of a generation may be built from. sampler: draws its tokens. costs: of passes with the bundle's
    head; draft_costs: with the first draft model. draft_accepted: counts, for each draft model, accepted tokens that it
    drafted. acceptance: how drafts were accepted so far; ranks: the same by rank and
    depth. habits: the target's. predicted: a text that is searched for matches too, as is the datastore. lookahead: of
    a constraint."""

    sampler: Sampler
    costs: CostSource
    acceptance: Acceptance
    ranks: Ranks
    habits: Habits
    head: DraftHead | None = None
    draft_models: Sequence[DraftHead] = ()
    draft_accepted: list[int] = field(default_factory=list)
    draft_costs: CostSource | None = None
    datastore: Datastore | None = None
    predicted: PredictedText | None = None
    lookahead: Lookahead | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A drafter. shape: of its trees; None where costs size them, or the method knows one tree alone. top_k: beam, and
    children per node, of a tree that costs size."""

    method: Method
    build: Build
    shape: TreeShape | None = None
    top_k: int = 0


Build = Callable[[Choice, Parts], Drafter]


@dataclass(frozen=True, slots=True)
class Trees:
    """Kinds of trees that a method drafts in one way; () for the tree of a method that knows one alone. drafts: what,
    for the documentation. datastore: whether it takes one."""

    kinds: tuple[TreeKind, ...]
    drafts: str
    build: Build
    datastore: bool = False


@dataclass(frozen=True, slots=True)
class Method:
    """One way to draft. trees: the first are taken where a request names none, unless the method takes any shape.
    proposer: whose proposals it drafts; None: it needs none. any_shape: drafts trees of a caller's own shape; None: it
    takes none. drafts_nothing: whatever tree is asked for.

    default: when it is taken where a request names no method, and no method before it is; "": never. is_default: the
    same, of what was loaded and whether the request asks for a fixed tree, by name or by size."""

    name: str
    trees: tuple[Trees, ...]
    proposer: Proposer | None = None
    any_shape: Build | None = None
    drafts_nothing: bool = False
    default: str = ""
    is_default: Callable[[Loaded, bool], bool] = lambda loaded, fixed: False
