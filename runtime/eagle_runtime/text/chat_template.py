"""Chat templates: Jinja as Hugging Face's transformers runs it, within limits of time and memory.

A template comes with a model, so it is not trusted. Jinja's sandbox denies it access to the machine but does not stop
an endless loop. So a meter counts every loop iteration, call, filter and operator, with the text they make. Operations
that could take long in one step (powers, padding to a width, joining one text many times) are checked before they run.
Filters that no chat template needs are removed.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from eagle_runtime.text.meter import BITS, ITEMS, TEXT_BYTES, Meter, OverrunError, attributes, text_bytes

SOURCE_CHARS = 1 << 17  # of a template; the longest in use have a fifth of it
NUMBER = 1 << 16  # the largest width, precision or count of repetitions
LEFT_OUT = ("lipsum", "pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr")
NO_METHODS = ("encode", "expandtabs", "maketrans", "striptags", "to_bytes", "translate", "unescape")
TAKE_APART = frozenset(  # filters that look at each character of a text
    ("batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select", "selectattr", "slice")
    + ("sort", "sum", "title", "unique", "wordcount")
)
WIDENING = {"e": 6, "escape": 6, "forceescape": 6, "urlencode": 12}  # characters that one may become
LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
FORMAT_CHARS = 256  # of strftime_now
WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{|!a")  # format specifications whose result may be longer than the values


class ChatTemplate:
    """A compiled template. Threads render one after the other."""

    def __init__(self, source: str) -> None:
        """Raises OverrunError, and Jinja's errors for a template that it cannot read."""
        if len(source) > SOURCE_CHARS:
            raise OverrunError(f"its text is longer than {SOURCE_CHARS} characters")
        self._environment = _Environment()
        self._template = self._environment.from_string(source)
        self._environment.running = True
        self._lock = threading.Lock()

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the prompt that the template makes. Raises OverrunError and all errors of the template itself."""
        with self._lock:
            self._environment.meter = Meter()  # limits hold for each prompt
            pieces = []
            size = 0
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += text_bytes(piece)
                if size > TEXT_BYTES:
                    raise OverrunError(f"the prompt is longer than {TEXT_BYTES} bytes")
            self._environment.meter = Meter()  # what the last one counted is let go
            return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter for every operation."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        self.meter, self.running = Meter(), False
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=self._written,
        )
        self.concat = self._concat  # type: ignore[method-assign]
        for name in LEFT_OUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self.filters = {name: self._metered(name, function) for name, function in self.filters.items()}
        self.filters |= {"_each": self._each, "_made": lambda value: self.meter.made(value), "_joined": self._joined}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metering().visit(source), *args, **kwargs)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        name = getattr(called, "__name__", "")
        owner = getattr(called, "__self__", None)
        if owner is None:
            owner = getattr(getattr(called, "__wrapped__", None), "__self__", None)  # str.format is wrapped
        if isinstance(owner, str | bytes | int | float) and name in NO_METHODS:
            raise OverrunError(f"it calls {name}, which is not offered")
        if isinstance(owner, str | bytes):
            self._check(name, owner, args, kwargs)
        self.meter.step()
        return self.meter.made(super().call(context, called, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = self.meter
        meter.step()
        if isinstance(left, int) and isinstance(right, int):
            bits = {"**": left.bit_length() * max(0, right), "*": left.bit_length() + right.bit_length()}
            if max(left.bit_length(), right.bit_length(), bits.get(operator, 0)) > BITS:
                raise OverrunError(f"it makes a number of more than {BITS} bits")
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(value, int | float):
                    if isinstance(value, list | tuple) and len(value) * times > ITEMS:
                        raise OverrunError(f"it makes a list of more than {ITEMS} items")
                    meter.work(meter.size(value) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            self._check("format", left, (right,), {})
        return meter.made(super().call_binop(context, operator, left, right))

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a filter that the meter counts, and that is refused if its result would be too large."""
        passed = getattr(function, "jinja_pass_arg", None)
        skipped = 0 if passed is None else 1  # the context or environment comes first

        def metered(*args: Any, **kwargs: Any) -> Any:
            if not self.running:
                raise nodes.Impossible  # nothing is worked out while the template is compiled
            passing, value, rest = args[:skipped], args[skipped], args[skipped + 1 :]
            if name == "join" and isinstance(value, Iterator):
                value = self.meter.made(list(value))
            self.meter.step()
            self._check(name, value, rest, kwargs)
            result = function(*passing, value, *rest, **kwargs)
            return self._steps(result) if isinstance(result, Iterator) else self.meter.made(result)

        if passed is not None:
            metered.jinja_pass_arg = passed  # type: ignore[attr-defined]
        return metered

    def _check(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises OverrunError for a string method or a filter whose result would be too large."""
        given = [*args, *kwargs.values()]
        if any(isinstance(item, int) and abs(item) > NUMBER for item in given):
            raise OverrunError(f"it gives {name} a number beyond {NUMBER}")
        size = self.meter.size
        if isinstance(value, str) and _parts(name, value, args) > ITEMS:
            raise OverrunError(f"it takes a text apart into more than {ITEMS} items")
        if isinstance(value, str) and name in WIDENING:
            self.meter.work(WIDENING[name] * len(value))
        if name in ("join", "sum") and not isinstance(value, str | bytes):
            if any(isinstance(item, list | tuple) for item in given):
                raise OverrunError(f"it gives {name} a list to begin with")
            self.meter.work(size(given) * _count(value))
        elif name == "join":  # the string method: `value` goes between the items of a list
            self.meter.work(len(value) * sum(_count(item) for item in given))
        elif name in ("format", "format_map"):
            if WIDTH.search(str(value)):
                raise OverrunError("it formats with widths")
            marks = str(value).count("%") + str(value).count("{")
            self.meter.work(marks * size([attributes(item) if isinstance(item, Namespace) else item for item in given]))
        elif name in ("indent", "replace", "tojson", "center", "ljust", "rjust", "zfill", "batch", "slice"):
            longest = max((item if isinstance(item, int) else size(item) for item in given), default=0)
            times = 1 if name not in ("indent", "replace", "tojson") else size(value) + 1
            if name == "indent":
                times = str(value).count("\n") + 1
            elif name == "replace" and given and isinstance(given[0], str):
                times = str(value).count(given[0])
            self.meter.work(times * longest)

    def _each(self, values: Iterable[Any]) -> Iterable[Any]:
        """Returns the values of a loop, counted. Those with a length keep it, since loop.length needs it."""
        return _Counted(values, self._steps) if hasattr(values, "__len__") else self._steps(values)

    def _steps(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self.meter.step()
            yield value

    def _joined(self, values: Sequence[Any]) -> str:
        """Returns the result of the operator ~."""
        return self._concat([self._written(value) for value in values])

    def _written(self, value: Any) -> str:
        """Returns a value as text for the prompt."""
        text = value if isinstance(value, str) else str(self.meter.made(value))
        self.meter.work(text_bytes(text))
        return text

    def _concat(self, parts: Iterable[str]) -> str:
        pieces = list(parts)
        self.meter.work(sum(map(text_bytes, pieces)))
        return "".join(pieces)


class _Metering(NodeTransformer):
    """Adds the meter's filters to a template: around the values of loops, lists, dicts and the operator ~."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "_each")
        elif isinstance(node, nodes.Concat):
            return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")
        elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
            return _filtered(node, "_made")
        elif isinstance(node, nodes.Assign) and isinstance(node.target, nodes.NSRef):
            # In a list, since no list may hold a namespace.
            listed = _filtered(nodes.List([node.node], lineno=node.lineno), "_made")
            node.node = nodes.Getitem(listed, nodes.Const(0), "load", lineno=node.lineno)
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None, lineno=node.lineno)


