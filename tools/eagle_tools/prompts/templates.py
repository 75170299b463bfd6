"""Prompts by templates: tasks on passages and code, and made-up problems, tables, records and stories."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

from eagle_tools.prompts.passages import Function

Prompt = tuple[str, str, str]  # kind, text, and the part of it that is not the template's
ON_TEXT = [
    ("summary", "Summarize the following text in {n} sentences.\n\n{text}"),
    ("summary", "{text}\n\nTL;DR:"),
    ("summary", "Summarize: {text}"),
    ("summary", "Summarize this for me, please:\n\n{text}"),
    ("summary", "What are the main points of this text? Answer with a short list.\n\n{text}"),
    ("summary", "Give this text a title and one sentence that says what it is about.\n\n{text}"),
    ("rewriting", "Rewrite the following text so that a ten-year-old understands it.\n\n{text}"),
    ("rewriting", "Rewrite this in a friendly tone:\n\n{text}"),
    ("rewriting", "Paraphrase the following paragraph.\n\n{text}"),
    ("rewriting", "Make this text half as long and keep what matters:\n\n{text}"),
    ("translation", "Translate into {language}:\n\n{sentence}"),
    ("reading", "Read the text and answer the question.\n\nText: {text}\n\nQuestion: What does it say about {word}?"),
    ("reading", "{text}\n\nWrite three questions about this text, each with its answer."),
    ("reading", "Which words in this text are technical terms? Explain each in one sentence.\n\n{text}"),
    ("writing", "Continue this text with one more paragraph:\n\n{text}"),
]
ON_CODE = [
    "Explain what this function does.\n\n```python\n{source}\n```",
    "Write a docstring for this function.\n\n```python\n{source}\n```",
    "Write unit tests for the following function.\n\n```python\n{source}\n```",
    "Add type hints and comments to this code:\n\n```python\n{source}\n```",
    "Rewrite this Python function in JavaScript.\n\n{source}",
    "Is there a bug in this code? If there is, correct it.\n\n```python\n{broken}\n```",
    "Make this code easier to read without changing what it does:\n\n{source}",
    "Complete the function.\n\n```python\n{head}\n```",
    "Write a Python function `{name}` for this description: {summary}",
]
SWAPS = [
    ("==", "!="), (" < ", " > "), (" + ", " - "), ("and ", "or "), ("True", "False"), ("[0]", "[1]"),
    (" in ", " not in "),
]  # fmt: skip
LANGUAGES = ("French", "Spanish", "German", "Italian", "Portuguese")
NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas", "Kofi", "Lena", "Mei", "Noah",
)  # fmt: skip
THINGS = (
    "apples", "pencils", "stamps", "books", "eggs", "tickets", "marbles", "bottles", "chairs", "cookies", "plants",
)  # fmt: skip
PLACES = ("a lighthouse", "a desert town", "a space station", "an old library", "a night train", "a fishing village")
HEROES = ("a shy robot", "a retired pilot", "a curious fox", "two sisters", "a clockmaker", "a young violinist")
EVENTS = ("finds a letter", "loses the only map", "hears a strange song", "meets an old friend", "must fix a machine")
GENRES = ("short story", "poem", "dialogue", "fairy tale", "diary entry", "opening scene")
TOPICS = (
    "photosynthesis", "volcanoes", "inflation", "black holes", "vaccines", "the water cycle", "solar panels",
    "earthquakes", "tides", "gravity", "DNA", "recursion", "binary search", "hash tables", "garbage collection", "HTTP",
    "relational databases", "version control", "encryption", "chess", "jazz", "impressionism", "sonnets",
    "the Silk Road", "the Roman Empire", "the French Revolution", "the printing press", "sleep", "meditation",
    "budgeting", "job interviews", "public speaking", "composting", "bread baking", "bicycle repair", "knitting",
    "electric cars", "rainforests", "coral reefs", "migration of birds", "bees", "whales", "glaciers",
    "renewable energy", "recycling", "democracy", "copyright", "supply and demand", "insurance", "statistics",
    "probability", "prime numbers", "fractions", "geometry",
)  # fmt: skip
ON_TOPIC = [
    ("facts", "Explain {topic} in simple words."),
    ("facts", "Why does {topic} matter? Give three reasons."),
    ("facts", "What are common misunderstandings about {topic}?"),
    ("facts", "Give me five facts about {topic}."),
    ("writing", "Write a short blog post about {topic}."),
    ("writing", "Write a poem of eight lines about {topic}."),
    ("writing", "Write an e-mail to a colleague that recommends a course on {topic}."),
    ("advice", "How should a beginner start to learn about {topic}? Give steps."),
    ("chat", "Compare {topic} with {other}: what do they have in common?"),
    ("chat", "Write a dialogue between a teacher and a pupil about {topic}."),
    ("chat", "Make a quiz of four questions about {topic} with answers."),
]


def on_text(choices: random.Random, passages: Sequence[str]) -> Iterator[Prompt]:
    """Yields tasks on each passage once."""
    for passage in choices.sample(passages, len(passages)):
        kind, form = choices.choice(ON_TEXT)
        words = re.findall(r"[a-z]{6,}", passage) or ["this"]
        sentence = re.split(r"(?<=[.!?])\s", passage)[0]
        values = {"n": choices.randint(1, 3), "language": choices.choice(LANGUAGES), "word": choices.choice(words)}
        yield kind, form.format(text=passage, sentence=sentence, **values), passage


def on_code(choices: random.Random, functions: Sequence[Function]) -> Iterator[Prompt]:
    """Yields tasks on each function once."""
    for function in choices.sample(functions, len(functions)):
        forms = ON_CODE if function.summary else ON_CODE[:-1]
        lines = function.source.split("\n")
        swap = next((swap for swap in choices.sample(SWAPS, len(SWAPS)) if swap[0] in function.source), ("", ""))
        values = {
            "broken": function.source.replace(*swap, 1) if swap[0] else function.source,
            "head": "\n".join(lines[: max(2, len(lines) // 2)]),
        }
        text = choices.choice(forms).format(
            source=function.source, name=function.name, summary=function.summary, **values
        )
        yield "code", text, function.source


def made_up(choices: random.Random) -> Iterator[Prompt]:
    """Yields problems, tables, records, stories and questions on topics without an end."""
    makers = (_problem, _problem, _table, _record, _story, _topic, _topic)
    while True:
        kind, text = choices.choice(makers)(choices)
        yield kind, text, ""


def _problem(choices: random.Random) -> tuple[str, str]:
    a, b, c = choices.randint(3, 60), choices.randint(2, 12), choices.randint(2, 9)
    one, two = choices.sample(NAMES, 2)
    thing = choices.choice(THINGS)
    return "maths", choices.choice(
        [
            f"{one} has {a * c} {thing} and gives {b} to each of {c} friends. How many {thing} does {one} keep?",
            f"{one} buys {b} boxes of {a} {thing}. {two} takes {c} of them. How many are left?",
            f"A shop sells {thing} at ${b}.{c}0 each. How much do {a} {thing} cost with a discount of {c * 5} percent?",
            f"{one} walks {a} km in {c} hours. How long does {two}, who is {b} km/h faster, need for the same way?",
            f"{one} is {a + b} years old, {b} years older than {two}. How old will {two} be in {c} years?",
            f"Solve for x: {b}x + {a} = {b * c + a}. Show each step.",
            f"What is {a} * {b} - {c}? Explain how to compute it in the head.",
            f"A rectangle is {a} cm long and {b} cm wide. What are its area and its perimeter?",
            f"{c} machines make {a * c} {thing} in an hour. How many do {b} machines make in {c + 1} hours?",
            f"There are {a} red and {b} blue {thing} in a bag. What is the probability of drawing a blue one?",
            f"{one} saves ${a} a week. After how many weeks can {one} pay for a bicycle that costs ${a * c + b}?",
        ]
    )


def _table(choices: random.Random) -> tuple[str, str]:
    names = choices.sample(NAMES, choices.randint(3, 5))
    first, second = choices.sample(("Age", "City", "Score", "Salary", "Visits"), 2)

    def cell(column: str) -> str:
        cities = ("Lima", "Oslo", "Cairo", "Kyoto", "Porto", "Accra")
        return choices.choice(cities) if column == "City" else str(choices.randint(18, 95))

    rows = "\n".join(f"| {name} | {cell(first)} | {cell(second)} |" for name in names)
    asks = [
        f"Which person has the first place when the rows are sorted by {first}?",
        f"What is the {second} of {choices.choice(names)}?",
        "Turn this table into JSON.",
        "Describe this table in two sentences.",
        f"Write a SQL query that returns the names sorted by {first}.",
    ]
    return "tables", f"{choices.choice(asks)}\n\n| Name | {first} | {second} |\n|---|---|---|\n{rows}"


def _record(choices: random.Random) -> tuple[str, str]:
    name, other = choices.sample(NAMES, 2)
    count, thing, number = choices.randint(2, 40), choices.choice(THINGS), choices.randint(1000, 9999)
    day = choices.choice(("Monday", "Tuesday", "Thursday", "Saturday"))
    text = choices.choice(
        [
            f"Hi {other}, please send {count} {thing} to my new address, 12 Mill Lane, before {day}. My customer "
            f"number is {number}. Thanks, {name}",
            f"Order {number}: {name} asked for {count} {thing}; {other} confirmed the delivery for {day} at 10 am.",
            f"On {day} {name} and {other} met to talk about the {thing}. They agreed on {count} pieces for ${number}.",
        ]
    )
    asks = (
        "Extract all names, numbers and dates as JSON.",
        "Who asks for what, and until when?",
        "Write a polite reply.",
    )
    return "extraction", f"{choices.choice(asks)}\n\n{text}"


def _story(choices: random.Random) -> tuple[str, str]:
    hero, place, event = choices.choice(HEROES), choices.choice(PLACES), choices.choice(EVENTS)
    return "writing", choices.choice(
        [
            f"Write a {choices.choice(GENRES)} about {hero} who {event} in {place}.",
            f"Continue the story: One evening in {place}, {hero} {event}.",
            f"Write the ending of a story in which {hero} {event} in {place}. Use about 100 words.",
        ]
    )


def _topic(choices: random.Random) -> tuple[str, str]:
    kind, form = choices.choice(ON_TOPIC)
    topic, other = choices.sample(TOPICS, 2)
    return kind, form.format(topic=topic, other=other)
