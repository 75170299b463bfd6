"""Chat templates: Jinja as Hugging Face's transformers runs it, with a cap on time and on sizes.

Jinja's sandbox denies a template the machine, but stops no endless loop. So every loop iteration, call, filter and
operator looks at the clock, and no text, list or number that it makes may be longer than any prompt needs. Each place
is needed: with any one left out, a template of tests/hostile_templates.py runs on for 8 s and more (loops, calls,
filters, `**`), takes 1.0 to 1.6 GB in place of 0.3 (calls, `+`, `~`, blocks, widths), or is rendered (lengths).
"""

from __future__ import annotations

import datetime
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SOURCE_CHARS = 1 << 17  # of a template; the longest in use have a fifth of it
SECONDS = 0.9  # of processor time for one prompt; templates in use take milliseconds
# Chosen, far above what prompts need: a context of 128 thousand tokens has half a million characters.
LENGTH = 1 << 23  # characters of a prompt or of any text in it, items of a list
BITS = 1 << 12  # of an integer
NUMBER = 1 << 16  # the largest width or count that a call or a filter may be given
# Filters to which a number is a value as any other; what `map` and `select` call is looked at by itself.
OF_VALUES = frozenset(("default", "d", "map", "select", "selectattr", "reject", "rejectattr", "sum"))


class OverrunError(TemplateError):
    """A template exceeded a limit."""


class ChatTemplate:
    """A compiled template. Threads render one after the other."""

    def __init__(self, source: str) -> None:
        """Raises OverrunError, and Jinja's errors for a template that it cannot read."""
        if len(source) > SOURCE_CHARS:
            raise OverrunError(f"its text is longer than {SOURCE_CHARS} characters")
        self._environment = _Environment()
        self._template = self._environment.from_string(source)
        self._lock = threading.Lock()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the prompt that the template makes. Raises OverrunError and all errors of the template itself."""
        with self._lock:
            self._environment.begin()
            pieces: list[str] = []
            length = 0
            for piece in self._template.generate(variables):
                pieces.append(piece)
                length += len(piece)
                _check_length(length)
            return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the caps."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        self.begin()
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
        self.concat = self._concat  # type: ignore[method-assign]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self.filters["tojson"] = _to_json
        self.filters = {name: self._capped(function, name not in OF_VALUES) for name, function in self.filters.items()}
        self.filters |= {"_each": self._each, "_made": self._made}

    def begin(self) -> None:
        """Give the next prompt its time."""
        self._end = time.thread_time() + SECONDS  # of this thread

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Capping().visit(source), *args, **kwargs)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        if called is not self.globals["range"] and not _takes_values(called):  # the sandbox has a limit for range
            _check_numbers((*args, *kwargs.values()))
        return self._made(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(times, int) and isinstance(value, str | list | tuple):
                _check_length(len(value) * times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * right)
        return self._made(super().call_binop(context, operator, left, right))

    def _capped(self, function: Callable[..., Any], counts: bool) -> Callable[..., Any]:
        """Returns a filter whose result and time are checked, and its numbers if `counts`."""
        first = 2 if hasattr(function, "jinja_pass_arg") else 1  # of its arguments, after what is filtered

        def capped(*args: Any, **kwargs: Any) -> Any:
            if counts:
                _check_numbers((*args[first:], *kwargs.values()))
            result = function(*args, **kwargs)
            return self._each(result) if isinstance(result, Iterator) else self._made(result)

        if hasattr(function, "jinja_pass_arg"):
            capped.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return capped

    def _each(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            yield self._made(value)

    def _made(self, value: Any) -> Any:
        """Returns a value, after a look at the clock and at its size."""
        if time.thread_time() > self._end:
            raise OverrunError(f"it does not end: {SECONDS:g} s were not enough")
        if isinstance(value, str | bytes | list | tuple | dict):
            _check_length(len(value))
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        return value

    def _concat(self, parts: Iterable[str]) -> str:
        pieces = list(parts)
        _check_length(sum(map(len, pieces)))
        return "".join(pieces)


class _Capping(NodeTransformer):
    """Puts the caps around the values of loops and the operator ~."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "_each")
        return _filtered(node, "_made") if isinstance(node, nodes.Concat) else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


def _check_length(length: int) -> None:
    if length > LENGTH:
        raise OverrunError(f"it makes a text of more than {LENGTH} characters")


def _check_bits(bits: int) -> None:
    if bits > BITS:
        raise OverrunError(f"it makes a number of more than {BITS} bits")


def _takes_values(called: Any) -> bool:
    """Whether a number that this is called with is a value as any other, and no width or count."""
    return isinstance(called, Macro | type) or isinstance(getattr(called, "__self__", None), dict | list | tuple)


def _check_numbers(arguments: Iterable[Any]) -> None:
    if any(isinstance(item, int) and abs(item) > NUMBER for item in arguments):
        raise OverrunError(f"it asks for a width or a count beyond {NUMBER}")


class _Generation(Extension):
    """{% generation %} marks answers for training; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (as in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
