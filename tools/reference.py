"""The pages of the site that are made from the code: all commands with their options, and the public names.

python tools/reference.py FOLDER
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = re.compile(r'^(eagle-[a-z]+) = "([\w.]+):main"$', re.M)  # of pyproject.toml


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, by its name."""
    found = {}
    for name, module in SCRIPT.findall((ROOT / "pyproject.toml").read_text(encoding="utf-8")):
        loaded = importlib.import_module(module)
        make = getattr(loaded, "_parser", None) or importlib.import_module(f"{module}.cli")._parser
        found[name] = make()
    return found


def commands_page() -> str:
    """Returns the page of all commands as Markdown."""
    parts = ["# Commands\n\nMade from the code, as `--help` of each command shows it."]
    for name, parser in parsers().items():
        parts += _described(name, parser)
        parts += [part for sub, child in _subcommands(parser) for part in _described(f"{name} {sub}", child, 3)]
    return "\n\n".join(parts) + "\n"


def _described(name: str, parser: argparse.ArgumentParser, level: int = 2) -> Iterator[str]:
    yield f"{'#' * level} {name}"
    if parser.description:
        yield parser.description.strip()
    actions = [
        a for a in parser._actions if a.help != argparse.SUPPRESS and not isinstance(a, argparse._SubParsersAction)
    ]
    rows = [f"| {_spelled(action)} | {_cell(_help(parser, action))} |" for action in actions]
    yield "\n".join(["| option | |", "|---|---|", *rows])


def _subcommands(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    kinds = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [(name, child) for action in kinds for name, child in action.choices.items()]


def _spelled(action: argparse.Action) -> str:
    """An option with its value, or a positional argument, as code."""
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if not action.option_strings:
        return f"`{value}`"
    shown = ", ".join(action.option_strings)
    if action.nargs == 0:
        return f"`{shown}`"
    if action.choices is not None:
        return f"`{shown}` " + _cell(", ".join(f"`{choice}`" for choice in action.choices))
    return f"`{shown} {value}`"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return parser._get_formatter()._expand_help(action) if action.help else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def api_page() -> str:
    """Returns the page of the names that `eagle_runtime` exports as Markdown."""
    runtime = importlib.import_module("eagle_runtime")
    parts = ["# API\n\nThe names of `eagle_runtime`, made from the code; what is not here may change."]
    for name in runtime.__all__:
        value = getattr(runtime, name)
        parts.append(f"## {name}")
        if not inspect.isclass(value):  # a union of classes, as TreeShape
            parts.append(f"`{name} = {value}`".replace("eagle_runtime.", ""))
            continue
        parts += list(_documented(name, value))
    return "\n\n".join(parts) + "\n"


def _documented(name: str, kind: type) -> Iterator[str]:
    base = kind.__bases__[0]
    if typing.is_typeddict(kind):
        yield f"```python\nclass {name}(TypedDict)\n```"
    else:
        made = f"({base.__name__})" if issubclass(kind, Exception) else _signature(kind)
        yield f"```python\nclass {name}{made}\n```"
    yield _text(kind)
    if typing.is_typeddict(kind):
        yield "\n".join(
            [
                "| key | |",
                "|---|---|",
                *(f"| `{key}` | `{_cell(_type(of))}` |" for key, of in kind.__annotations__.items()),
            ]
        )
        return
    for member, value in vars(kind).items():
        function = getattr(value, "__func__", value)
        if member.startswith("_") or not (inspect.isfunction(function) or isinstance(value, property)):
            continue
        if isinstance(value, property):
            yield f"### {name}.{member}\n\n{_text(value)}"
            continue
        prefix = "async def" if inspect.iscoroutinefunction(function) else "def"
        yield f"### {name}.{member}\n\n```python\n{prefix} {member}{_signature(function)}\n```\n\n{_text(function)}"


def _signature(value: object) -> str:
    try:
        shown = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    shown = re.sub(r"'([^']*)'", r"\1", shown).replace("(self, ", "(").replace("(self)", "()").replace("(cls, ", "(")
    return shown if len(shown) < 90 else "(\n    " + ",\n    ".join(_split(shown)) + "\n)" + _result(shown)


def _type(annotation: object) -> str:
    """A type as it is written, whose names have no modules."""
    written = getattr(annotation, "__forward_arg__", None) or str(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", written)


def _split(signature: str) -> list[str]:
    """The parameters of a signature, split at commas outside of brackets."""
    parts, depth, begin = [], 0, 1
    for index, sign in enumerate(signature):
        depth += (sign in "([") - (sign in ")]")
        if (sign == "," and depth == 1) or (sign == ")" and depth == 0):
            parts.append(signature[begin:index].strip())
            begin = index + 1
            if depth == 0:
                break
    return parts


def _result(signature: str) -> str:
    _, arrow, kind = signature.rpartition(" -> ")
    return f" -> {kind}" if arrow else ""


def _text(value: object) -> str:
    """A docstring as Markdown, which it is but for its line ends."""
    return inspect.getdoc(value) or ""


def main(folder: Path) -> None:
    """Write both pages into a folder."""
    (folder / "commands.md").write_text(commands_page(), encoding="utf-8")
    (folder / "api.md").write_text(api_page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
