"""Requests for news articles, which a target writes and is then asked about: summaries of reports with names, numbers
and quotations are common in use, and packages on a machine carry no such text."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

FORMS = (
    "Write a news report of about {words} words about {subject} in {place}. Give names, numbers and quotations.",
    "Write a newspaper article of {words} words: {subject}, {place}. Quote two people.",
    "You are a reporter in {place}. Write an article of {words} words about {subject}, without a headline.",
    "Write a magazine story of about {words} words on {subject} in {place}, with what witnesses and officials say.",
)
WORDS = (150, 200, 250, 300, 350)
SUBJECTS = (
    "a flood that closed schools and roads",
    "an election that was decided by a few votes",
    "a football match that ended in extra time",
    "a trial about fraud at a bank",
    "a fire in a block of flats",
    "the opening of a new museum",
    "a strike of bus drivers",
    "a missing hiker who was found alive",
    "a company that dismisses a tenth of its staff",
    "a scientist who won a prize for a vaccine",
    "a dog that saved a child",
    "a storm that cut the power for two days",
    "a plan to build a bridge, and those who are against it",
    "a robbery at a jeweller's",
    "a singer who ended a tour early",
    "a record price for a painting",
    "a school that bans mobile phones",
    "a doctor who is accused of negligence",
    "a train that derailed without deaths",
    "the rising price of food",
    "a mayor who resigned after a letter became public",
    "a teenager who sailed alone across an ocean",
    "a hospital that runs out of beds",
    "a drought and its cost for farmers",
    "the rescue of a stranded whale",
    "two neighbours who quarrel about a wall",
    "a film festival and its surprise winner",
    "an aeroplane that returned because of a sick passenger",
    "a new law on short lettings",
    "a family that lost its home and got help",
    "a hacker attack on a town hall",
    "a tennis player's return after an injury",
    "an earthquake that woke half the country",
    "a restaurant that gives meals away",
    "a court's decision on an old murder",
    "an oil spill near a beach",
    "a minister's visit that was cancelled",
    "a marathon in the heat",
    "a zoo's first panda cub",
    "the arrest of a gang of car thieves",
)
PLACES = (  # noqa: SIM905
    "Liverpool Chicago Nairobi Lisbon Sydney Toronto Mumbai Lagos Boston Seoul Glasgow Houston Dublin Oslo Manila "
    "Cairo Denver Leeds Lima Athens Warsaw Detroit Perth Vienna Hanoi Atlanta Bristol Kraków Seattle Accra Naples "
    "Brisbane Miami Belfast Osaka Bogotá Phoenix Cardiff Marseille Portland Jakarta Auckland Dallas Hamburg"
).split()


def article_prompts(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yields rows for `eagle-train generate`, each a request for an article."""
    choices = random.Random(seed)
    for _ in range(count):
        values = {"words": choices.choice(WORDS), "subject": choices.choice(SUBJECTS), "place": choices.choice(PLACES)}
        text = choices.choice(FORMS).format(**values)
        settings = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 512}
        yield {"messages": [{"role": "user", "content": text}], "kind": "article", **settings}


def articles(answered: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yields the articles of what `eagle-train generate` made of the requests, those of five lines' length at least."""
    for row in answered:
        text = str(row["messages"][-1]["content"]).strip()
        if row["messages"][-1]["role"] == "assistant" and len(text) >= 400:
            yield text
