"""Grown pairs against the golden pair they were grown from: through transformers, and exported and decoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from conftest import GOLDEN, HEADS
from eagle_export.bundle import export
from eagle_export.graphs.eager import eager_head, eager_weights
from eagle_export.graphs.pair import open_pair
from eagle_export.heads.block import BlockHead, read_blocks
from eagle_export.heads.reading import default_taps
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.core.generate import Cycle
from eagle_tools.grow.axes import grown_taps, place_layers, shares
from eagle_tools.grow.shape import GrowError, Shape
from eagle_train.blocks import block_shape, block_taps
from eagle_train.config import TrainConfig
from eagle_train.head import new_head, save_head
from eagle_train.objective import Vocabulary
from eagle_train.target import FrozenTarget
from grow import grow, main

PAIR = Path(__file__).parents[2] / "tools" / "demo_pair"
TARGET, HEAD_FOLDERS = GOLDEN / "target", [GOLDEN / folder for folder in HEADS.values()]
# The golden target: 8 layers, hidden 64, 4 heads over 2 key/value heads of 16, 160 MLP units, 256 tokens.
WIDER = Shape(8, 256, 8, 4, 16, 640)
DEEPER = Shape(11, 64, 4, 2, 16, 160)
LARGER_HEADS = Shape(8, 72, 12, 4, 32, 160)
UNEVEN = Shape(16, 200, 8, 4, 32, 500)
ALL = Shape(11, 192, 8, 4, 32, 512, vocab=1000, draft_vocab=100)


def logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """[len, V] of all positions, in fp32."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return out


@pytest.mark.parametrize("shape", [WIDER, DEEPER, LARGER_HEADS, UNEVEN, ALL], ids=str)
def test_grown_target_has_the_same_logits(shape: Shape, tmp_path: Path, prompts: list[list[int]]) -> None:
    grow(TARGET, HEAD_FOLDERS, tmp_path, shape, "fp32")
    small, grown = (logits(folder, prompts[0]) for folder in (TARGET, tmp_path / "target"))
    torch.testing.assert_close(grown[:, :256], small, atol=1e-4, rtol=0)
    if shape.vocab:
        assert grown.shape[1] == shape.vocab
        assert grown[:, 256:].max() < small.min() - 50  # probability 0 even in fp64


def test_fp16_represents_the_grown_target_as_exactly_as_the_small_one(tmp_path: Path, prompts: list[list[int]]) -> None:
    rounded, grown = tmp_path / "rounded", tmp_path / "grown"
    model = LlamaForCausalLM.from_pretrained(TARGET, dtype=torch.float16)
    model.save_pretrained(rounded)
    grow(rounded, [GOLDEN / HEADS["eagle3"]], grown, WIDER, "fp16")  # the other has an fp32 embedding of its own
    small, large = (logits(folder, prompts[0]) for folder in (rounded, grown / "target"))
    torch.testing.assert_close(large, small, atol=1e-3, rtol=0)  # weights near 0 lose bits when shared out


@pytest.fixture(scope="module")
def grown_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    grow(TARGET, HEAD_FOLDERS, folder, ALL, "fp32")
    return folder


