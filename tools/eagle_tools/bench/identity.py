"""Losslessness, checked on the spot: a method may change how fast tokens come, never which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle_tools.bench.methods import VANILLA
from eagle_tools.bench.rows import Row
from eagle_tools.ties import first_difference

PYTORCH = "pytorch"


def parted(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Each row of a bundle whose tokens are not those of vanilla on the same bundle, temperature and prompt, with
    vanilla's. Without vanilla, with the first method's there."""
    references: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.method != VANILLA):  # stable: vanilla first, then as they came
        if row.backend == PYTORCH:
            continue
        reference = references.setdefault(_case(row), row)
        if row.token_ids != reference.token_ids:
            yield row, reference


def told(row: Row, reference: Row, tie: bool) -> str:
    """A sentence about rows that parted. tie: whether rounding alone decided."""
    at = first_difference(row.token_ids, reference.token_ids)
    where = f"{row.method} on {row.bundle} ({row.precision}, {row.backend}, T = {row.temperature:g})"
    what = f"token {at} is {_token(row, at)}, {reference.method} has {_token(reference, at)}"
    verdict = "equal but for rounding" if tie else "NOT LOSSLESS"
    return f"{verdict}: {where}, prompt {row.prompt_id}: {what}"


def agreement(rows: Sequence[Row], others: Sequence[Row]) -> tuple[int, int]:
    """How many prompts both answer with the same tokens, and how many prompts both have."""
    known = {row.prompt_id: row.token_ids for row in others}
    both = [row for row in rows if row.prompt_id in known]
    return sum(row.token_ids == known[row.prompt_id] for row in both), len(both)


def _case(row: Row) -> tuple[object, ...]:
    return row.bundle, row.precision, row.backend, row.temperature, row.prompt_id


def _token(row: Row, index: int) -> str:
    return str(row.token_ids[index]) if index < len(row.token_ids) else "missing"
