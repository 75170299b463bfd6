"""Measures a head on held-out text."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead
from eagle_export.heads.config import HeadConfig
from eagle_train.ahead import measure_ahead
from eagle_train.batches import Teacher, gather
from eagle_train.blocks import measure_block
from eagle_train.config import TrainConfig
from eagle_train.data import Windows
from eagle_train.head import AnyHead
from eagle_train.metrics import Acceptance, Tally
from eagle_train.objective import Vocabulary, measure
from eagle_train.taught import Taught

EVAL_WINDOWS = 64


@torch.no_grad()
def examine(
    head: AnyHead,
    shape: HeadConfig,
    windows: Windows,
    teacher: Teacher,
    as_read: Callable[[Taught], Taught],
    vocabulary: Vocabulary | None,
    config: TrainConfig,
    device: torch.device,
) -> tuple[Acceptance, Acceptance]:
    """Returns the acceptance on the first EVAL_WINDOWS windows, and that of a block head without its transitions.

    as_read: replaces the target's features by those that the head reads."""
    tally, free = Tally(config.measured_steps, device), Tally(config.measured_steps, device)
    for index in range(min(EVAL_WINDOWS, len(windows))):  # one at a time: whole vocabularies of logits are large
        batch = gather(windows, [index], device)
        taught = teacher.teach(windows, [index], batch)
        if isinstance(head, BlockHead):
            measure_block(head, shape, batch, taught, vocabulary, tally, free)
        elif isinstance(head, HeadsAhead):
            measure_ahead(head, batch, as_read(taught), tally)
        else:
            measure(head, shape, batch, as_read(taught), vocabulary, config, tally)
    return tally.read(), free.read()
