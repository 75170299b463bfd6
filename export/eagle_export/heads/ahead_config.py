"""What a config says of heads that draft one position ahead each: Medusa's and Hydra's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NO_ATTENTION: Mapping[str, Any] = {  # of HeadConfig, for Medusa's and Hydra's heads
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rms_norm_eps"), 0),
    **dict.fromkeys(("qkv_bias", "fc_bias"), False),
    "rope": {},
    "taps": (),
}


@dataclass(frozen=True, slots=True)
class Ahead:
    """What only such heads have. count: of heads, so of positions that are drafted. blocks: residual blocks of each.
    bias: whether their linear layers have one. own_lm_heads: whether every head has an LM head; else all have the
    target's. lm_bias: whether the LM heads have a bias. grounded: whether a head reads the tokens since the feature
    (Hydra)."""

    count: int
    blocks: int
    bias: bool
    own_lm_heads: bool
    lm_bias: bool
    grounded: bool
