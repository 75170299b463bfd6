"""JSON documents, damaged: values of other types and sizes, keys dropped and added, text cut short."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

PATHS: tuple[str, ...] = (
    "../tokenizer.json",
    "/etc/passwd",
    "target/../../x",
    "target\\model.onnx",
    "C:x",
    "target//model.onnx",
    ".",
)
PATHS += ("target/./model.onnx", "", "\0", "con", "target", "draft/model.onnx", "x" * 300, "/dev/zero", "~", "é\ud800")
NUMBERS: tuple[float, ...] = (0, 1, -1, 2, 3, 17, 255, 257, 1 << 20, 1 << 31, 1 << 32, 1 << 63, 10**40, -(10**40), 0.5)
NUMBERS += (1.0, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf)


def odd_value(rng: random.Random) -> Any:
    """Anything that JSON can say."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(PATHS)
    if kind == 2:
        return rng.choice([None, True, False, [], {}, [[]], {"": None}, "T", "float16", "1"])
    if kind == 3:
        return rng.choice("xé\0") * rng.choice([1000, 1_000_000])
    if kind == 4:
        return [rng.choice(NUMBERS) for _ in range(rng.choice([1, 4, 1000]))]
    value: Any = rng.choice(NUMBERS)
    for _ in range(rng.choice([3, 100, 900])):
        value = [value] if rng.random() < 0.5 else {rng.choice("ab"): value}
    return value


def place(rng: random.Random, data: Any) -> tuple[Any, Any]:
    """A container of a document and a key or index in it, each level's parts being equally likely."""
    while True:
        key = rng.choice(list(data)) if isinstance(data, dict) else rng.randrange(len(data))
        inner = data[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.15:
            return data, key
        data = inner


def replace(rng: random.Random, data: Any) -> None:
    container, key = place(rng, data)
    container[key] = odd_value(rng)


def nudge(rng: random.Random, data: Any) -> None:
    """A value of the same kind."""
    for _ in range(20):
        container, key = place(rng, data)
        value = container[key]
        if isinstance(value, bool):
            container[key] = not value
        elif isinstance(value, int | float):
            container[key] = rng.choice([value + 1, value - 1, -value, value * 2, value * 1000, float(value)])
        elif isinstance(value, str):
            edits = [value[:-1], value + "x", value.upper(), value[::-1], value * 2, rng.choice(PATHS)]
            container[key] = rng.choice(edits)
        elif isinstance(value, list) and value:
            container[key] = rng.choice([value[::-1], value[1:], value + value[:1], [value]])
        else:
            continue
        return


def drop(rng: random.Random, data: Any) -> None:
    container, key = place(rng, data)
    del container[key]


def add(rng: random.Random, data: Any) -> None:
    container, _ = place(rng, data)
    if isinstance(container, dict):
        container[rng.choice(["extra", "", "é\0", "x" * 100_000, *PATHS])] = odd_value(rng)
    else:
        container.insert(rng.randrange(len(container) + 1), odd_value(rng))


def rename(rng: random.Random, data: Any) -> None:
    container, key = place(rng, data)
    if isinstance(container, dict):
        container[rng.choice([str(key) + "x", str(key).upper(), *PATHS])] = container.pop(key)


def exchange(rng: random.Random, data: Any) -> None:
    """Two values of the document change places."""
    (one, first), (two, second) = place(rng, data), place(rng, data)
    one[first], two[second] = copy.deepcopy(two[second]), copy.deepcopy(one[first])


CHANGES: tuple[Callable[[random.Random, Any], None], ...] = (replace, nudge, drop, add, rename, exchange)
OFTEN = (2, 2, 1, 1, 1, 1)


def damaged(rng: random.Random, data: Any) -> bytes:
    """The document's text after one to three changes, or cut, flipped or buried as text."""
    if rng.random() < 0.15:
        return damaged_text(rng, json.dumps(data).encode())
    data = copy.deepcopy(data)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choices(CHANGES, OFTEN)[0](rng, data)
        if not data:
            break
    return json.dumps(data).encode()


def damaged_text(rng: random.Random, text: bytes) -> bytes:
    """Bytes that need not be JSON any more."""
    kind = rng.randrange(9)
    at = rng.randrange(len(text))
    if kind == 0:
        return text[:at]
    if kind == 1:
        return flipped(rng, text, rng.choice([1, 1, 3, 100]))
    if kind == 2:
        return text[:at] + rng.randbytes(rng.choice([1, 8, 1000])) + text[at:]
    if kind == 3:
        return rng.choice([b"", b"\0", b"null", b"[]", b"{}", b"0", b'""', b"NaN", b"\xef\xbb\xbf" + text, text * 2])
    if kind == 4:
        return rng.choice([b"[", b'{"a":']) * rng.choice([10, 10_000, 1_000_000])
    if kind == 5:
        return text.decode().encode(rng.choice(["utf-16", "utf-32", "utf-16-be"]))
    if kind == 6:
        return rng.randbytes(rng.choice([1, 100, 10_000]))
    if kind == 7:
        return text.replace(b": 1", b": " + b"9" * rng.choice([400, 5000, 100_000]), 1)
    return text.replace(b"{", b"{" + b'"a": 1,' * 1000, 1)


def flipped(rng: random.Random, content: bytes, bits: int) -> bytes:
    """With single bits changed."""
    damaged = bytearray(content)
    for _ in range(bits):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)
