"""Everything that decides what a training run computes, as frozen data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.errors import TrainError

# What a row of an EAGLE-1 head sees (EAGLE paper, section 5.3.2: the input ablation). Decoding always feeds
# feature+shifted; "feature" and "token" heads have zero weights for the other half, so they decode all the same.
Inputs = Literal["feature+shifted", "feature+unshifted", "feature", "token"]
INPUTS: tuple[Inputs, ...] = ("feature+shifted", "feature+unshifted", "feature", "token")

DECAY = 0.8  # weight of step j of training-time test is DECAY**j (EAGLE-3)
CLIP = 0.5  # largest norm of the gradient
BETAS = (0.9, 0.95)  # AdamW


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """steps, minutes: the budget; the first to be used up ends the run. seq_len: most tokens of a window. lr: peak
    learning rate, None for one by the target's width. warmup: steps of rising rate. ttt_steps: unrolled steps, trained
    for EAGLE-3 and measured for both kinds. draft_vocab: logits of an EAGLE-3 head, None for at most 32000. noise:
    half width of the uniform noise on EAGLE-1's features. classification: weight of EAGLE-1's cross-entropy beside the
    regression (EAGLE: 0.1; 1 suits a head that already tells features well). save_every, log_every: steps."""

    kind: HeadKind
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    seq_len: int = 512
    lr: float | None = None
    warmup: int = 100
    ttt_steps: int = 7
    draft_vocab: int | None = None
    seed: int = 0
    noise: float = 0.1
    classification: float = 0.1
    inputs: Inputs = "feature+shifted"
    recompute: bool = False
    save_every: int = 500
    log_every: int = 20

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise TrainError("a run needs an end; give steps or minutes")
        if self.steps is not None and self.steps < 0:
            raise TrainError(f"steps is {self.steps}, but must be 0 or more")
        for name, least in {"batch_size": 1, "seq_len": 4, "ttt_steps": 1, "save_every": 1, "log_every": 1}.items():
            if getattr(self, name) < least:
                raise TrainError(f"{name.replace('_', '-')} is {getattr(self, name)}, but must be {least} or more")
        for name in ("minutes", "lr", "draft_vocab"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise TrainError(f"{name.replace('_', '-')} is {getattr(self, name)}, but must be above 0")
        if self.inputs not in INPUTS:
            raise TrainError(f"inputs is {self.inputs!r}, but must be one of {', '.join(INPUTS)}")
        if self.kind == "eagle3" and self.inputs != "feature+shifted":
            raise TrainError("the input ablation is EAGLE-1's; train an eagle1 head, or with all inputs")
        if self.warmup < 0 or self.noise < 0 or self.classification < 0 or self.seed < 0:
            raise TrainError("warmup, noise, classification and seed must be 0 or more")

    def fixed(self) -> dict[str, Any]:
        """The settings that a resumed run must share; budget and bookkeeping may change."""
        free = ("steps", "minutes", "save_every", "log_every", "recompute")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}

    def peak_lr(self, hidden_size: int) -> float:
        """1e-4 at Llama-8B's width; narrower heads bear, and need, more."""
        return self.lr if self.lr is not None else min(max(1e-4 * 4096 / hidden_size, 5e-5), 6e-3)

    def lr_factor(self, step: int, elapsed_s: float) -> float:
        """Share of the peak rate at a step: up over the warm-up, then down to nothing where the budget ends."""
        warmup = self.warmup if self.steps is None else min(self.warmup, self.steps // 10)
        rise = min(1.0, (step + 1) / (warmup + 1))
        return rise * max(0.0, 1.0 - self.used(step, elapsed_s))

    def used(self, step: int, elapsed_s: float) -> float:
        """Share of the budget that is used up; 1 or more: done."""
        shares = []
        if self.steps is not None:
            shares.append(step / self.steps if self.steps else 1.0)
        if self.minutes is not None:
            shares.append(elapsed_s / (60 * self.minutes))
        return max(shares)
