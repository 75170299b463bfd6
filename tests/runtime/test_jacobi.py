"""Lookahead decoding: the paper's window and n-grams on a target that was worked out by hand, and its losslessness."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_tokenizer
from eagle_runtime import Constraint, EagleModel
from eagle_runtime.base.tree import ancestor_mask, node_depths
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.jacobi import JacobiDrafter, Window
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from fakes import FakeTarget, Table

VOCAB = 8


class Counting(Table):
    """After every token comes the next number."""

    def logits(self, history: Any) -> Any:
        row = np.zeros(VOCAB, np.float32)
        row[(int(history[0, -1]) + 1) % VOCAB] = 5
        return row


def test_the_window_and_the_n_grams_of_the_paper() -> None:
    """Three columns, 3-grams. The text begins 5 2 6 and goes on 7 0 1 2 ...; the first level is the text backwards."""
    drafter = JacobiDrafter(Window(columns=3, size=3, ngrams=2))
    state = DecodingState(Target(FakeTarget(Counting(VOCAB, 0, 1.0)), 60), None)
    cycles = generate(state, drafter, Sampler(SamplingParams(), [5, 2, 6], VOCAB), [5, 2, 6])
    assert next(cycles).step.tokens.tolist() == [7]
    expected = [  # tokens and parents of the tree; emitted; n-grams that are known afterwards
        ([7, 6, 2], [-1, 0, 1], [0], {}),  # level 0 alone: its forecasts 0 7 3 become level 1
        ([0, 6, 2, 0, 7, 3], [-1, 0, 1, 0, 1, 2], [1], {0: [(0, 1)], 6: [(7, 0)], 2: [(3, 4)]}),
        ([1, 7, 3, 1, 0, 4], [-1, 0, 1, 0, 1, 2], [2], {1: [(1, 2)], 7: [(0, 1)], 3: [(4, 5)]}),
        # The n-gram 2 3 4 comes first, and is accepted; the window follows: level 0 is 2 0 4, level 1 is 2 1 5.
        ([2, 3, 4, 0, 4, 2, 1, 5], [-1, 0, 1, 0, 3, 0, 3, 4], [3, 4, 5], {4: [(5, 6)], 0: [(0, 1), (1, 2)]}),
    ]
    for tokens, parents, emitted, known in expected:
        cycle = next(cycles)
        assert cycle.tree.tokens.tolist() == tokens and cycle.tree.parents.tolist() == parents
        assert cycle.step.tokens.tolist() == emitted
        assert {first: drafter._pool[first] for first in known} == known
    sees = ancestor_mask(cycle.tree.parents)
    assert np.flatnonzero(sees[7]).tolist() == [
        0,
        3,
        4,
        7,
    ]  # a forecast sees level 0 up to its column, and its own column
    assert node_depths(cycle.tree.parents).tolist() == [0, 1, 2, 1, 2, 1, 2, 3]


@pytest.mark.parametrize("room", range(2, 12))
def test_without_room_for_the_window_n_grams_are_drafted_alone(room: int) -> None:
    drafter = JacobiDrafter(Window(columns=3, size=3, ngrams=2))
    drafter._levels = [[1, 2, 3], [4, 5, 6]]
    drafter._pool = {7: [(1, 2), (1, 3)]}
    tree = drafter.grow([7], room)
    assert tree.num_nodes <= room and (len(drafter._newest) == 3) == (room > 5)
    if 2 < room <= 5:
        assert tree.tokens.tolist() == [7, 1, 3, 2][:room]


@pytest.mark.parametrize("window", [Window(), Window(1, 2, 1), Window(7, 5, 7)])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tables_emit_what_they_emit_without_drafts(window: Window, temperature: float) -> None:
    for seed in range(3):
        params = SamplingParams(temperature=temperature, seed=seed)
        texts = []
        for drafter in (JacobiDrafter(window), JacobiDrafter(Window(1, 2, 1), None)):
            state = DecodingState(Target(FakeTarget(Table(VOCAB, seed, 1.5)), 60), None)
            for cycle in generate(state, drafter, Sampler(params, [1, 2], VOCAB), [1, 2]):
                assert cycle.tree.num_nodes <= 60
            texts.append(state.tokens[:60])
        plain: list[int] = [1, 2]
        sampler, table = Sampler(params, [1, 2], VOCAB), Table(VOCAB, seed, 1.5)
        while len(plain) < 60:
            plain.append(sampler.next(table.logits(np.array([plain, range(len(plain))], np.float32))))
        assert texts == [plain, plain]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_output_is_that_of_decoding_without_drafts(
    precision: str, model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    model, accepted = model_of("eagle1", precision), 0
    for number, prompt in enumerate([*prompts[:2], [5]]):
        for temperature in (0.0, 0.7, 1.0):
            settings: dict[str, Any] = {"max_new_tokens": 32, "temperature": temperature, "seed": number}
            vanilla = model.generate(prompt, method="vanilla", ignore_eos=True, **settings)
            result = model.generate(prompt, method="lookahead", ignore_eos=True, **settings)
            assert result.token_ids == vanilla.token_ids
            accepted += 32 - 1 - result.usage.target_passes
    assert accepted > 0


def test_constraints_hold(bundle_of: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]) -> None:
    bundle = shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle")
    put_tokenizer(bundle)
    schema = {"type": "array", "items": {"enum": ["ab", "cd"]}, "minItems": 2, "maxItems": 4}
    with EagleModel.load(bundle, threads=1, context=256) as model:
        for temperature in (0.0, 1.0):
            settings: dict[str, Any] = {
                "constraint": Constraint.json_schema(schema),
                "temperature": temperature,
                "seed": 3,
            }
            vanilla = model.generate(prompts[0], method="vanilla", **settings)
            assert model.generate(prompts[0], method="lookahead", **settings).token_ids == vanilla.token_ids
            assert 2 <= len(json.loads(vanilla.text or "")) <= 4
