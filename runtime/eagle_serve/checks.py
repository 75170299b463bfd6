"""Checks of JSON values: each takes a value and the name of its field, and returns what the field means or raises
ApiError. Nothing is coerced: true is not a number, 1.0 not an integer, "1" neither."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from eagle_serve.errors import wrong_type, wrong_value

Check = Callable[[object, str], Any]
SURROGATE = re.compile("[\ud800-\udfff]")


def boolean(value: object, name: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong_type(name, value, "a boolean")
    return value


def text(value: object, name: str) -> str:
    """A string of whole characters."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    if half := SURROGATE.search(value):
        raise wrong_value(name, f"holds half a character (a surrogate) at position {half.start()}; send valid Unicode")
    return value


def an_object(value: object, name: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    return value


def a_list(value: object, name: str) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list")
    return value


def integer(low: int, high: int | None = None) -> Check:
    """A whole number from `low` to `high`."""

    def check(value: object, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(name, value, "an integer")
        if value < low or (high is not None and value > high):
            raise wrong_value(name, f"is {_short(value)}, but must be {_range(low, high)}")
        return value

    return check


def number(low: float = -math.inf, high: float = math.inf, *, above: bool = False) -> Check:
    """A finite number from `low` to `high`; above: `low` itself is too low."""

    def check(value: object, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise wrong_type(name, value, "a number")
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result) or not low <= result <= high or (above and result == low):
            wanted = f"above {low} and at most {high}" if above and high < math.inf else _range(low, high)
            wanted = f"above {low}" if above and high == math.inf else wanted
            raise wrong_value(name, f"is {_short(value)}, but must be {wanted}")
        return result

    return check


def one_of(choices: Sequence[str]) -> Check:
    """One of some strings."""

    def check(value: object, name: str) -> str:
        if text(value, name) not in choices:
            raise wrong_value(name, f"is {_short(value)}, but must be one of {', '.join(choices)}")
        return str(value)

    return check


def ids(value: object, name: str) -> tuple[int, ...]:
    """A list of token ids."""
    check = integer(0, 2**31 - 1)
    return tuple(check(item, f"{name}[{index}]") for index, item in enumerate(a_list(value, name)))


def _range(low: float, high: float | None) -> str:
    if high is None or high == math.inf:
        return "a finite number" if low == -math.inf else f"at least {low}"
    return f"from {low} to {high}"


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"
    said = repr(value)
    return said if len(said) <= 60 else f"{said[:57]}..."
