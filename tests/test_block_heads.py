"""Block heads from checkpoint to tokens: the graphs compute what the torch module does, the target's logits stay the
same, and what is drafted never changes what is emitted."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from conftest import GOLDEN
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.eager import eager_head, eager_weights, read_block_rows
from eagle_export.graphs.pair import open_pair
from eagle_export.heads.block import BlockHead
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.base.tree import node_depths
from eagle_runtime.core.generate import Cycle
from eagle_runtime.core.head import Proposal
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.block_head import BlockHead as RuntimeHead
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.cost_model import Costs, Timings
from insides import bundle_in
from machine_fake import FixedCosts

ROWS = 6
CONFIG = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "llama",
    "block_size": ROWS,
    "sample_from_anchor": True,
    "causal": True,
    "target_layer_ids": [1, 3, 4],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "hidden_size": 64,
    "vocab_size": 256,
    "rope_theta": 10000.0,
}
VARIANTS: dict[str, tuple[dict[str, object], int]] = {  # settings, rank of the transitions
    "dspark": ({}, 8),
    "state": ({}, 8),  # as dspark, but all rows read the target's last state too
    "dflash": ({"architectures": ["DFlashDraftModel"], "sample_from_anchor": False, "causal": False}, 0),
}


@pytest.fixture(scope="module", params=list(VARIANTS))
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a block head with random weights that says something of the target: its LM head is the target's."""
    folder = tmp_path_factory.mktemp(request.param)
    settings, rank = VARIANTS[request.param]
    write_head(folder, settings, rank, torch.Generator().manual_seed(3), reads_state=request.param == "state")
    return folder


