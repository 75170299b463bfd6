"""Records the cycles of a few prompts as plain data for the page's viewer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from eagle_runtime.core.generate import Cycle
from eagle_runtime.text.tokenizer import Text
from eagle_tools.bench.methods import SHAPE, VANILLA
from eagle_tools.bench.rows import Asked, Setup

PROMPTS = 2  # prompts that are recorded for each setup
CYCLES = 48  # cycles that are kept of each generation


class Recorder:
    """A Watch that keeps the cycles of the first prompts. During decoding it only appends."""

    def __init__(self) -> None:
        self._runs: dict[tuple[Setup, int | str], tuple[Asked, list[Cycle]]] = {}

    def __call__(self, setup: Setup, asked: Asked) -> Callable[[Cycle], None] | None:
        """Returns the function to call after each cycle, or None. The last generation of a prompt counts, since the
        first is the warm-up."""
        if setup.method == VANILLA or SHAPE.fullmatch(setup.method):
            return None
        prompts = {prompt for known, prompt in self._runs if known == setup}
        if len(prompts | {asked.id}) > PROMPTS:
            return None
        cycles: list[Cycle] = []
        self._runs[setup, asked.id] = (asked, cycles)
        return cycles.append

    def data(self, text: Text) -> dict[str, Any]:
        """Returns {"tokens": id -> text, "runs": [{"setup", "prompt", "cycles": [...]}]}, cycles as of `eagle-run
        --trace`."""
        known: dict[int, str] = {}
        runs = []
        for (setup, _), (asked, cycles) in self._runs.items():
            kept = cycles[:CYCLES]
            for cycle in kept:
                for token in (*cycle.tree.tokens.tolist(), int(cycle.step.tokens[-1])):
                    known.setdefault(token, token_text(text, token))
            runs.append(
                {
                    "setup": f"{setup.bundle} · {setup.precision} · {setup.method} · T = {setup.temperature:g}",
                    "prompt_id": asked.id,
                    "prompt": decoded(text, asked.token_ids),
                    "cycles": [cycle_data(cycle) for cycle in kept],
                }
            )
        return {"tokens": known, "runs": runs}


def cycle_data(cycle: Cycle) -> dict[str, Any]:
    """Returns a cycle as data. p: the drafter's probability of each node given its parent. ms: of draft, verify,
    host."""
    tree, step = cycle.tree, cycle.step
    own = tree.scores - tree.scores[np.maximum(tree.parents, 0)]
    return {
        "tokens": tree.tokens.tolist(),
        "parents": tree.parents.tolist(),
        "p": [round(float(p), 3) for p in np.exp(np.nan_to_num(own, nan=0.0, posinf=0.0))],
        "path": step.path.tolist(),
        "next": int(step.tokens[-1]),
        "ms": [round(1e3 * seconds, 3) for seconds in (cycle.draft_s, cycle.verify_s, cycle.host_s)],
    }


def token_text(text: Text, token: int) -> str:
    """Returns the text of one token; its id if it is part of a character, or there is no tokenizer."""
    return decoded(text, (token,)) or f"#{token}"


def decoded(text: Text, tokens: tuple[int, ...]) -> str:
    """Returns the text of tokens; their ids if there is no tokenizer."""
    decoder = text.stream([])
    if decoder is None:
        return " ".join(f"#{token}" for token in tokens)
    return decoder.feed(tokens) + decoder.finish()
