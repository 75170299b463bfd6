"""The report on a target and a head, and where they would run."""

from __future__ import annotations

import dataclasses

from eagle_export.base.errors import ExportError
from eagle_export.heads.prediction import without_prediction_layers
from eagle_export.inspection.facts import HeadFacts, TargetFacts, head_facts, target_facts
from eagle_export.inspection.headers import Headers, open_headers
from eagle_export.inspection.machine import CARDS, GB, Place
from eagle_export.inspection.needs import CONTEXT, Need, needs

CLASSES = (8, 12, 16, 24, 32)  # GB of GPUs and machines
SYSTEM = 10**9  # bytes that a machine needs for itself


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """context: tokens that caches are counted for. needs: empty for a target that cannot be exported."""

    target: TargetFacts
    target_commit: str | None
    head: HeadFacts | None
    head_commit: str | None
    context: int
    needs: tuple[Need, ...]

    @property
    def exportable(self) -> bool:
        """Whether headers and configs show no reason why an export would be refused."""
        return not self.target.problems and (self.head is None or not self.head.problems)


def inspect(target: str, draft: str | None, context: int | None = None) -> Report:
    """target, draft: folders or ids of models on the hub. context: tokens that caches are counted for; None for 4096,
    or all that the target has if they are fewer. Raises ExportError for what cannot be read."""
    if context is not None and context < 1:
        raise ExportError(f"the context is {context} tokens, but must be 1 or more")
    opened = open_headers(target)
    facts, checkpoint = target_facts(opened.checkpoint), without_prediction_layers(opened.checkpoint)
    if context is not None and facts.context is not None and context > facts.context:
        raise ExportError(f"the context is {context} tokens, but {target} has {facts.context} at most")
    tokens = context or min(CONTEXT, facts.context or CONTEXT)
    of_head: Headers | None = None
    head: HeadFacts | None = None
    if draft is not None:
        of_head = open_headers(draft, head=True)
        head = head_facts(of_head.checkpoint, facts, checkpoint)
    needed = () if facts.problems else needs(facts, checkpoint, head, tokens)
    return Report(facts, opened.commit, head, None if of_head is None else of_head.commit, tokens, needed)


def places(need: Need, machine: Place | None) -> list[Place]:
    """Where a pair at this precision would run: this machine, or the GPUs."""
    if need.backend == "cpu":
        return [] if machine is None else [machine]
    return list(CARDS)


def fits(need: Need, place: Place) -> bool:
    """Whether a place has the memory."""
    return need.memory + (SYSTEM if need.backend == "cpu" else 0) <= place.memory


def least_class(need: Need) -> int | None:
    """The smallest class of GPUs or machines with the memory, in GB; None if all are too small."""
    return next((size for size in CLASSES if fits(need, Place("", size * GB, 1))), None)
