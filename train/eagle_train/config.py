"""The settings of a training run and of generating answers, as frozen data. Defaults stand here alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle_runtime.bundle.manifest import HeadKind
from eagle_runtime.sampling.params import SamplingParams
from eagle_train.errors import TrainError
from eagle_train.kinds import TRAINED, Layout, Trained

# What a row of an EAGLE-1 head reads (EAGLE paper, section 5.3.2: the input ablation). Decoding always feeds
# feature+shifted; "feature" and "token" heads have zero weights for the other input, so they can decode too.
Inputs = Literal["feature+shifted", "feature+unshifted", "feature", "token"]
INPUTS: tuple[Inputs, ...] = ("feature+shifted", "feature+unshifted", "feature", "token")

DECAY = 0.8  # weight of step j of training-time test is DECAY**j (EAGLE-3)
CLIP = 0.5  # maximum norm of the gradient
BETAS = (0.9, 0.95)  # AdamW
DRAFT_VOCAB = 32000  # default size of the draft vocabulary, or the target's if that is smaller
BLOCK_ROWS = 64  # most rows of a block; bundles hold no more
LEAST_SETTINGS = {"batch_size": 1, "seq_len": 4, "ttt_steps": 1, "heads": 1, "save_every": 1, "log_every": 1}
LEAST_SETTINGS |= {"eval_every": 1, "block": 2, "layers": 1, "anchors": 1, "singles": 0, "markov_rank": 0}
ALL_FILES = "**/*"  # default pattern for the files of a data folder


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """Settings that decide what a training run computes.

    steps, minutes: the budget; the run ends when one of them is used up. seq_len: maximum tokens of a window. lr: peak
    learning rate; None chooses it by the target's width. warmup: steps of rising rate. ttt_steps: unrolled steps,
    trained for EAGLE-3 and measured for both EAGLE kinds. ttt_share: of an EAGLE-3 head's rows that carry loss, the
    share that is unrolled beyond the first step, drawn anew each time. draft_vocab: logits of an EAGLE-3 or block head;
    None takes DRAFT_VOCAB or the target's vocabulary. heads: how many Medusa or Hydra heads. noise: half width of the
    uniform noise on EAGLE-1's features. classification: weight of EAGLE-1's cross-entropy relative to the regression
    (EAGLE: 0.1; 1 suits a head that predicts features well). save_every, log_every, eval_every: steps; the last between
    measurements on the held-out data. Of block heads: block: rows of a block, the root's included. layers: decoder
    layers. mlp, kv_heads: units of their MLPs, their key/value heads; None takes the target's. anchors: blocks per text
    and step. singles: blocks of the first row alone besides, which all drafts build on. markov_rank: of the
    transitions; 0 for none."""

    kind: HeadKind
    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    seq_len: int = 512
    lr: float | None = None
    warmup: int = 100
    ttt_steps: int = 7
    ttt_share: float = 1.0
    draft_vocab: int | None = None
    heads: int = 4
    seed: int = 0
    noise: float = 0.1
    classification: float = 0.1
    inputs: Inputs = "feature+shifted"
    recompute: bool = False
    block: int = 8
    layers: int = 1
    mlp: int | None = None
    kv_heads: int | None = None
    anchors: int = 24
    singles: int = 64
    markov_rank: int = 64
    save_every: int = 500
    log_every: int = 20
    eval_every: int = 500

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise TrainError("a run needs an end; give steps or minutes")
        if self.steps is not None and self.steps < 0:
            raise TrainError(f"steps is {self.steps}, but must be 0 or more")
        for name, least in LEAST_SETTINGS.items():
            if getattr(self, name) < least:
                raise TrainError(f"{name} is {getattr(self, name)}, but must be {least} or more")
        if self.block > BLOCK_ROWS:
            raise TrainError(f"block is {self.block}, but must be {BLOCK_ROWS} or less")
        for name in ("minutes", "lr", "draft_vocab", "mlp", "kv_heads"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise TrainError(f"{name} is {getattr(self, name)}, but must be above 0")
        if not 0 < self.ttt_share <= 1:
            raise TrainError(f"ttt_share is {self.ttt_share}, but must be above 0 and at most 1")
        if self.inputs not in INPUTS:
            raise TrainError(f"inputs is {self.inputs!r}, but must be one of {', '.join(INPUTS)}")
        if self.kind not in TRAINED:
            *most, last = TRAINED
            raise TrainError(f"heads of kind {self.kind} are not trained here, only {', '.join(most)} and {last}")
        if self.draft_vocab is not None and not self.of_kind.own_vocabulary:
            raise TrainError(
                f"draft_vocab is for EAGLE-3 and block heads; a head of kind {self.kind} has the target's vocabulary, "
                "so leave it out"
            )
        if not self.of_kind.ablated and self.inputs != "feature+shifted":
            raise TrainError(
                "the input ablation is for EAGLE-1 heads; train an eagle1 head, or leave inputs at its default"
            )
        if not (self.warmup >= 0 and self.noise >= 0 and self.classification >= 0 and self.seed >= 0):
            raise TrainError("warmup, noise, classification and seed must be 0 or more")

    @property
    def of_kind(self) -> Trained:
        """How heads of this kind are trained."""
        return TRAINED[self.kind]

    @property
    def measured_steps(self) -> int:
        """Drafted tokens in a row of which the acceptance is measured."""
        return int(getattr(self, self.of_kind.steps))

    @property
    def trained_steps(self) -> int:
        """Those that training looks at."""
        return self.measured_steps if self.of_kind.unrolled else 1

    def fixed(self) -> dict[str, Any]:
        """Returns the settings that a resumed run must share; budget and intervals may change."""
        free = ("steps", "minutes", "save_every", "log_every", "eval_every", "recompute")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in free}

    def peak_lr(self, hidden_size: int) -> float:
        """Returns the peak learning rate: `lr`, or 1e-4 at Llama-8B's width and more for narrower heads."""
        return self.lr if self.lr is not None else min(max(1e-4 * 4096 / hidden_size, 5e-5), 6e-3)

    def lr_factor(self, step: int, elapsed_s: float) -> float:
        """Returns the share of the peak rate at a step: it rises during the warm-up and falls to 0 at the budget's
        end."""
        warmup = self.warmup if self.steps is None else min(self.warmup, self.steps // 10)
        rise = min(1.0, (step + 1) / (warmup + 1))
        return rise * max(0.0, 1.0 - self.used(step, elapsed_s))

    def used(self, step: int, elapsed_s: float) -> float:
        """Returns the used share of the budget; at 1 or more the run is done."""
        shares = []
        if self.steps is not None:
            shares.append(step / self.steps if self.steps else 1.0)
        if self.minutes is not None:
            shares.append(elapsed_s / (60 * self.minutes))
        return max(shares)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What to train on and where. output: folder of the head; training/ in it gets the checkpoint and the log. pattern:
    files of a data folder to read. cache: folder for the target's features; None computes them every time. init: folder
    of a trained head to continue from; None starts from an untrained one. target_bundle: the exported target whose
    features and logits are learned; None takes those of `target`. layout: of the written head. device: None takes CUDA
    where there is one."""

    target: Path
    data: tuple[Path, ...]
    output: Path
    eval_data: tuple[Path, ...] = ()
    pattern: str = ALL_FILES
    cache: Path | None = None
    init: Path | None = None
    target_bundle: Path | None = None
    layout: Layout = "safeailab"
    device: str | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if self.target_bundle is not None and self.cache is not None:
            raise TrainError(
                "cache keeps states of the target in TARGET, from which logits are computed again; leave it out where "
                "a bundle is the target"
            )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target answers prompts. temperature 0 takes the likeliest token. top_k 0 allows all tokens. samples:
    answers per prompt. cut_loops: whether an answer that repeats itself ends where the repetition begins. batch_size:
    prompts that are answered at once, on which the answers do not depend."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    samples: int = 1
    seed: int = 0
    cut_loops: bool = False
    batch_size: int = 128

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.samples < 1 or self.batch_size < 1:
            raise TrainError("max_new_tokens, samples and batch_size must be 1 or more")
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise TrainError("temperature and top_k must be 0 or more, top_p above 0 and at most 1")

    def of_answer(self, number: int) -> SamplingParams:
        """Returns the settings as those of the runtime for the answer of this number."""
        seed = self.seed * 1_000_003 + number
        return SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=seed)
