"""A checkpoint's own greedy continuations, that what an export makes of it is compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.target import open_target
from eagle_export.recording.continuations import ask
from eagle_export.recording.source_text import Asked, Greedy, Written


def continuations(
    source: Path | Checkpoint, prompts: Sequence[Sequence[int]], eos: Collection[int], count: int
) -> list[Written]:
    """Returns at most `count` tokens after each prompt, up to the first eos, included, with their logits."""
    checkpoint = open_target(source) if isinstance(source, Path) else source
    results: list[Written] = []
    texts = [Greedy(prompt, count, eos, with_logits=True) for prompt in prompts]
    ask(checkpoint, Asked(texts, (), lambda _, written: results.extend(written)))
    return results
