"""Questions of the target's own: after the header of a user's turn an instruction-tuned model writes what users ask
(Magpie, arXiv 2406.08464). System prompts steer what they ask about."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

from eagle_train.dialogues import user_header

DEFAULT = ""  # no system prompt but what the template puts there itself
SYSTEMS = {  # kind -> system prompts
    "chat": [DEFAULT] * 6,
    "code": [
        "You are an expert Python programmer. The user asks you to write, explain or correct code.",
        "You are a software engineer who answers questions about programming in any language.",
        "You help users with shell commands, databases, web pages and algorithms.",
    ],
    "maths": [
        "You are a patient maths teacher. The user gives you a word problem with numbers to solve step by step.",
        "You solve problems of arithmetic, algebra, geometry and probability and show each step.",
    ],
    "writing": [
        "You are a writer. The user asks for stories, poems, letters, speeches and e-mails.",
        "You are an editor who rewrites, corrects and shortens the texts that users paste.",
        "You write advertisements, blog posts and social media posts for small businesses.",
    ],
    "facts": [
        "You are an encyclopaedia. The user asks short factual questions about people, places, dates and events.",
        "You are a science teacher who explains physics, chemistry and biology to pupils.",
        "You are a historian who answers questions about any country and century.",
        "You answer trivia questions about films, songs, books and sports.",
    ],
    "advice": [
        "You give practical advice on health, work, money, travel and relationships.",
        "You are a cook who suggests recipes and explains techniques.",
    ],
    "text": [
        "You summarise the texts that users paste, and answer questions about them.",
        "You are a translator between English and French, Spanish and German.",
        "You classify, extract and reformat information from texts into lists, tables and JSON.",
    ],
    "reasoning": [
        "You play roles that the user chooses, and answer as that person would.",
        "You solve riddles, puzzles and questions of logic, and compare alternatives.",
    ],
}
SAMPLING = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 160}


def headers(tokenizer: Any, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields rows for `eagle-train generate`: the ids up to where a user's first turn begins, with their kind."""
    choices = random.Random(seed)
    kinds = [(kind, system) for kind, systems in SYSTEMS.items() for system in systems]
    for _ in range(count):
        kind, system = choices.choice(kinds)
        messages = [{"role": "system", "content": system}] if system else []
        text = user_header(tokenizer, messages)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        yield {"ids": ids, "kind": kind, "system": system, **SAMPLING}


def questions(tokenizer: Any, asked: Iterable[dict[str, Any]], answered: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yields {"kind", "system", "text"} of every question that the target ended itself.

    asked: rows of `headers`. answered: what `eagle-train generate` made of them, in the same order."""
    special = set(tokenizer.all_special_ids)
    for header, row in zip(asked, answered, strict=True):
        ids = row["ids"][row["prompt_tokens"] :]
        if not ids or ids[-1] not in special or any(token in special for token in ids[:-1]):
            continue
        text = tokenizer.decode(ids[:-1]).strip()
        if len(text.split()) >= 3:
            yield {"kind": header["kind"], "system": header["system"], "text": text}
