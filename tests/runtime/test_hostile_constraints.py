"""Schemas, patterns and grammars that are meant to take long, to take memory or to break the compiler: each is refused
or usable within the limits, in a process that stays as it was.

The time is held by the deadline itself, so what is asserted is how each one ends; the seconds are printed.
"""

from __future__ import annotations

import itertools
import json
import os
import string
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from conftest import GOLDEN
from eagle_runtime import Constraint, ConstraintError
from eagle_runtime.sampling.grammars import Grammars

MOST_MB = 200  # that the process may grow by


def chained(first: str, link: Callable[[str], dict[str, Any]], count: int, last: dict[str, Any]) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a chain."""
    names = [f"{first}{index}" for index in range(count + 1)]
    definitions = {name: link(f"#/$defs/{after}") for name, after in itertools.pairwise(names)}
    return {"$defs": {**definitions, names[-1]: last}, "$ref": f"#/$defs/{names[0]}"}


def a_then_b(count: int) -> str:
    """A pattern whose intersections with its like have many states."""
    return f"a.{{{count}}}b"


TEXT = {"type": "string"}
HOSTILE: dict[str, Any] = {
    "patterns intersected": {**TEXT, "allOf": [{"pattern": a_then_b(i)} for i in range(50)]},
    "patterns intersected in a chain": chained(
        "d", lambda ref: {"allOf": [{"$ref": ref}, {"pattern": a_then_b(len(ref))}]}, 100, TEXT
    ),
    "patterns with references": chained("d", lambda ref: {"$ref": ref, "pattern": a_then_b(len(ref))}, 100, TEXT),
    "formats intersected": {**TEXT, "allOf": [{"format": name} for name in ("email", "date", "uri", "ipv6") * 10]},
    "two long patterns": {**TEXT, "allOf": [{"pattern": "a.{400}b"}, {"pattern": "c.{400}d"}]},
    "patterns of properties": {"patternProperties": {f"^a{{{i}}}b.*c{{{i}}}$": {} for i in range(300)}},
    "patterns of properties that meet": {"patternProperties": {"a.{99}b": {}, "c.{99}d": {}}},
    "alternatives of patterns": {"anyOf": [{**TEXT, "pattern": f".*a.{{{i}}}$"} for i in range(100)]},
    "repetitions in repetitions": {**TEXT, "pattern": "^(((a{1,100}){1,100}){1,100}){1,100}$"},
    "backtracking": {**TEXT, "pattern": "(x+x+)+y(.*a.{20}){10}"},
    "letters of all scripts": {**TEXT, "pattern": "^\\p{L}{1000}\\P{Lu}{1000}$"},
    "brackets": {**TEXT, "pattern": "(" * 30_000 + "a" + ")" * 30_000},
    "an open class": {**TEXT, "pattern": "[" * 30_000},
    "question marks": {**TEXT, "pattern": "a" + "?" * 30_000},
    "a pattern of every length": {**TEXT, "pattern": "|".join("a" * i for i in range(1, 300))},
    "a huge repetition": {**TEXT, "pattern": "a{1,4000000000}"},
    "looking ahead": {**TEXT, "pattern": "(?=a)b"},
    "back references": {**TEXT, "pattern": r"(a)\1"},
    "depth as text": '{"items":' * 5000 + "{}" + "}" * 5000,
    "depth in lists": {"enum": [json.loads("[" * 500 + "]" * 500)]},
    "depth by references": chained("d", lambda ref: {"type": "array", "items": {"$ref": ref}}, 900, TEXT),
    "a chain of references": chained("d", lambda ref: {"$ref": ref}, 1000, TEXT),
    "doubling alternatives": chained("d", lambda ref: {"anyOf": [{"$ref": ref}, {"items": {"$ref": ref}}]}, 60, TEXT),
    "doubling intersections": chained("d", lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}, 60, TEXT),
    "alternatives intersected": {
        "allOf": [{"anyOf": [{"properties": {f"{key}{i}": TEXT}, "type": "object"} for key in "ab"]} for i in range(20)]
    },
    "patterns in alternatives intersected": {
        **TEXT,
        "allOf": [{"anyOf": [{"pattern": f"^a{i}"}, {"pattern": f"b{i}$"}]} for i in range(14)],
    },
    "itself": {"$ref": "#"},
    "each other": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "itself intersected": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"},
    "itself in an alternative": {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, TEXT]}}, "$ref": "#/$defs/a"},
    "itself a thousand times": {
        "$defs": {"a": {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/a"} for i in range(1000)}}},
        "$ref": "#/$defs/a",
    },
    "long text": {**TEXT, "minLength": 10**6, "maxLength": 10**6},
    "endless text": {**TEXT, "minLength": 10**30},
    "many items": {"type": "array", "items": TEXT, "minItems": 10**9, "maxItems": 10**9},
    "many items in many items": {
        "type": "array",
        "minItems": 1000,
        "items": {"type": "array", "minItems": 1000, "items": {"type": "array", "minItems": 1000, "items": TEXT}},
    },
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2000)}},
    "many ranges": {
        "properties": {f"p{i}": {"type": "integer", "minimum": i, "maximum": 7**9 + i} for i in range(700)}
    },
    "many required": {"type": "object", "required": [f"r{i}" for i in range(5000)]},
    "many prefixes": {"type": "array", "prefixItems": [{**TEXT, "maxLength": i} for i in range(1500)]},
    "many constants": {"enum": ["x" * 50 + str(i) for i in range(1000)]},
    "one long constant": {"enum": ["x" * 60_000]},
    "many exclusive alternatives": {
        "oneOf": [{"type": "object", "properties": {f"k{i}": TEXT}, "required": [f"k{i}"]} for i in range(700)]
    },
    "a wide range of floats": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "all of 64 bits": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "the least of 64 bits": {"const": -(2**63)},
    "the least of 64 bits in values": {"enum": [{"a": [-(2**63)]}]},
    "the least of 64 bits elsewhere": {"$ref": "#/components/a", "components": {"a": {"const": -(2**63)}}},
    "a number of 5000 digits": '{"type": "integer", "minimum": ' + "9" * 5000 + "}",
    "multiples of a prime": {"type": "integer", "multipleOf": 982451653},
    "multiples of three primes": {
        "type": "integer",
        "allOf": [{"multipleOf": prime} for prime in (7919, 7907, 104729)],
    },
    "tiny multiples": {"type": "number", "multipleOf": 1e-200},
    "a remote schema": {"$ref": "https://example.com/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "nothing": {"allOf": [TEXT, {"type": "integer"}]},
    "white space of its own": {"x-guidance": {"whitespace_pattern": "(((a{1,999}){1,999}){1,999})"}, "type": "object"},
    "too long": {"enum": ["x" * 70_000]},
    "half a character": {"enum": ["\ud800"]},
}
REFUSED = {  # the others have no simple answer: it is enough that there is one
    "patterns intersected",
    "patterns intersected in a chain",
    "patterns of properties",
    "brackets",
    "depth as text",
    "itself",
    "each other",
    "endless text",
    "the least of 64 bits",
    "the least of 64 bits in values",
    "the least of 64 bits elsewhere",
    "a number of 5000 digits",
    "multiples of a prime",
    "a remote schema",
    "a file",
    "nothing",
    "too long",
    "half a character",
}


def rules(letters: str) -> Iterator[str]:
    """A grammar of 64 KiB in which every rule is the next one."""
    names = ["".join(name) for count in (1, 2, 3) for name in itertools.product(letters, repeat=count)][:8000]
    yield f"start: {names[0]}"
    yield from (f"{name}:{after}" for name, after in itertools.pairwise(names))
    yield f'{names[-1]}:"a"'


GRAMMARS = {  # and whether there is an answer to them
    "rules in a chain": ("\n".join(rules(string.ascii_lowercase)), True),
    "tokens in a chain": ("\n".join(rules(string.ascii_uppercase)), True),
    "patterns intersected": ("start: A\nA: " + " & ".join(f"/.*a.{{{i}}}b/" for i in range(50)), False),
    "a schema within": ("start: %json " + json.dumps(HOSTILE["patterns intersected"]), False),
    "brackets": ("start: " + "(" * 20_000 + '"a"' + ")" * 20_000, False),
    "complements": ("start: A\nA: " + "~" * 20_000 + '"a"', False),
    "itself": ("start: start", False),
    "doubling": ("\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)), 'r60: "a"']), True),
    "doubling tokens": ("\n".join(["start: R0", *(f"R{i}: R{i + 1} R{i + 1}" for i in range(60)), 'R60: "a"']), False),
}

REPORT = """
import json, sys, time
from pathlib import Path
from eagle_runtime import Constraint, EagleError
from eagle_runtime.sampling.grammars import Grammars

