"""Requests of every kind that a server gets, drawn at random: plain texts, stop strings, grammars, tools."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_runtime import Constraint, EagleModel
from eagle_runtime.text.tools import ToolUse
from eagle_tools.questions import prompt_ids

KINDS = ("text", "stop", "schema", "call", "may_call")
STOPS = ("e", "the", "\n", ". ", "), ")
QUESTIONS = (
    "Book a flight from Rome to Oslo for two.",
    "What is the weather in Paris?",
    "Describe a person named Ann.",
    "Name three colours.",
    "Write a line about the sea.",
)
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", "blue", "dark red"]}, "minItems": 1, "maxItems": 6},
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-C][0-9]{2,6}$"},
            "parts": {"type": "array", "items": {"type": "number"}, "maxItems": 4},
            "of": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"const": "unknown"}]},
        },
        "required": ["code", "of"],
        "additionalProperties": False,
    },
    {"type": "object"},
)
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": says, "parameters": parameters}}
    for name, says, parameters in (
        (
            "book_flight",
            "Book a flight.",
            {
                "type": "object",
                "properties": {
                    "from": {"type": "string", "maxLength": 12},
                    "to": {"type": "string", "maxLength": 12},
                    "class": {"enum": ["economy", "business", "first"]},
                    "seats": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["from", "to", "class", "seats"],
            },
        ),
        ("weather", "Tell the weather.", {"type": "object", "properties": {"place": {"type": "string"}}}),
    )
)


def kinds_of(model: EagleModel) -> tuple[str, ...]:
    """Returns the kinds of requests that a bundle can answer: without a tokenizer texts alone, without a chat template
    no tools."""
    text = model.text
    return KINDS if text.chat else KINDS[:3] if text.available else KINDS[:1]


def random_kind(model: EagleModel, random: np.random.Generator, most: int) -> tuple[str, list[int], dict[str, Any]]:
    """Returns the kind of a request, the ids of its prompt, and settings of `EagleModel.stream`; of the kind "text"
    neither ids nor settings. most: of ids."""
    kinds = kinds_of(model)
    kind = kinds[int(random.integers(len(kinds)))]
    if kind == "text":
        return kind, [], {}
    question = QUESTIONS[int(random.integers(len(QUESTIONS)))]
    if kind == "stop":
        stops = random.permutation(STOPS)[: int(random.integers(1, 4))].tolist()
        return kind, prompt_ids(model, question)[-most:], {"stop": stops}
    if kind == "schema":
        schema = SCHEMAS[int(random.integers(len(SCHEMAS)))]
        return kind, prompt_ids(model, question)[-most:], {"constraint": Constraint.json_schema(schema)}
    tools = [TOOLS[number] for number in random.permutation(len(TOOLS))[: int(random.integers(1, len(TOOLS) + 1))]]
    use = ToolUse.of(tools, "required" if kind == "call" else "auto", bool(random.integers(2)))
    chat = model.chat_prompt([{"role": "user", "content": question}], use)
    settings: dict[str, Any] = {"form": chat.form}
    if random.random() < 0.25:  # an answer that is a call or follows a schema
        settings["constraint"] = Constraint.json_schema(SCHEMAS[0])
    return kind, model.text.encode_rendered(chat.text)[-most:], settings
