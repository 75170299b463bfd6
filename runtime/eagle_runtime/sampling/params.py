"""How tokens are drawn, as a caller says it, checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_runtime.base.arguments import checked_float, checked_int, short_repr
from eagle_runtime.base.errors import RequestError

FINITE = "a finite number"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults are greedy decoding.

    temperature: 0 takes the highest score (lowest id on a tie); otherwise scores are divided by it.
    top_k: keep the k best (0: all). top_p: keep the smallest set of that mass (1: all). min_p: drop tokens less
    likely than min_p times the best (0: none). repetition_penalty: over prompt and output, as in HF (1: none).
    presence_penalty, frequency_penalty: over the output only, as in OpenAI's API (0: none).
    logit_bias: token id -> number added before anything else, -inf or -1,000 to 1,000 (what is beyond counts as that).
    seed: any 64-bit number. Raises RequestError for a value of a wrong type or range; NumPy's numbers are kept as
    Python's."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "top_k": checked_int("top_k", self.top_k, 0),
            "seed": checked_int("seed", self.seed, 0, 2**64 - 1),
            "logit_bias": _checked_bias(self.logit_bias),
        }
        ranges: list[tuple[str, float, Callable[[float], bool], str]] = [
            ("temperature", self.temperature, lambda x: x >= 0, "0 or more"),
            ("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "above 0"),
            ("presence_penalty", self.presence_penalty, lambda x: True, FINITE),
            ("frequency_penalty", self.frequency_penalty, lambda x: True, FINITE),
        ]
        for name, value, holds, wanted in ranges:
            checked[name] = number = checked_float(name, value)
            if not math.isfinite(number) or not holds(number):
                raise RequestError(f"{name} is {number}, but must be {wanted if math.isfinite(number) else FINITE}")
        for name, result in checked.items():
            object.__setattr__(self, name, result)  # the class is frozen for others


def bias_of_json(bias: Any) -> Any:
    """A bias whose tokens are strings, since JSON has no other keys, with the digits among them as numbers."""
    if not isinstance(bias, dict):
        return bias
    return {int(key) if key.isdecimal() and len(key) < 20 else key: value for key, value in bias.items()}


def _checked_bias(bias: object) -> dict[int, float]:
    """token id -> number; raises RequestError."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {short_repr(bias)}, but must map token ids to numbers")
    checked = {}
    for token, value in bias.items():
        token_id = checked_int("a token of logit_bias", token, 0)
        added = checked_float(f"logit_bias of token {short_repr(token_id)}", value)
        if math.isnan(added) or added == math.inf:
            raise RequestError(f"logit_bias of token {short_repr(token_id)} is {added}, but must be a number or -inf")
        checked[token_id] = added
    return checked
