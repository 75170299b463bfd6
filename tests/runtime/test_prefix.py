"""What two token sequences begin with."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_runtime.core.decoding_state import common_prefix


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [], 0),
        ([], [1], 0),
        ([1], [2], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2, 3], (1, 2, 4, 5), 2),
        ([-1, 5], [-2, 5], 0),
        ([1, 2, 3], np.array([1, 9, 3]), 1),
    ],
)
def test_the_tokens_in_common_are_counted_from_the_beginning(
    first: list[int], second: list[int], expected: int
) -> None:
    assert common_prefix(first, second) == common_prefix(second, first) == expected


def test_it_equals_a_comparison_token_by_token() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        first, second = (rng.integers(0, 2, rng.integers(0, 12)).tolist() for _ in range(2))
        slow = 0
        while slow < min(len(first), len(second)) and first[slow] == second[slow]:
            slow += 1
        assert common_prefix(first, second) == slow
