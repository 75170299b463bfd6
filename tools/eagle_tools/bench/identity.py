"""Losslessness, checked on the spot: a method may change how fast tokens come, never which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eagle_tools.bench.methods import VANILLA
from eagle_tools.bench.rows import Row

PYTORCH = "pytorch"


def mismatches(rows: Sequence[Row]) -> Iterator[str]:
    """One sentence for each row of a bundle whose tokens are not those of vanilla on the same bundle, temperature and
    prompt. Without vanilla, of the first method there."""
    references: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.method != VANILLA):  # stable: vanilla first, then as they came
        if row.backend == PYTORCH:
            continue
        reference = references.setdefault(_case(row), row)
        if row.token_ids != reference.token_ids:
            at = first_difference(row.token_ids, reference.token_ids)
            where = f"{row.method} on {row.bundle} ({row.precision}, {row.backend}, T = {row.temperature:g})"
            what = f"token {at} is {_token(row, at)}, {reference.method} has {_token(reference, at)}"
            yield f"NOT LOSSLESS: {where}, prompt {row.prompt_id}: {what}"


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs, or the shorter length."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def agreement(rows: Sequence[Row], others: Sequence[Row]) -> tuple[int, int]:
    """How many prompts both answer with the same tokens, and how many prompts both have."""
    known = {row.prompt_id: row.token_ids for row in others}
    both = [row for row in rows if row.prompt_id in known]
    return sum(row.token_ids == known[row.prompt_id] for row in both), len(both)


def _case(row: Row) -> tuple[object, ...]:
    return row.bundle, row.precision, row.backend, row.temperature, row.prompt_id


def _token(row: Row, index: int) -> str:
    return str(row.token_ids[index]) if index < len(row.token_ids) else "missing"
