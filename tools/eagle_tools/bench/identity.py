"""Checks that outputs are lossless: a method may change the speed, but not the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import mean

from eagle_tools.bench.methods import VANILLA
from eagle_tools.bench.rows import Row
from eagle_tools.peers.engine import MODES
from eagle_tools.ties import first_difference

PYTORCH = "pytorch"
FOREIGN = {PYTORCH, *MODES}  # backends of rows that no bundle gave


def differing_rows(rows: Sequence[Row]) -> Iterator[tuple[Row, Row]]:
    """Yields (row, reference) for each row of a bundle whose tokens differ from the reference: the row of vanilla on
    the same bundle, temperature and prompt, or without vanilla that of the first method."""
    references: dict[tuple[object, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.method != VANILLA):  # stable: vanilla first, then as they came
        if row.backend in FOREIGN:
            continue
        reference = references.setdefault(_case(row), row)
        if row.token_ids != reference.token_ids:
            yield row, reference


def difference_sentence(row: Row, reference: Row, tie: bool) -> str:
    """Returns a sentence on two rows that differ. tie: whether they differ only by rounding."""
    at = first_difference(row.token_ids, reference.token_ids)
    where = f"{row.method} on {row.bundle} ({row.precision}, {row.backend}, T = {row.temperature:g})"
    what = f"token {at} is {_token(row, at)}, {reference.method} has {_token(reference, at)}"
    verdict = "equal up to rounding" if tie else "NOT LOSSLESS"
    return f"{verdict}: {where}, prompt {row.prompt_id}: {what}"


def agreement(rows: Sequence[Row], others: Sequence[Row]) -> tuple[int, int]:
    """Returns the number of prompts with equal tokens, and the number of prompts that both have."""
    known = {row.prompt_id: row.token_ids for row in others}
    both = [row for row in rows if row.prompt_id in known]
    return sum(row.token_ids == known[row.prompt_id] for row in both), len(both)


def shared_start(rows: Sequence[Row], others: Sequence[Row]) -> float | None:
    """Returns the share of the tokens before the first one that differs, a mean over the prompts that both have; None
    without any."""
    known = {row.prompt_id: row.token_ids for row in others}
    both = [(row.token_ids, known[row.prompt_id]) for row in rows if row.prompt_id in known]
    return mean(first_difference(one, other) / len(other) for one, other in both) if both else None


def _case(row: Row) -> tuple[object, ...]:
    return row.bundle, row.precision, row.backend, row.temperature, row.prompt_id


def _token(row: Row, index: int) -> str:
    return str(row.token_ids[index]) if index < len(row.token_ids) else "missing"
