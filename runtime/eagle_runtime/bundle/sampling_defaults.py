"""How a model's tokens are drawn where a caller does not say, as its bundle's manifest holds it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model's own settings, by the names and meanings of SamplingParams. Without arguments: greedy decoding.

    The exporter takes them from the model's files (export/eagle_export/reading/families/generation.py); every setting
    that a caller gives wins over the one here."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


# Least and greatest values; what is above the least alone begins at the smallest positive number.
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (math.ulp(0), 1),
    "min_p": (0, 1),
    "repetition_penalty": (math.ulp(0), 1e6),
}
