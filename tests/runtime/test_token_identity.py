"""The main test of the runtime: with one seed, decoding with a draft emits the tokens that decoding without it emits.

Every setting of the sampler meets every shape of tree. The two ways compute the same logits in passes of different
width, so they may differ in the last bits; a different token is accepted only where both drew from logits equal to
1e-4, which makes it a float tie, and its gap is printed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from conftest import HEADS, load_trace, needs_operators
from eagle_runtime import EagleModel, SamplingParams
from eagle_runtime.base.tree import EAGLE1_CHOICES
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import DraftHead, Ranker
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.cost_model import Costs, Timings
from eagle_runtime.drafting.coupling import GumbelRanker
from eagle_runtime.drafting.rank_acceptance import RankCounts
from eagle_runtime.drafting.sequoia import SequoiaDrafter
from eagle_runtime.drafting.shapes import DynamicTree, EagleDrafter, StaticTree, chain
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.sampling.candidates import LogitRow
from eagle_runtime.sampling.sampler import Sampler
from insides import bundle_in
from machine_fake import FixedCosts

TEMPERATURES = (0.0, 0.6, 1.0, 1.4)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "repetition": {"repetition_penalty": 1.2},
}
# As measured on a desktop processor; what was learned in one output stays for the next, as in a model.
COSTS = FixedCosts(
    Costs(Timings((1, 16, 64), (64,), ((0.05, 0.062, 0.13),)), Timings((1, 32), (64,), ((0.003, 0.005),)))
)
ACCEPTANCE = AcceptanceStats()
RANKS = RankCounts()
Build = Callable[[DraftHead, Ranker | None], Drafter]
DRAFTERS: dict[str, tuple[str, Build]] = {
    "dynamic": ("eagle1", lambda head, ranker: EagleDrafter(head, DynamicTree(24, 3, 5), ranker)),
    "static": ("eagle1", lambda head, ranker: EagleDrafter(head, StaticTree(EAGLE1_CHOICES), ranker)),
    "chain": ("eagle1", lambda head, ranker: EagleDrafter(head, chain(5), ranker)),
    "eagle3": ("eagle3", lambda head, ranker: EagleDrafter(head, DynamicTree(24, 3, 5), ranker)),
    "cost-aware": ("eagle3", lambda head, ranker: CostAwareDrafter(head, COSTS, ACCEPTANCE, ranker=ranker)),
    "eagle+lookup": (
        "eagle1",
        lambda head, ranker: CostAwareDrafter(head, COSTS, ACCEPTANCE, lookup=True, ranker=ranker),
    ),
    "sequoia": (
        "eagle3",
        lambda head, ranker: SequoiaDrafter(head, COSTS, RANKS, ACCEPTANCE.usual_gain(), ranker=ranker),
    ),
}
NEW_TOKENS = 32


class RecordingSampler(Sampler):
    """A sampler that also keeps the logits it drew from."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        super().__init__(params, prompt, vocab_size)
        self.rows: list[npt.NDArray[np.float32]] = []

    def next(self, logits: npt.NDArray[np.float32] | LogitRow) -> int:
        self.rows.append((logits if isinstance(logits, np.ndarray) else logits.whole()).copy())
        return super().next(logits)


def some_prompts(count: int) -> list[list[int]]:
    """Pieces of the reference prompts and of the text that follows them, of 4 to 40 tokens."""
    rng = np.random.default_rng(7)
    texts = [row["prompt_ids"] + row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]
    prompts = []
    for index in range(count):
        text, length = texts[index % len(texts)], int(rng.integers(4, 41))
        start = int(rng.integers(0, len(text) - length))
        prompts.append(text[start : start + length])
    return prompts


def decode(
    model: EagleModel, build: Build, params: SamplingParams, prompt: list[int]
) -> tuple[list[int], list[npt.NDArray[np.float32]], int]:
    """NEW_TOKENS tokens, the logits each was drawn from, and how many drafted tokens were accepted on the way."""
    sampler = RecordingSampler(params, prompt, model.manifest.target.vocab_size)
    ranker = GumbelRanker(sampler) if params.temperature > 0 else None
    drafter = build(model.head, ranker)
    tokens: list[int] = []
    accepted = 0
    for event in generate(DecodingState(bundle_in(model).target, model.head), drafter, sampler, prompt):
        accepted += event.step.num_accepted
        tokens += event.step.tokens.tolist()
        if len(tokens) >= NEW_TOKENS:
            break
    return tokens[:NEW_TOKENS], sampler.rows[:NEW_TOKENS], accepted


