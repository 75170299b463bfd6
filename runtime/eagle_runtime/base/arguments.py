"""Checks of what callers pass: numbers of the right type and range, and how an error shows a wrong value.

Booleans do not count as numbers; NumPy's numbers are accepted like Python's. JSON from outside may be MOST_DEPTH levels
deep: nobody writes deeper, and functions that call themselves for each level would run out of stack.
"""

from __future__ import annotations

import json
import numbers
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, SupportsFloat, SupportsIndex, cast

import numpy as np

from eagle_runtime.base.errors import RequestError

MOST_DEPTH = 64  # of objects and lists in each other; chosen
_SHORT = reprlib.Repr()  # sizes chosen for one line of a terminal
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 4
_SHORT.maxlevel = 1


def short_repr(value: object) -> str:
    """Returns the repr of a value, cut to what one sentence can hold."""
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return _SHORT.repr(value)
    except Exception:  # integers of thousands of digits, and objects whose repr fails
        return f"a {type(value).__name__} that cannot be shown"


def is_deeper(value: object, most: int = MOST_DEPTH) -> bool:
    """Returns whether dicts and lists stand in each other on more than `most` levels, as in one that holds itself."""
    level = [value]
    for _ in range(most + 1):
        held = {id(part): part for part in level if not isinstance(part, str | int | float | None)}
        whole = [part for part in held.values() if isinstance(part, Mapping | list | tuple)]
        if not whole:
            return False
        level = [part for one in whole for part in (one.values() if isinstance(one, Mapping) else one)]
    return True


def json_value(text: str) -> Any:
    """Returns what a JSON text says. Raises ValueError, also for NaN and infinities, and RecursionError."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(name: str) -> NoReturn:
    raise ValueError(name)


def json_text(name: str, value: object) -> str:
    """Returns a value as JSON; raises RequestError naming it for what is not JSON."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON ({error}); use text, numbers, lists and dicts") from None


def checked_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """Returns a Python or NumPy integer from `least` to `most` as an int; raises RequestError naming the setting."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise RequestError(f"{name} is {short_repr(value)}, but must be a whole number")
    integer = int(cast(SupportsIndex, value))
    if integer < least or (most is not None and integer > most):
        wanted = f"{least} or more" if most is None else f"between {least} and {most}"
        raise RequestError(f"{name} is {short_repr(integer)}, but must be {wanted}")
    return integer


def checked_float(name: str, value: object) -> float:
    """Returns any number, also NaN and infinities, as a float; raises RequestError for other values."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | np.number):
        raise RequestError(f"{name} is {short_repr(value)}, but must be a number")
    try:
        return float(cast(SupportsFloat, value))
    except (OverflowError, TypeError):  # an integer beyond all floats, or a complex number
        raise RequestError(f"{name} is {short_repr(value)}, but must be a finite number") from None


def checked_ids(name: str, values: Iterable[Any]) -> list[int]:
    """Returns token ids as a list of ints; their range is not checked. Raises RequestError for a value that is not an
    integer."""
    if isinstance(values, np.ndarray) and values.ndim == 1 and np.issubdtype(values.dtype, np.integer):
        return cast("list[int]", values.tolist())
    try:
        items = None if isinstance(values, str | bytes | bytearray) else list(values)
    except TypeError:
        items = None
    if items is None:
        raise RequestError(f"{name} is {short_repr(values)}, but must be a list of token ids")
    for index, item in enumerate(items):
        if type(item) is not int and not isinstance(item, np.integer):
            raise RequestError(f"{name} holds {short_repr(item)} at position {index}, which is not a token id")
    return [int(item) for item in items]
