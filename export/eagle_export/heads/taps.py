"""Which of the target's hidden states an EAGLE-3 head reads where its config does not say."""

from __future__ import annotations

from eagle_export.base.errors import ExportError


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's default taps: the inputs of target layers 2, N//2 and N-3, as indices into hidden_states.

    Raises ExportError below 7 layers, where they are not three ascending layers."""
    taps = (2, num_layers // 2, num_layers - 3)
    if not taps[0] < taps[1] < taps[2]:
        raise ExportError(
            f"the target has {num_layers} layers, but EAGLE-3's three taps need 7 or more; use an EAGLE-1 head"
        )
    return taps
