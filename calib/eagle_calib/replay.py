"""Replays a certificate's golden prompts on a loaded bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_runtime.app.eagle_model import EagleModel
from eagle_runtime.app.result import Result
from eagle_runtime.base.tree import Float
from eagle_runtime.bundle.manifest import GoldenPrompt
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.text.tokenizer import Text

GOLDEN_TOKENS = 32  # decoded from each prompt
GOLDEN_TEXTS = (
    "The lighthouse keeper climbed the stairs every evening, lit the lamp and",
    "Question: Why is the sky blue in the daytime and red at sunset?\nAnswer:",
    "A baker sells 12 loaves in the morning and 7 in the afternoon. 12 + 7 =",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n    ',
)
RANDOM_IDS = 16  # of each prompt where there is no tokenizer


@dataclass(frozen=True, slots=True)
class Comparison:
    """A bundle compared with its source model, over all stored rows of logits. agreement: share of rows with the same
    token first. logit_error: largest difference of a stored logit."""

    agreement: float
    logit_error: float


def golden_prompts(text: Text, vocab_size: int, context: int) -> list[list[int]]:
    """Returns the ids of the golden texts, or pseudo-random ids where the tokenizer is missing or another model's. They
    are cut so that GOLDEN_TOKENS, or in a short context half of it, may follow."""
    prompts = [text.encode(golden) for golden in GOLDEN_TEXTS] if text.available else []
    if not prompts or not all(ids and max(ids) < vocab_size for ids in prompts):
        random = np.random.default_rng(0)
        prompts = [random.integers(0, vocab_size, RANDOM_IDS).tolist() for _ in GOLDEN_TEXTS]
    longest = max(context - GOLDEN_TOKENS, context // 2, 1)
    return [ids[:longest] for ids in prompts]


def forced_logits(model: EagleModel, prompt: Sequence[int], continuation: Sequence[int]) -> Float:
    """Returns the target's logits [n, V] in the rows that choose each of the continuation's n tokens."""
    tokens = [*prompt, *continuation[:-1]]
    return np.concatenate([piece.copy() for piece in model.score(tokens, first=len(prompt) - 1)])


def replay(model: EagleModel, prompts: Sequence[Sequence[int]], *, drafts: bool) -> list[Result]:
    """Decode greedily from every prompt, whatever the model's own settings of sampling are, with or without drafts.
    Drafts do not depend on measured costs: with a head they are trees of the bundle's own size, without one chains of
    n-gram matches."""
    settings: dict[str, Any] = {"method": "vanilla"}
    if drafts:
        has_head = model.manifest.head is not None
        settings = {"method": "eagle", "tree": "dynamic"} if has_head else {"method": "lookup", "tree": "chain"}
    settings |= {"sampling": SamplingParams(), "max_new_tokens": GOLDEN_TOKENS}
    return [model.generate(list(prompt), **settings) for prompt in prompts]


def mean_tau(results: Sequence[Result]) -> float:
    """Returns the tokens per target pass over all results."""
    passes = sum(result.usage.target_passes for result in results)
    return sum(result.usage.new_tokens - 1 for result in results) / passes if passes else 1.0


def compare(model: EagleModel, prompts: Sequence[GoldenPrompt]) -> Comparison:
    """Compute the logits of the source model's continuations and compare every row with the stored one."""
    same, worst = [], 0.0
    for golden in prompts:
        logits = forced_logits(model, golden.prompt, golden.continuation)
        same += (logits.argmax(-1) == np.array(golden.continuation)).tolist()
        for row, top in zip(logits, golden.top, strict=True):
            worst = max(worst, float(np.abs(row[list(top.token_ids)] - np.array(top.logits)).max()))
    return Comparison(float(np.mean(same)), worst)
