"""How each kind of head is trained. What its checkpoint has, eagle_export.heads.kinds says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eagle_runtime.bundle.manifest import HeadKind

# How the folder of a trained head is written.
Layout = Literal["safeailab", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("safeailab", "speculators")


@dataclass(frozen=True, slots=True)
class Trained:
    """A kind that is trained. steps: the setting of TrainConfig that counts the drafted tokens in a row whose
    acceptance is measured; unrolled: whether training looks at all of these, or at the first. ablated: whether its
    inputs may be left out. own_vocabulary: whether it may draft a part of the target's tokens. from_bundle: whether it
    learns from features of a bundle too. own_command: whether `eagle-train head` leaves it to another command. layouts:
    that its folder may be written in."""

    steps: str
    unrolled: bool = True
    ablated: bool = False
    own_vocabulary: bool = False
    from_bundle: bool = True
    own_command: bool = False
    layouts: tuple[Layout, ...] = ("safeailab",)


TRAINED: Mapping[HeadKind, Trained] = {
    "eagle1": Trained("ttt_steps", unrolled=False, ablated=True),
    "eagle3": Trained("ttt_steps", own_vocabulary=True, layouts=LAYOUTS),
    "medusa": Trained("heads"),
    "hydra": Trained("heads"),
    "block": Trained("block", own_vocabulary=True, from_bundle=False, own_command=True),
}