def write_head(
    folder: Path, settings: dict[str, object], rank: int, rng: torch.Generator, *, reads_state: bool = False
) -> None:
    own = rank > 0  # a mask and an LM head of its own
    shapes = {"fc.weight": (64, 192), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for layer in range(2):
        at = f"layers.{layer}"
        shapes |= {f"{at}.{name}.weight": (64,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (64, 64) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (32, 64) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (96, 64) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (64, 96)
    if own:
        shapes |= {"mask_embedding": (1, 1, 64), "lm_head.weight": (256, 64)}
        shapes |= {"input_fc.weight": (64, 128)} if reads_state else {}
        shapes |= {f"markov_head.markov_w{number}.weight": (256, rank) for number in (1, 2)}
    tensors = {name: torch.randn(shape, generator=rng) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    tensors |= {name: 1 + 0.1 * value for name, value in tensors.items() if "norm" in name}
    save_file(tensors, folder / "model.safetensors")
    mask = {} if own else {"mask_token_id": 7}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "markov_rank": rank, **mask, **settings}))


@pytest.fixture(scope="module")
def model(head: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagleModel]:
    bundle = tmp_path_factory.mktemp("block") / "bundle"
    export(GOLDEN / "target", head, bundle, Settings(precision="fp32", certify=False))
    with EagleModel.load(bundle, threads=1) as opened:
        yield opened


def test_what_is_read_ahead_counts_as_drafted(model: EagleModel, prompts: list[list[int]]) -> None:
    """The proposal after tokens that follow the root, and those below it, are the same whether these tokens were fed as
    a chain or read ahead."""
    runtime, text, ahead = bundle_in(model).head, prompts[0], [40, 41]
    assert isinstance(runtime, RuntimeHead) and len(ahead) <= runtime.most_ahead
    _, features = bundle_in(model).target.prefill(text[:-1])

    def fed(tokens: list[int], proposal: Proposal) -> list[Proposal]:
        children = []
        for depth, token in enumerate(tokens):
            proposal = runtime.feed(np.array([token]), proposal.hidden[:1], np.array([depth - 1]), 0, depth)
            children.append(proposal)
        return children

    def first(read: Callable[[], Proposal]) -> Proposal:
        runtime.truncate(0)
        runtime.note(features)
        return read()

    wanted = fed([*ahead, 42], first(lambda: runtime.catch_up(text)))[1:]
    read = first(lambda: runtime.read_ahead(text, ahead))
    for one, other in zip([read, *fed([42], read)], wanted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-6)
        assert one.position == other.position


def test_drafts_are_those_of_the_torch_module(head: Path, model: EagleModel, prompts: list[list[int]]) -> None:
    """One pass of the runtime's head against the module over the whole text, given the drafted tokens."""
    text = prompts[0]
    pair = open_pair(GOLDEN / "target", head)
    assert pair.head is not None and pair.head.config.block is not None
    source = AutoModelForCausalLM.from_pretrained(GOLDEN / "target", dtype=torch.float32)
    module = eager_head(pair.head.config, eager_weights(pair.head, source))
    assert isinstance(module, BlockHead)
    runtime = bundle_in(model).head
    assert isinstance(runtime, RuntimeHead) and runtime.free_levels
    runtime.truncate(0)
    _, features = bundle_in(model).target.prefill(text[:-1])
    runtime.note(features)
    proposal = runtime.catch_up(text)
    drafted: list[int] = []
    depth, hidden = 0, source(torch.tensor([text]), output_hidden_states=True).hidden_states
    positions = ROWS if pair.head.config.block.anchor else ROWS - 1
    while True:
        with torch.no_grad():
            tokens = torch.tensor([*text, *drafted])
            # States of drafted tokens are not seen by a block that begins before them.
            states = [torch.cat([one, one.new_zeros(1, len(drafted), 64)], 1) for one in hidden]
            wanted = read_block_rows(module, pair.head.config, tokens, states, torch.tensor([len(text) - 1]))
            scores = wanted[0, depth].log_softmax(-1)
        order = scores.argsort(descending=True, stable=True)[: runtime.top_k].tolist()
        if depth == 0 or module.markov_head is None:  # exact; later ones are, but for what is not a candidate
            assert proposal.tokens[0, :5].tolist() == order[:5]
            np.testing.assert_allclose(proposal.log_probs[0, :5], scores[order[:5]], atol=2e-4)
        else:
            assert proposal.tokens[0, :5].tolist() == order[:5]
            offset = proposal.log_probs[0, :16] - scores[proposal.tokens[0, :16].tolist()].numpy()
            assert np.ptp(offset) < 5e-3 and abs(offset.mean()) < 0.6
        drafted.append(int(proposal.tokens[0, 0]))
        assert proposal.position == len(text) + depth
        proposal = runtime.feed(np.array(drafted[-1:]), proposal.hidden, np.array([depth - 1]), 0, depth)
        depth += 1
        if depth == positions:
            break
    assert proposal.log_probs.max() <= -60  # nothing is proposed after the block's last row
    runtime.truncate(0)


def test_a_pass_of_fewer_rows_drafts_the_same_in_fewer_levels(model: EagleModel, prompts: list[list[int]]) -> None:
    runtime, text = bundle_in(model).head, prompts[0]
    spec = model.manifest.head
    assert isinstance(runtime, RuntimeHead) and spec is not None and spec.block is not None
    if not spec.block.causal:
        assert runtime.row_counts == range(ROWS, ROWS + 1)
        return
    _, features = bundle_in(model).target.prefill(text[:-1])
    drafts = []
    for rows in (None, runtime.row_counts[1]):
        runtime.truncate(0)
        runtime.note(features)
        first = runtime.catch_up(text, rows=rows)
        second, third = (runtime.feed(first.tokens[0, :3], first.hidden, np.full(3, -1), 0, depth) for depth in (0, 1))
        drafts.append((first, second))
        assert (third.log_probs.max() <= -60) == (rows is not None)
    for all_rows, fewer in zip(*drafts, strict=True):
        np.testing.assert_allclose(fewer.log_probs, all_rows.log_probs, atol=1e-4)
        assert (fewer.tokens[:, 0] == all_rows.tokens[:, 0]).all()
    runtime.truncate(0)


def test_trees_sized_by_costs_grow_as_deep_as_the_block(model: EagleModel, prompts: list[list[int]]) -> None:
    flat = Timings((1, 64), (64,), ((1.0, 1.0),))  # so that every level and every node pays
    assert bundle_in(model).head is not None
    drafter = CostAwareDrafter(bundle_in(model).head, FixedCosts(Costs(flat, flat)), AcceptanceStats(), top_k=3)
    cycles: list[Cycle] = []
    result = model.generate(prompts[0], drafter=drafter, max_new_tokens=24, on_cycle=cycles.append)
    assert result.token_ids == model.generate(prompts[0], method="vanilla", max_new_tokens=24).token_ids
    spec = model.manifest.head
    assert spec is not None and spec.block is not None
    deepest = max(int(node_depths(cycle.tree.parents).max()) for cycle in cycles)
    assert deepest == ROWS - (0 if spec.block.anchor else 1)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_the_targets_logits_are_the_same_to_the_bit(
    head: Path, bundle_of: Callable[..., Path], tmp_path: Path, prompts: list[list[int]], precision: str
) -> None:
    export(GOLDEN / "target", head, tmp_path / "bundle", Settings(precision=precision, certify=False))
    with (
        EagleModel.load(tmp_path / "bundle", threads=1) as with_head,
        EagleModel.load(bundle_of("alone", precision), threads=1) as alone,
    ):
        ours, theirs = (np.concatenate(list(each.score(prompts[0]))) for each in (with_head, alone))
        assert np.array_equal(ours, theirs)
        for temperature in (0, 0.7, 1):
            settings: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_new_tokens": 40}
            vanilla = alone.generate(prompts[0], method="vanilla", **settings).token_ids
            for tree in ("dynamic", "static", "chain", "cost-aware"):
                drafted = with_head.generate(prompts[0], method="eagle", tree=tree, **settings)
                assert drafted.token_ids == vanilla, (temperature, tree)
            assert with_head.generate(prompts[0], **settings).token_ids == vanilla


def test_cuda_does_not_run_block_heads(head: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"{head} holds a head of kind block, .* do not run on backend cuda"):
        export(GOLDEN / "target", head, tmp_path / "bundle", Settings(backend="cuda", precision="fp16"))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("wrong", ["nan", "constant", "outside", "random"])
def test_a_broken_head_costs_drafts_alone(
    model: EagleModel, prompts: list[list[int]], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = bundle_in(model).head
    assert isinstance(runtime, RuntimeHead)
    session = runtime._session
    rng = np.random.default_rng(0)

    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(session, name)

        def run(self, feeds: dict[str, object], cache: object) -> dict[str, np.ndarray]:
            out = dict(session.run(feeds, cache))
            for name in ("log_probs", "scores"):
                if name in out and wrong == "nan":
                    out[name] = np.full_like(out[name], np.nan)
                elif name in out and wrong == "random":
                    out[name] = rng.normal(0, 30, out[name].shape).astype(np.float32)
            if wrong == "constant":
                out["token_ids"] = np.full_like(out["token_ids"], 9)
            elif wrong == "outside":
                out["token_ids"] = rng.integers(-(2**62), 2**62, out["token_ids"].shape)
            return out

    vanilla = {
        temperature: model.generate(prompts[1], method="vanilla", temperature=temperature, seed=2, max_new_tokens=30)
        for temperature in (0, 1)
    }
    monkeypatch.setattr(runtime, "_session", Broken())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagleWarning)
        for temperature, plain in vanilla.items():
            for tree in ("dynamic", "cost-aware"):
                drafted = model.generate(
                    prompts[1], method="eagle", tree=tree, temperature=temperature, seed=2, max_new_tokens=30
                )
                assert drafted.token_ids == plain.token_ids, (wrong, temperature, tree)


def test_the_manifest_describes_the_block(head: Path, model: EagleModel) -> None:
    spec = model.manifest.head
    assert spec is not None and spec.block is not None and spec.kind == "block"
    rank = VARIANTS["dspark" if spec.block.transitions else "dflash"][1]
    assert (spec.block.size, spec.block.transitions is not None) == (ROWS, rank > 0)
    assert spec.block.state_size == (64 if head.name.startswith("state") else 0)
    assert spec.feature_size == 2 * 2 * 2 * 16 + spec.block.state_size
    assert dataclasses.asdict(spec)["taps"] == (2, 4, 5)
