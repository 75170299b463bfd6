"""Checks of what callers pass: numbers of the right type and range, and how a wrong value is shown in an error.

Booleans are no numbers here; NumPy's numbers are as good as Python's.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex, cast

import numpy as np

from eagle_runtime.errors import RequestError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 4


def shown(value: object) -> str:
    """A value as an error shows it: short, however large it is."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return _SHORT.repr(value)
    except Exception:  # integers of thousands of digits, and objects that cannot show themselves
        return f"a {type(value).__name__} that cannot be shown"


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """A whole number from `least` to `most`, which may be a NumPy one; raises RequestError naming what it is of."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise RequestError(f"{name} is {shown(value)}, but must be a whole number")
    found = int(cast(SupportsIndex, value))
    if found < least or (most is not None and found > most):
        wanted = f"{least} or more" if most is None else f"between {least} and {most}"
        raise RequestError(f"{name} is {shown(found)}, but must be {wanted}")
    return found


def number(name: str, value: object) -> float:
    """Any number, NaN and the infinities among them, as a float; raises RequestError for what is none."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.number):
        raise RequestError(f"{name} is {shown(value)}, but must be a number")
    try:
        return float(cast(SupportsFloat, value))
    except (OverflowError, TypeError):  # an integer beyond all floats, or a complex number
        raise RequestError(f"{name} is {shown(value)}, but must be a finite number") from None


def finite(name: str, value: object) -> float:
    """A finite number; raises RequestError."""
    found = number(name, value)
    if not math.isfinite(found):
        raise RequestError(f"{name} is {found}, but must be a finite number")
    return found


def token_ids(name: str, values: Iterable[Any]) -> list[int]:
    """Token ids as Python's integers; their range is not checked. Raises RequestError for what is no whole number."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and np.issubdtype(values.dtype, np.integer):
        ids: list[int] = values.tolist()
        return ids
    if isinstance(values, str | bytes | bytearray):
        raise RequestError(f"{name} is {shown(values)}, but must be a list of token ids")
    try:
        items = list(values)
    except TypeError:
        raise RequestError(f"{name} is {shown(values)}, but must be a list of token ids") from None
    return [_token_id(name, index, item) for index, item in enumerate(items)]


def _token_id(name: str, index: int, value: object) -> int:
    if type(value) is int:
        return value
    if isinstance(value, np.integer):
        return int(value)
    raise RequestError(f"{name} holds {shown(value)} at position {index}, which is no token id")
