"""Training-time test: a head unrolled over its own hidden states, all rows of a text at once (EAGLE-3, section 3.2).

Step j of row i plays the j-th draft after the target verified everything up to token i:

    input token  t[i+1+j], position i+j
    input hidden the target's features at i for j = 0, else this row's own output of step j-1
    attends      rows 0..i of step 0 (verified text) and row i of steps 1..j (its own draft)

That is the same layer with the keys and values of earlier steps as past rows and a mask of one causal block followed
by one diagonal block per later step. Rows whose token lies beyond the text are computed and must be ignored: row i of
step j is valid while i + 1 + j < T.

Shapes: B texts, T tokens, R = T - 1 rows, Hd width of the head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.heads.layers import Rows

Head = Eagle1Head | Eagle3Head


def ttt_mask(rows: int, steps: int, device: torch.device) -> Tensor:
    """Returns the additive mask [1, 1, R, steps * R]; step j uses its first (j + 1) * R columns."""
    index = torch.arange(rows, device=device)
    causal, diagonal = index[None] <= index[:, None], index[None] == index[:, None]
    attended = torch.cat([causal, *[diagonal] * (steps - 1)], 1)
    return torch.zeros(1, 1, rows, steps * rows, device=device).masked_fill(~attended, -torch.inf)


def unroll(
    head: Head, config: HeadConfig, features: Tensor, ids: Tensor, steps: int, offset: int = 1
) -> Iterator[Tensor]:
    """Yields the head's hidden states [B, R, Hd] of each step.

    features [B, T, Hd] (EAGLE-3: after fc), ids [B, T]. offset: the token of row i is t[i + offset + step]; 1 as in
    decoding, 0 in the ablation with unshifted tokens."""
    batch, rows = ids.shape[0], ids.shape[1] - 1
    mask = ttt_mask(rows, steps, ids.device)
    hidden = features[:, :-1]
    empty = hidden.new_zeros(batch, 0, config.num_kv_heads, config.head_dim)
    past: list[Rows] = [(empty, empty)] * config.num_layers
    positions = torch.arange(rows, device=ids.device)[None]
    for step in range(steps):
        tokens = _from(ids, offset + step, rows)
        hidden, new = head(tokens, hidden, positions + step, mask[..., : (step + 1) * rows], past)
        if step + 1 < steps:
            past = [(torch.cat([k, nk], 1), torch.cat([v, nv], 1)) for (k, v), (nk, nv) in zip(past, new, strict=True)]
        yield hidden


def _from(ids: Tensor, start: int, count: int) -> Tensor:
    """Returns ids[:, start : start + count], with zeros after the end."""
    part = ids[:, start : start + count]
    return pad(part, (0, count - part.shape[1]))