def rss():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

tokenizer = Path(sys.argv[1]).read_text(encoding="utf-8")
grammars = Grammars(lambda: tokenizer, 256, [1])
grammars.matcher(Constraint.json_object()).mask()
before = rss()
kind, sources = json.load(sys.stdin)
for name, source in sources.items():
    started = time.perf_counter()
    try:
        grammars.matcher(getattr(Constraint, kind)(source)).mask()
        said = None
    except EagleError as error:
        said = str(error)
    print(json.dumps([name, time.perf_counter() - started, rss() - before, said]), flush=True)
"""


def outcomes(kind: str, sources: dict[str, str]) -> dict[str, str | None]:
    """What was said of each source, None where it is usable; all of them in one process, which must end well."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(GOLDEN / "byte_tokenizer.json")],
        input=json.dumps([kind, sources]),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    slowest, largest = max(row[1] for row in rows), max(row[2] for row in rows)
    print(f"{len(rows)} cases, the slowest {slowest:.2f} s, memory at most +{largest:.0f} MB")
    assert largest < MOST_MB, rows
    return {name: said for name, _, _, said in rows}


def text_of(schema: Any) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema)


def check(kind: str, sources: dict[str, str], refused: set[str]) -> None:
    said = outcomes(kind, sources)
    assert said.keys() == sources.keys()
    assert {name for name in refused if said[name] is None} == set()
    assert [text for text in said.values() if text is not None and (len(text) > 400 or "\n" in text)] == []