def check_identity(
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
    temperatures: Sequence[float],
    precision: str = "fp32",
    largest_gap: float = 1e-4,
    backend: str = "cpu",
) -> None:
    """largest_gap: between logits that different tokens were drawn from; 0 allows no ties at all."""
    ties: list[str] = []
    compared = 0
    accepted = dict.fromkeys(DRAFTERS, 0)
    for (index, prompt), temperature, (setting, options) in itertools.product(
        enumerate(prompts), temperatures, SETTINGS.items()
    ):
        params = SamplingParams(temperature=temperature, seed=1000 + index, **options)
        # Each kind's own: targets that were calibrated with different heads differ.
        models = {kind: model_of(kind, precision, backend) for kind in HEADS}
        plains = {kind: decode(model, lambda *_: NoDraft(), params, prompt) for kind, model in models.items()}
        for name, (kind, build) in DRAFTERS.items():
            plain, plain_rows, _ = plains[kind]
            tokens, rows, taken = decode(models[kind], build, params, prompt)
            compared += 1
            accepted[name] += taken
            if tokens == plain:
                continue
            at = next(i for i, pair in enumerate(zip(plain, tokens, strict=True)) if pair[0] != pair[1])
            gap = float(np.abs(plain_rows[at] - rows[at]).max())
            case = f"{name}, {setting}, T={temperature}, prompt {index}, token {at}: logits differ by {gap:.1e}"
            assert gap < largest_gap, f"not a float tie: {case}"
            ties.append(case)
    print(f"{compared} outputs compared, {len(ties)} float ties", *ties, sep="\n")
    assert min(accepted.values()) > compared, "equal because nothing was drafted shows nothing"
    assert len(ties) <= compared / 1000


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_eagle_equals_vanilla(model_of: Callable[..., EagleModel], temperature: float) -> None:
    check_identity(model_of, some_prompts(3), [temperature])


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_int8_tokens_are_equal_without_ties(model_of: Callable[..., EagleModel], temperature: float) -> None:
    check_identity(model_of, some_prompts(2), [temperature], "int8", largest_gap=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "precision", ["int4", "int8-token", "int4-int8", "int8-static", "int8-weight", "int8+int8 cache"]
)
def test_quantised_tokens_are_equal_without_ties(
    model_of: Callable[..., EagleModel], precision: str, temperature: float
) -> None:
    check_identity(model_of, some_prompts(2), [temperature], precision, largest_gap=0.0)


@needs_operators
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("precision", ["int4", "int8", "int8-token", "int8+int8 cache"])
def test_tokens_of_the_native_form_are_equal_without_ties(
    model_of: Callable[..., EagleModel], precision: str, temperature: float
) -> None:
    check_identity(model_of, some_prompts(2), [temperature], precision, largest_gap=0.0, backend="native")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int8-static", "int8-weight", "int4"])
def test_quantised_eagle_equals_vanilla_on_100_prompts(model_of: Callable[..., EagleModel], precision: str) -> None:
    check_identity(model_of, some_prompts(100), TEMPERATURES, precision, largest_gap=0.0)


@needs_operators
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_native_tokens_are_equal_on_100_prompts(model_of: Callable[..., EagleModel], precision: str) -> None:
    check_identity(model_of, some_prompts(100), TEMPERATURES, precision, largest_gap=0.0, backend="native")


@pytest.mark.slow
def test_eagle_equals_vanilla_on_200_prompts(model_of: Callable[..., EagleModel]) -> None:
    check_identity(model_of, some_prompts(200), TEMPERATURES)


def test_through_the_public_interface(model_of: Callable[..., EagleModel], prompts: list[list[int]]) -> None:
    """Penalties over the output, logit bias and stop tokens, through EagleModel itself."""
    settings: dict[str, Any] = {
        "temperature": 0.9,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {35: -1.0, 49: 1.5},
        "seed": 11,
        "max_new_tokens": 40,
        "stop_token_ids": [13],
    }
    for kind, tree in itertools.product(("eagle1", "eagle3"), ("dynamic", "static", "chain")):
        for prompt in prompts:
            model = model_of(kind)
            eagle = model.generate(prompt, tree=tree, **settings)
            vanilla = model.generate(prompt, method="vanilla", **settings)
            assert eagle.token_ids == vanilla.token_ids
            assert eagle.finish_reason == vanilla.finish_reason
            assert vanilla.usage.tau == 1
