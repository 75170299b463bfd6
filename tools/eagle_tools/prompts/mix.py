"""Mixes prompts of all kinds into files of rows for `eagle-train generate`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eagle_tools.prompts.dedupe import Seen
from eagle_tools.prompts.passages import Function
from eagle_tools.prompts.templates import Prompt, made_up, on_code, on_text

OWN_SHARE = 0.6  # of the rows, while there are enough
# (share, settings): greedy text, the model's own settings, and plain samples.
TEMPERATURES: tuple[tuple[float, dict[str, Any]], ...] = (
    (0.4, {"temperature": 0.0}),
    (0.35, {}),
    (0.25, {"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
)
FURTHER = (0.75, 0.2, 0.05)  # shares of dialogues with 0, 1 and 2 further questions
SYSTEM_SHARE = 0.3  # of the target's own questions, which keep the system prompt under which they were asked
LONGEST = 6000  # characters of a prompt
ALONE = 0.5  # of the passages, that are texts by themselves; the others are joined to long ones
JOINED = (3, 9)  # passages of a long text


def mixed(
    own: Iterable[dict[str, Any]],
    passages: Sequence[str],
    functions: Sequence[Function],
    held_out: Iterable[str],
    count: int,
    seed: int,
) -> list[dict[str, Any]]:
    """Returns at most `count` rows in random order, no two alike and none like a held-out text.

    own: what `questions` yields, of which OWN_SHARE of the rows are made at most. Passages and functions are used once
    each, so the rest are made-up tasks."""
    choices, seen = random.Random(seed), Seen(held_out)
    rows: list[dict[str, Any]] = []
    for question in own:
        if len(rows) < count and len(question["text"]) <= LONGEST and seen.is_new(question["text"], question["text"]):
            keep = question["system"] and choices.random() < SYSTEM_SHARE
            system = [{"role": "system", "content": question["system"]}] if keep else []
            rows.append({"kind": question["kind"], "messages": [*system, _user(question["text"])]})
    rows = rows[: int(count * OWN_SHARE) or 1]
    sources: Sequence[Iterator[Prompt]] = (
        on_text(choices, texts_of(choices, passages)),
        on_code(choices, functions),
        made_up(choices),
    )
    for source in itertools.cycle(sources):
        if len(rows) >= count:
            break
        kind, text, core = next(source, ("", "", ""))
        if text and len(text) <= LONGEST and seen.is_new(text, core or None):
            rows.append({"kind": kind, "messages": [_user(text)]})
    choices.shuffle(rows)
    for row in rows:
        row.update(choices.choices([settings for _, settings in TEMPERATURES], [share for share, _ in TEMPERATURES])[0])
        further = choices.choices(range(len(FURTHER)), FURTHER)[0]
        if further:
            row["further"] = further
    return rows


def texts_of(choices: random.Random, passages: Sequence[str]) -> list[str]:
    """Returns texts of one passage, and, of those that follow one another, of several (JOINED), so that some prompts
    are long."""
    alone = int(len(passages) * ALONE)
    texts, start = list(passages[:alone]), alone
    while start < len(passages):
        end = start + choices.randint(*JOINED)
        texts.append("\n\n".join(passages[start:end]))
        start = end
    return texts


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