def test_greedy_tokens_are_the_same_through_transformers(grown_pair: Path, prompts: list[list[int]]) -> None:
    texts = []
    for folder in (TARGET, grown_pair / "target"):
        model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        texts.append(model.generate(torch.tensor(prompts[:1]), max_new_tokens=48, do_sample=False)[0].tolist())
    assert texts[0] == texts[1]
    assert len(texts[0]) > len(prompts[0]) + 40


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_exported_pair_decodes_and_drafts_the_same(
    kind: str,
    grown_pair: Path,
    tmp_path: Path,
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
) -> None:
    export(grown_pair / "target", grown_pair / kind, tmp_path / "bundle", Settings(certify=False))

    def decode(model: EagleModel, prompt: list[int]) -> tuple[tuple[int, ...], list[int]]:
        cycles: list[Cycle] = []
        result = model.generate(
            prompt, max_new_tokens=48, total_token=16, depth=3, draft_top_k=4, on_cycle=cycles.append
        )
        return result.token_ids, [len(cycle.step.tokens) for cycle in cycles]

    with EagleModel.load(tmp_path / "bundle", threads=1) as grown:
        for prompt in prompts:
            tokens, lengths = decode(grown, prompt)
            assert (tokens, lengths) == decode(model_of(kind), prompt)
            assert len(lengths) < len(tokens)  # some drafts were accepted


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_heads_in_int4_draft_no_added_token(kind: str, tmp_path: Path) -> None:
    """Their activations are rounded to int8, in blocks or in all; the constant that keeps added tokens away stays."""
    shape = Shape(8, 512, 4, 2, 64, 480, vocab=5000, draft_vocab=3500)  # twice as wide, with more tokens
    grow(PAIR / "target", [PAIR / kind], tmp_path, shape, "fp32")
    export(
        tmp_path / "target",
        tmp_path / kind,
        tmp_path / "bundle",
        Settings(precision="int4", certify=False, record=False),
    )
    prompt = json.loads((PAIR / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[0])["turns"][0]
    drafted: list[int] = []
    with EagleModel.load(tmp_path / "bundle", threads=1) as model:
        model.generate(
            prompt,
            max_new_tokens=24,
            tree="dynamic",
            on_cycle=lambda cycle: drafted.extend(cycle.tree.tokens[1:].tolist()),
        )
    assert len(drafted) > 200
    assert sum(token >= 4096 for token in drafted) == 0


def test_next_to_nothing_is_zero(tmp_path: Path) -> None:
    """A kernel or a file format that skips zeros must not make the grown pair cheaper than a real one."""
    grow(TARGET, HEAD_FOLDERS, tmp_path, Shape(11, 256, 8, 4, 16, 512), "fp32", shard_bytes=1 << 20)
    for folder in ("target", "eagle1", "eagle3"):
        files = sorted((tmp_path / folder).glob("*.safetensors"))
        index = json.loads((tmp_path / folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        assert sorted({*index["weight_map"].values()}) == [file.name for file in files]
        assert len(files) > 1 and all(file.stat().st_size < 2 << 20 for file in files)
        for file in files:
            for name, tensor in load_file(file).items():
                if tensor.is_floating_point():
                    assert (tensor == 0).float().mean() <= 1 / 256, name  # the golden embedding has one row of zeros


@pytest.fixture(scope="module")
def block_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A block head of the golden target with random weights, in which everything has a say."""
    target = FrozenTarget(TARGET, torch.device("cpu"))
    config = TrainConfig("block", steps=0, block=4, markov_rank=8)
    shape = block_shape(target, config, 40)
    vocabulary = Vocabulary.of(torch.arange(0, 240, 6), 256)
    head = new_head(shape, target, vocabulary, "feature+shifted", 0)
    assert isinstance(head, BlockHead) and head.markov_head is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    folder = tmp_path_factory.mktemp("small") / "block"
    folder.mkdir()
    save_head(folder, head, shape, target, vocabulary)
    return folder


@pytest.mark.parametrize("shape", [WIDER, UNEVEN, ALL], ids=str)
def test_a_grown_block_head_drafts_the_same(
    shape: Shape, block_head: Path, tmp_path: Path, prompts: list[list[int]]
) -> None:
    grow(TARGET, [block_head], tmp_path, shape, "fp32")
    ids = torch.tensor([prompts[0][:24]])

    def drafts(target: Path, folder: Path) -> torch.Tensor:
        model: Any = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
        part = open_pair(target, folder).head
        assert part is not None
        head = eager_head(part.config, eager_weights(part, model))
        assert isinstance(head, BlockHead) and head.markov_head is not None
        states = model(ids, output_hidden_states=True).hidden_states
        taps = [states[tap] for tap in part.config.taps]
        rows = read_blocks(head, part.config, ids, taps, states[-1], torch.tensor([[5, 20]]))
        out: torch.Tensor = head.logits(rows) + head.markov_head(ids[0, 5])
        return out

    with torch.no_grad():
        small, grown = drafts(TARGET, block_head), drafts(tmp_path / "target", tmp_path / "block")
    torch.testing.assert_close(grown[..., :40], small, atol=1e-4, rtol=0)
    assert grown.shape[-1] == (shape.draft_vocab or 40)
    if shape.draft_vocab:
        assert grown[..., 40:].max() < small.min() - 20


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60).map(lambda rest: np.array([*range(6), *rest])))
def test_shares_are_powers_of_two_and_sum_to_one(source: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    weights = shares(source).numpy()
    assert np.array_equal(np.bincount(source, weights), np.ones(6))
    assert np.all(np.frexp(weights)[0] == 0.5)


@given(st.integers(7, 40), st.integers(0, 60))
def test_inserted_layers_leave_the_taps_where_they_were(old: int, inserted: int) -> None:
    placed = place_layers(old, old + inserted)
    assert [layer for layer in placed if layer is not None] == list(range(old))
    for before, after in zip(default_taps(old), default_taps(old + inserted), strict=True):
        assert sum(layer is not None for layer in placed[:after]) == before
    for before, after in zip(block_taps(old), grown_taps(block_taps(old), old, old + inserted), strict=True):
        assert sum(layer is not None for layer in placed[:after]) == before


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape(8, 32, 4, 2, 16, 160), "hidden would be 32"),
        (Shape(7, 64, 4, 2, 16, 160), "layers would be 7"),
        (Shape(8, 64, 4, 2, 24, 160), "not a multiple"),
        (Shape(8, 64, 6, 4, 16, 160), "evenly"),
        (Shape(8, 64, 6, 2, 16, 160), "not a multiple of 6 heads"),
        (Shape(8, 64, 4, 2, 16, 161), "odd"),
        (Shape(8, 64, 4, 2, 16, 160, vocab=200), "vocab would be 200"),
        (Shape(8, 64, 4, 2, 16, 160, vocab=300), "add one"),
        (Shape(8, 128, 4, 2, 16, 160, vocab=300, draft_vocab=100), "adds 56 draft tokens"),
    ],
    ids=str,
)
def test_shapes_that_cannot_hold_the_pair_are_refused(shape: Shape, words: str, tmp_path: Path) -> None:
    with pytest.raises(GrowError, match=words):
        grow(TARGET, HEAD_FOLDERS, tmp_path, shape)
    assert not any(tmp_path.iterdir())


def test_command_writes_the_three_folders(tmp_path: Path) -> None:
    sizes = "--layers 9 --hidden 128 --heads 4 --kv-heads 2 --head-dim 16 --intermediate 160 --vocab 300"
    arguments = [str(TARGET), *map(str, HEAD_FOLDERS), "-o", str(tmp_path / "grown"), *sizes.split()]
    assert main(arguments) == 0
    assert sorted(path.name for path in (tmp_path / "grown").iterdir()) == ["eagle1", "eagle3", "target"]
    config = json.loads((tmp_path / "grown/target/config.json").read_text(encoding="utf-8"))
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (128, 9, 300)
    assert main(arguments) == 2  # it is there already
