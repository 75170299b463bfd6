"""Measures a head on held-out text."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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
from eagle_train.precision import mixed
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
    """Returns the acceptance on EVAL_WINDOWS windows, spread evenly over all files, and that of a block head without
    its transitions.

    as_read: replaces the target's features by those that the head reads."""
    tally, free = Tally(config.measured_steps, device), Tally(config.measured_steps, device)
    count = len(windows)
    for index in np.linspace(0, count - 1, min(EVAL_WINDOWS, count)).astype(int).tolist():
        batch = gather(windows, [index], device)  # one at a time: whole vocabularies of logits are large
        taught = teacher.teach(windows, [index], batch)  # in the target's own precision
        with mixed(device):
            if isinstance(head, BlockHead):
                measure_block(head, shape, batch, taught, vocabulary, tally, free)
            elif isinstance(head, HeadsAhead):
                measure_ahead(head, batch, as_read(taught), tally)
            else:
                measure(head, shape, batch, as_read(taught), vocabulary, config, tally)
    return tally.read(), free.read()
