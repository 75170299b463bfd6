"""`eagle-export inspect TARGET [DRAFT]`: a report for people as tables, for programs as one JSON object."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from eagle_export.errors import ExportError
from eagle_export.inspection.facts import HeadFacts, TargetFacts, head_facts, target_facts
from eagle_export.inspection.headers import Headers, open_headers
from eagle_export.inspection.machine import CARDS, GB, Place, this_machine
from eagle_export.inspection.needs import CONTEXT, Need, needs

CLASSES = (8, 12, 16, 24, 32)  # GB of cards and machines
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
    facts = target_facts(opened.checkpoint)
    if context is not None and facts.context is not None and context > facts.context:
        raise ExportError(f"the context is {context} tokens, but {target} has {facts.context} at most")
    tokens = context or min(CONTEXT, facts.context or CONTEXT)
    of_head: Headers | None = None
    head: HeadFacts | None = None
    if draft is not None:
        of_head = open_headers(draft, pickled=True)
        head = head_facts(of_head.checkpoint, facts, opened.checkpoint)
    needed = () if facts.problems else needs(facts, opened.checkpoint, head, tokens)
    return Report(facts, opened.commit, head, None if of_head is None else of_head.commit, tokens, needed)


def run_inspect(args: argparse.Namespace) -> None:
    """Prints the report that the parsed arguments ask for, on stdout."""
    report = inspect(args.target, args.draft, args.context)
    machine = this_machine()
    if args.json:
        print(json.dumps(as_json(report, machine)))
        return
    from eagle_export.inspection.tables import show

    show(report, machine)


def places(need: Need, machine: Place | None) -> list[Place]:
    """Where a pair at this precision would run: this machine, or the cards."""
    if need.backend == "cpu":
        return [] if machine is None else [machine]
    return list(CARDS)


def fits(need: Need, place: Place) -> bool:
    """Whether a place has the memory."""
    return need.memory + (SYSTEM if need.backend == "cpu" else 0) <= place.memory


def least_class(need: Need) -> int | None:
    """The smallest class of cards or machines with the memory, in GB; None if all are too small."""
    return next((size for size in CLASSES if fits(need, Place("", size * GB, 1))), None)


def as_json(report: Report, machine: Place | None) -> dict[str, Any]:
    """The report as one object. Sizes are bytes, times milliseconds."""
    target, head = report.target, report.head
    return {
        "exportable": report.exportable,
        "target": {
            **_plain(target, ("family", "experts")),
            "family": target.family and target.family.name,
            "experts": target.experts and {"per_layer": target.experts[0], "per_token": target.experts[1]},
            "commit": report.target_commit,
        },
        "head": head
        and {
            **_plain(head, ("layout", "config", "official")),
            "kind": head.layout and head.layout.kind,
            "producer": head.layout and head.layout.producer,
            "source": head.layout and head.layout.source,
            "taps": head.config and list(head.config.taps),
            "matches": not head.problems,
            "commit": report.head_commit,
        },
        "context": report.context,
        "machine": machine and dataclasses.asdict(machine),
        "needs": [_need(each, places(each, machine)) for each in report.needs],
    }


def _need(need: Need, where: Iterable[Place]) -> dict[str, Any]:
    return {
        "backend": need.backend,
        "precision": need.precision,
        "draft_precision": need.draft_precision,
        "target_bytes": need.target.stored,
        "draft_bytes": need.draft and need.draft.stored,
        "bytes_read_per_token": need.target.read,
        "cache_bytes": need.cache,
        "memory_bytes": need.memory,
        "least_memory_gb": least_class(need),
        "places": [
            {"name": place.name, "fits": fits(need, place), "ms_per_token": 1e3 * need.seconds(place.bandwidth)}
            for place in where
        ],
    }


def _plain(facts: Any, without: Sequence[str]) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(facts) if field.name not in without]
    values = {name: getattr(facts, name) for name in fields}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
