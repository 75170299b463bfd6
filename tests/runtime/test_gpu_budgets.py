"""What a cycle may ask of a GPU: calls, copies, bytes and waits are counted over generations on a fake one. The counts
do not depend on the model's width, but for the embeddings that go up; nor on its vocabulary, if it has 64 tokens."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import HEADS
from cuda_fake import FakeDriver
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.core.generate import Cycle
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_runtime.trt.session import start_sessions
from insides import bundle_in
from trt_fake import fake_library, write_fake_engines

CONTEXT = 700
DOWN = {0.0: 16_000, 1.0: 64_000}  # bytes per cycle, by temperature
DYNAMIC: dict[str, Any] = {"tree": "dynamic", "total_token": 60, "depth": 5, "draft_top_k": 10}


@pytest.fixture
def model_on_gpu(bundle_of: Callable[..., Path], tmp_path: Path) -> Callable[[str], EagleModel]:
    """Returns a function: kind of head -> a model on a fake GPU, with the trees of DYNAMIC."""

    def model(kind: str) -> EagleModel:
        bundle = Path(shutil.copytree(bundle_of(kind), tmp_path / kind))
        driver, manifest = FakeDriver(), read_manifest(bundle)
        folder = write_fake_engines(bundle, "tensorrt", CONTEXT)
        sessions = start_sessions(fake_library(driver, "tensorrt"), driver, folder, manifest, CONTEXT)
        opened = EagleModel(bundle_of_sessions(bundle, manifest, sessions, CONTEXT, backend="tensorrt"))
        caches: tuple[Any, ...] = (bundle_in(opened).target.cache, opened.head.cache)
        for session, cache in zip(sessions, caches, strict=True):
            session.warm(cache, lambda done, total: None)
        return opened

    return model


@pytest.mark.parametrize("kind", [*HEADS, "deepspec"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cycle_keeps_to_its_budget(
    kind: str, temperature: float, model_on_gpu: Callable[[str], EagleModel], prompts: list[list[int]]
) -> None:
    settings: dict[str, Any] = {"temperature": temperature, "seed": 1, "max_new_tokens": 60, "ignore_eos": True}
    with model_on_gpu(kind) as model:
        model.generate(prompts[0], **settings, **DYNAMIC)  # takes the memory for rows, which later ones use again
        before = model.counters()
        cycles: list[Cycle] = []
        model.generate(prompts[0], **settings, **DYNAMIC, on_cycle=cycles.append)
        after = model.counters()
        assert before is not None and after is not None
        work, count = after.since(before), len(cycles)
        vocab, head = model.manifest.target.vocab_size, model.manifest.head
    assert count > 5 and head is not None
    scores = 0 if head.block is None else head.block.size * head.draft_vocab_size * 4  # which transitions change
    filled = 0 if head.block is None else 2 * head.num_layers  # arrays of keys and values, copied one by one
    moved = sum(cycle.step.path[-1] >= len(cycle.step.path) for cycle in cycles)
    # Beyond the cycles: the prompt's forward pass, its wait, and the whole row of its last token.
    fallen_back = work.synchronisations - 2 * count - 2
    print(f"{kind}, temperature {temperature}: {work} in {count} cycles, {fallen_back} whole rows")
    assert 0 <= fallen_back <= (0 if temperature == 0 else count // 4), "two waits, but for whole rows"
    assert work.engine_calls == 1 + 2 * count + moved, "one drafts, one verifies, one moves rows if any moves"
    assert work.bytes_down <= (DOWN[temperature] + scores) * count + vocab * 4 * (1 + fallen_back)
    assert work.device_copies <= 2 + (5 + filled) * count, "features in, keys and values of both, features kept"
    assert work.allocations == 0 and work.shapes == 0, "memory is reserved, and shapes are specialised, at load"
    assert work.graph_launches == work.engine_calls


def test_plain_decoding_takes_one_call_a_token(
    model_on_gpu: Callable[[str], EagleModel], prompts: list[list[int]]
) -> None:
    with model_on_gpu("eagle1") as model:
        before = model.counters()
        tokens = model.generate(prompts[0], method="vanilla", max_new_tokens=30, ignore_eos=True).token_ids
        after = model.counters()
    assert before is not None and after is not None
    work = after.since(before)
    assert work.engine_calls == len(tokens) and work.synchronisations == 1 + len(tokens)
    assert work.bytes_down < 2_000 * len(tokens)


def test_penalties_at_temperature_0_fetch_no_rows(
    model_on_gpu: Callable[[str], EagleModel], prompts: list[list[int]]
) -> None:
    """Where the highest logit may not be the token, more candidates are copied, as at a temperature above 0."""
    settings: dict[str, Any] = {"repetition_penalty": 1.3, "logit_bias": {7: 2.0}, "max_new_tokens": 40}
    with model_on_gpu("eagle1") as model:
        before = model.counters()
        cycles: list[Cycle] = []
        model.generate(prompts[0], ignore_eos=True, **settings, **DYNAMIC, on_cycle=cycles.append)
        after = model.counters()
    assert before is not None and after is not None
    assert after.since(before).synchronisations == 2 + 2 * len(cycles)