class _Counted:
    """The values of a loop. steps: yields them and counts each."""

    def __init__(self, values: Any, steps: Callable[[Iterable[Any]], Iterator[Any]]) -> None:
        self._values, self._steps = values, steps

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return self._steps(self._values)


class _Namespace(Namespace):
    """A namespace that refuses names with a leading underscore, which may have a meaning for Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_attribute(name)
        Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


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


class _Dict:
    """The dict of templates; the class itself has ways to others."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _strftime_now(form: str) -> str:
    if len(form) > FORMAT_CHARS:
        raise OverrunError(f"it gives strftime_now a format of more than {FORMAT_CHARS} characters")
    return datetime.datetime.now().strftime(form)


def _parts(name: str, text: str, args: Sequence[Any]) -> int:
    """Returns the number of items that a filter or a method makes of a text, or looks at, at most."""
    if name in ("split", "rsplit"):
        separator = args[0] if args and isinstance(args[0], str) and args[0] else None
        return len(text.split(None, ITEMS + 1)) if separator is None else text.count(separator)
    if name == "splitlines":
        return sum(map(text.count, LINE_ENDS))
    return len(text) if name in TAKE_APART else 0


def _count(values: Any) -> int:
    return len(values) if hasattr(values, "__len__") else ITEMS


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"it calls an attribute of a namespace {name[:40]!r}; such names are Python's own")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
