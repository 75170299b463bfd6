"""Text that a model of transformers writes itself, for checks of heads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from eagle_export.checking.head_check import Continued
from eagle_export.recording.source_text import Greedy, Writer


def own_text(model: Any, starts: Sequence[list[int]], count: int, eos: Collection[int]) -> list[Continued]:
    """Continue all starts greedily by at most `count` tokens, up to the first eos, included."""
    _, written = Writer(model).write([], 0, (), [Greedy(start, count, eos) for start in starts], ())
    return [Continued(each.start, each.tokens) for each in written]
