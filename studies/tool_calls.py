"""What drafts save in calls of tools whose arguments follow a schema: forward passes of the target.

    python -m studies tool_calls BUNDLE

Three tools with five fields each are called by name, at temperatures 0 and 1."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_runtime import ChatPrompt, EagleModel, ToolUse
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Parser
from eagle_tools.markdown import markdown_table

TEXT: dict[str, Any] = {"type": "string", "maxLength": 40}
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday"]
CASES: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "book_flight",
        {"origin": TEXT, "destination": TEXT, "date": {"type": "string", "format": "date"},
         "passengers": {"type": "integer", "minimum": 1, "maximum": 9}, "cabin": {"enum": ["economy", "business"]}},
        "Book a flight for 2 people from Paris to Rome on 2024-05-17, in business class.",
    ),
    (
        "create_event",
        {"title": TEXT, "place": TEXT, "day": {"enum": DAYS}, "hour": {"type": "integer", "minimum": 0, "maximum": 23},
         "remind": {"type": "boolean"}},
        "Please plan a lunch with Anna in the Blue Cafe on Tuesday at 12, and remind me.",
    ),
    (
        "order_pizza",
        {"size": {"enum": ["small", "medium", "large"]}, "topping": TEXT,
         "count": {"type": "integer", "minimum": 1, "maximum": 20}, "address": TEXT, "express": {"type": "boolean"}},
        "Order three large pizzas with mushrooms to 12 Main Street, as fast as you can.",
    ),
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {"without drafts": {"method": "vanilla"}, "with drafts": {}}


def prompt_of(model: EagleModel, name: str, fields: Mapping[str, Any], question: str) -> ChatPrompt:
    """A question to which the answer must call a function."""
    schema = {"type": "object", "properties": dict(fields), "required": list(fields)}
    function = {"name": name, "description": name.replace("_", " "), "parameters": schema}
    use = ToolUse.of([{"type": "function", "function": function}], {"type": "function", "function": {"name": name}})
    return model.chat_prompt([{"role": "user", "content": question}], use)


def passes(model: EagleModel) -> list[list[str]]:
    """Rows of the table of target passes: tool, temperature, passes without and with drafts, their ratio. Raises
    RequestError where an output differs."""
    rows = []
    for name, fields, question in CASES:
        prompt = prompt_of(model, name, fields, question)
        for temperature in (0.0, 1.0):
            shared: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 160}
            results = [model.generate(prompt, **shared, **way) for way in WAYS.values()]
            if results[0].token_ids != results[1].token_ids:
                raise RequestError(f"{name} at temperature {temperature:g}: drafts changed the output")
            counts = [result.usage.target_passes for result in results]
            rows.append([name, f"{temperature:g}", *map(str, counts), f"{counts[1] / counts[0]:.2f}"])
    return rows


def add_options(parser: Parser) -> None:
    """What is measured."""
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a pass (default: the engine's choice)")


def report(args: argparse.Namespace) -> str:
    """Returns the table."""
    with EagleModel.load(args.bundle, threads=args.threads) as model:
        return markdown_table(["tool", "temperature", *WAYS, "ratio"], passes(model))
