"""What Medusa's and Hydra's producers call the tensors of their heads.

    0.0.linear.weight, 0.1.weight                 -> heads.0.blocks.0.linear.weight, heads.0.lm_head.weight
    hydra_mlp.0.0.linear.weight, hydra_lm_head.0.weight

Official names: heads.{head}.blocks.{block}.linear, .res_connection (Hydra's first block), heads.{head}.lm_head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eagle_export.base.errors import ExportError
from eagle_export.heads.prediction import MEDUSA_HEADS
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.stored_tensors import StoredTensor

# Of Hydra's modules: their own copy of the target's embedding, and parts of architectures that are not read.
OTHER_PARTS = ("prefix_embeding_layer.", "cross_attn.", "self_attn.", "eagle_")


@dataclass(frozen=True, slots=True)
class AheadNames:
    """prefixes: what all names may begin with; the first that the file has is taken off. parts: pattern of a name
    without it -> official name. mark: pattern of a name that every such file has. alone: whether the folder holds
    nothing else, so that every other name is kept."""

    prefixes: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    mark: str
    alone: bool = True

    def held_by(self, head: Checkpoint) -> bool:
        """Whether a folder has such heads."""
        prefix = self._prefix(head)
        return any(name.startswith(prefix) and re.match(self.mark, name[len(prefix) :]) for name in head.tensors)

    def official(self, head: Checkpoint) -> Mapping[str, StoredTensor]:
        """Returns the heads' tensors by their official names. Raises ExportError for two tensors of one name."""
        prefix, named = self._prefix(head), dict[str, StoredTensor]()
        for name, tensor in head.tensors.items():
            new = self._renamed(name.removeprefix(prefix)) if name.startswith(prefix) else None
            new = name if new is None and (self.alone or name.startswith(prefix)) else new
            if new in named:
                raise ExportError(
                    f"{head.folder} holds tensors {named[new].name!r} and {name!r}, which are one in this layout; the "
                    "checkpoint is damaged"
                )
            if new is not None:
                named[new] = tensor
        return named

    def _prefix(self, head: Checkpoint) -> str:
        starts = (each for each in self.prefixes if any(name.startswith(each) for name in head.tensors))
        return next(starts, "")

    def _renamed(self, name: str) -> str | None:
        for pattern, official in self.parts:
            if (match := re.fullmatch(pattern, name)) is not None:
                return match.expand(official)
        return None


_MEDUSA = (
    (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"heads.\1.blocks.\2.linear.\3"),
    (r"(\d+)\.\d+\.weight", r"heads.\1.lm_head.weight"),
)
MEDUSA = AheadNames((), _MEDUSA, mark=r"0\.0\.linear\.weight")
MEDUSA_IN_TARGET = AheadNames((MEDUSA_HEADS,), _MEDUSA, mark=r"0\.0\.linear\.weight", alone=False)
VLLM_MEDUSA = AheadNames(
    ("medusa_heads.",),
    (
        (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"heads.\1.blocks.\2.linear.\3"),
        (r"lm_heads\.(\d+)\.weight", r"heads.\1.lm_head.weight"),
    ),
    mark=r"blocks\.0\.layers\.0\.weight",
)
HYDRA = AheadNames(
    ("hydra_head.",),
    (
        (r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)", r"heads.\1.blocks.\2.\3.\4"),
        (r"hydra_lm_head\.(\d+)\.(weight|bias)", r"heads.\1.lm_head.\2"),
        (r"input_embed_fn\.weight", "embed_tokens.weight"),
    ),
    mark=r"hydra_mlp\.0\.\d+\.linear\.weight",
)
