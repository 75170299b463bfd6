"""The report of `eagle-export inspect` for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from eagle_export.inspection.report import Need, Place, Report, fits, least_class, places


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
            "block": head.config and head.config.block and dataclasses.asdict(head.config.block),
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
        "activation_bytes": need.activations,
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
