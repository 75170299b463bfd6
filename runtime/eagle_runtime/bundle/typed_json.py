"""Parsed JSON as instances of annotated dataclasses; a value that does not fit raises an error of one sentence."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import BundleError


def from_json(kind: Any, value: Any, where: str) -> Any:
    """Returns `value` (parsed JSON) as an instance of the annotation `kind`, such as a dataclass; raises BundleError
    naming `where`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise BundleError(f"{where} is {short_repr(value)}, which is not a JSON object; export the bundle again")
        hints = _hints(typing.cast(Any, kind))
        if unknown := sorted(set(value) - set(hints)):
            key = short_repr(unknown[0])
            raise BundleError(f"{where}: unknown key {key}; export the bundle again with this version")
        if missing := [name for name in hints if name not in value]:
            raise BundleError(f"{where}: key {missing[0]!r} is missing; export the bundle again with this version")
        fields = {name: from_json(hint, value[name], f"{where}: {name}") for name, hint in hints.items()}
        return typing.cast(Any, kind)(**fields)
    if origin is dict:
        if isinstance(value, dict):
            return {key: from_json(args[1], item, f"{where}: {short_repr(key)}") for key, item in value.items()}
    elif origin is tuple:
        if isinstance(value, list):
            return tuple(from_json(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    elif origin is Literal:
        if value in args:
            return value
    elif origin in (types.UnionType, typing.Union):
        if type(value) in args:
            return value
        if models := [arg for arg in args if dataclasses.is_dataclass(arg)]:
            return from_json(models[0], value, where)
    elif kind is float:
        if type(value) in (int, float) and abs(value) <= sys.float_info.max:  # JSON may write 1.0 as 1; NaN is neither
            return float(value)
    elif type(value) is kind:
        return value
    one, of_type = "one of " + ", ".join(map(str, args)), f"of type {getattr(kind, '__name__', kind)}"
    wanted = one if origin is Literal else of_type
    raise BundleError(f"{where} is {short_repr(value)}, but must be {wanted}; export the bundle again")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The annotations of a dataclass, of which a manifest has hundreds of instances."""
    return typing.get_type_hints(kind)