def test_hostile_schemas() -> None:
    assert len(HOSTILE) >= 50
    check("json_schema", {name: text_of(schema) for name, schema in HOSTILE.items()}, REFUSED)


def test_hostile_grammars() -> None:
    """Chains of rules overflow an ordinary stack; a crash would end the process."""
    refused = {name for name, (_, usable) in GRAMMARS.items() if not usable}
    check("lark", {name: source for name, (source, _) in GRAMMARS.items()}, refused)


@pytest.mark.parametrize("numbers", [[2**24], [7919, 7907]])
def test_multiples_of_large_numbers_keep_nobody_waiting(numbers: list[int]) -> None:
    """They take minutes and gigabytes, so they are tried in a process that is stopped."""
    tokenizer = (GOLDEN / "byte_tokenizer.json").read_text(encoding="utf-8")
    grammars = Grammars(lambda: tokenizer, 256, [1])
    with pytest.raises(ConstraintError, match=r"takes (too long|more memory)"):
        grammars.matcher(Constraint.json_schema({"type": "integer", "allOf": [{"multipleOf": n} for n in numbers]}))
    assert grammars.matcher(Constraint.json_schema({"type": "integer", "multipleOf": 1000})).mask().any()


def test_where_no_process_can_be_started_a_thread_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a frozen application. The thread goes on until it is done, and meanwhile no other grammar is compiled; one
    that was compiled before is there."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    tokenizer = (GOLDEN / "byte_tokenizer.json").read_text(encoding="utf-8")
    grammars = Grammars(lambda: tokenizer, 256, [1])
    known, new = Constraint.choice(["a"]), Constraint.choice(["b"])
    grammars.matcher(known)
    several = " & ".join(f"/.*a.{{{index}}}b/" for index in range(12))  # half a second
    with monkeypatch.context() as patch:
        patch.setattr("eagle_runtime.sampling.grammars.SECONDS", 0.01)
        with pytest.raises(ConstraintError, match="takes too long"):
            grammars.matcher(Constraint.lark(f"start: A\nA: {several}"))
    with pytest.raises(ConstraintError, match="an earlier constraint"):
        grammars.matcher(new)
    assert grammars.matcher(known).mask().any()
    assert grammars._overrun is not None
    grammars._overrun.join()
    assert grammars.matcher(new).mask().any()
