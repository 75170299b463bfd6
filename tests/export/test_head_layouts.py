"""Heads in the layouts of all known producers: each is written from the weights of a golden head as its producer's code
writes it (head_writers.py), and read as the same head.

Whatever is left over, missing or contradictory is an error.
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import mtp_writers
from conftest import GOLDEN
from eagle_export.base.errors import ExportError
from eagle_export.graphs.eager import eager_head, eager_weights
from eagle_export.graphs.pair import HeadPart, Pair, build_graphs, open_pair, weight_sources
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.heads.layouts import LAYOUTS
from eagle_export.reading.checkpoint import LM_HEAD
from eagle_export.reading.families.source import load_source
from eagle_runtime.bundle.head import FORMS
from head_writers import (
    TARGET,
    WRITERS,
    Config,
    Head,
    Tensors,
    angelslim,
    golden_head,
    modelopt,
    renamed,
    specforge,
    speculators,
    target_tensor,
    vllm_eagle1,
    vllm_eagle3,
)
from systems import read_tensors
from tiny_heads import build_head


def with_qk_norm(tensors: Tensors, prefix: str) -> Tensors:
    gains = {f"{prefix}self_attn.{part}_norm.weight": torch.linspace(0.5, 1.5, 16) for part in "qk"}
    return {**tensors, **gains}


def official_pair(kind: str) -> Pair:
    return open_pair(TARGET, GOLDEN / {"eagle1": "head_eagle1", "eagle3": "head_eagle3_dv44"}[kind])


def same_weights(one: Pair, other: Pair) -> None:
    """Both graphs have the same parameters under the same names."""
    ours, theirs = weight_sources(one), weight_sources(other)
    for graph, weights in theirs.items():
        assert set(ours[graph]) == set(weights)
        for name, weight in weights.items():
            assert ours[graph][name].name == weight.name
            assert torch.equal(ours[graph][name].source.read(), weight.source.read()), name
    assert one.head is not None and other.head is not None
    assert (one.head.d2t is None) == (other.head.d2t is None)
    assert one.head.d2t is None or other.head.d2t is None or torch.equal(one.head.d2t, other.head.d2t)


def test_an_eagle3_head_that_drafts_all_tokens_may_have_the_targets_lm_head(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(GOLDEN / "head_eagle3_dv44", folder)
    stored = read_tensors(folder / "model.safetensors")
    save_file({n: t for n, t in stored.items() if n not in (LM_HEAD, "d2t", "t2d")}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 256}))
    pair = open_pair(TARGET, folder)
    assert pair.head is not None
    assert (pair.head.config.draft_vocab_size, pair.head.config.borrows_lm_head, pair.head.d2t) == (256, True, None)
    weights = weight_sources(pair)
    assert weights["draft"]["head.lm_head.weight"] == weights["target"][LM_HEAD]
    assert build_graphs(pair, "fp32", 8)["draft"].graph.outputs
    (folder / "config.json").write_text(json.dumps(config))  # a draft vocabulary of 44
    with pytest.raises(ExportError, match=r"tensor 'lm_head.weight' is missing"):
        open_pair(TARGET, folder)


@pytest.mark.parametrize("producer", WRITERS)
def test_a_head_of_each_producer_is_the_official_head(producer: str, tmp_path: Path) -> None:
    kind, write = WRITERS[producer]
    pair, reference = open_pair(TARGET, write(golden_head(kind)).write(tmp_path / "head")), official_pair(kind)
    assert pair.head is not None and reference.head is not None
    assert pair.head.layout.producer == producer
    # rope may be spelt in more ways, but gives the same table
    assert replace(pair.head.config, rope={}) == replace(reference.head.config, rope={})
    ours, theirs = (build_head(part.config).rotary_emb.inv_freq for part in (pair.head, reference.head))
    assert isinstance(ours, Tensor) and isinstance(theirs, Tensor) and torch.equal(ours, theirs)
    same_weights(pair, reference)


def test_every_row_of_the_table_has_a_writer() -> None:
    recurrent = {layout.producer for layout in LAYOUTS if not FORMS[layout.kind].keyless}
    assert recurrent == {*WRITERS, *mtp_writers.WRITERS, "DeepSpec", "transformers"}


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_traces")
def test_a_converted_head_has_the_official_graphs(tmp_path: Path) -> None:
    folder = speculators(golden_head("eagle3")).write(tmp_path / "head")
    ours = build_graphs(open_pair(TARGET, folder), "fp32", 8)
    theirs = build_graphs(official_pair("eagle3"), "fp32", 8)
    for name, graph in theirs.items():
        nodes = [[(node.op_type, [v and v.name for v in node.inputs]) for node in g.graph] for g in (ours[name], graph)]
        assert nodes[0] == nodes[1]
        assert set(ours[name].graph.initializers) == set(graph.graph.initializers)


def deepspec(tensors: Tensors, config: Config) -> Head:
    """deepseek-ai/DeepSpec deepspec/modeling/eagle3/qwen3: five taps named by the outputs of layers, q/k norm, the
    whole vocabulary; the draft's config is a copy of the target's."""
    tensors = with_qk_norm(renamed(tensors, "midlayer.", "layers.0."), "layers.0.")
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    tensors["fc.weight"] = torch.randn(64, 5 * 64) * 0.05
    tensors["lm_head.weight"] = target_tensor("lm_head.weight")
    tensors["embed_tokens.weight"] = target_tensor("model.embed_tokens.weight")
    own = {"target_layer_ids": [0, 1, 3, 4, 5], "ttt_length": 7, "step_loss_decay": 0.8, "num_target_layers": 8}
    config = {key: value for key, value in config.items() if key != "draft_vocab_size"}
    extra = {"model_type": "qwen3", "layer_types": ["full_attention"], "head_dim": 16, "attention_bias": False}
    return Head(tensors, {**config, **own, **extra, "architectures": ["Qwen3Eagle3Model"]})


def test_deepspec_heads_have_five_taps_and_normalised_queries(tmp_path: Path) -> None:
    golden = golden_head("eagle3")
    pair = open_pair(TARGET, deepspec(golden.tensors, golden.config).write(tmp_path / "head"))
    assert pair.head is not None
    assert pair.head.layout.producer == "DeepSpec"
    assert pair.head.config.taps == (1, 2, 4, 5, 6)
    assert pair.head.config.qk_norm
    assert pair.head.d2t is None
    assert not pair.head.own_embedding


@pytest.mark.slow
def test_every_tensor_of_a_deepspec_head_is_used(tmp_path: Path) -> None:
    golden = golden_head("eagle3")
    pair = open_pair(TARGET, deepspec(golden.tensors, golden.config).write(tmp_path / "head"))
    assert set(build_graphs(pair, "fp32", 8)) == {"target", "draft"}


def test_pickled_heads_are_read_as_tensors_alone(tmp_path: Path) -> None:
    head = golden_head("eagle1")
    head.write(tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").unlink()
    for legacy in (False, True):
        path = tmp_path / "head" / "pytorch_model.bin"
        torch.save(head.tensors, path, _use_new_zipfile_serialization=not legacy)
        same_weights(open_pair(TARGET, tmp_path / "head"), official_pair("eagle1"))


class Harmful:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return Path.touch, (Path("touched"),)  # type: ignore[return-value]


def test_pickled_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head = golden_head("eagle1")
    head.write(tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").unlink()
    path = tmp_path / "head" / "pytorch_model.bin"
    for content in (b"", pickle.dumps(Harmful(), protocol=2)):
        if content:
            path.write_bytes(content)
        else:
            torch.save({"a": Harmful()}, path)
        with pytest.raises(ExportError, match=r"pytorch_model\.bin is damaged, or holds more than tensors"):
            open_pair(TARGET, tmp_path / "head")
    assert not (tmp_path / "touched").exists()


def opened(head: Head, folder: Path) -> HeadConfig:
    part = open_pair(TARGET, head.write(folder)).head
    assert part is not None
    return part.config


def test_what_fc_reads_of_normed_taps(tmp_path: Path) -> None:
    head = speculators(golden_head("eagle3"))
    head.config["fc_norm"] = True
    head.tensors |= {f"fc_norm.{tap}.weight": torch.full((64,), tap + 1.0) for tap in range(3)}
    part = open_pair(TARGET, head.write(tmp_path / "head")).head
    assert part is not None
    taps = [torch.randn(1, 5, 64) * scale for scale in (0.1, 1, 10)]
    norms = [tap / (tap.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain for gain, tap in enumerate(taps, 1)]
    model = load_source(TARGET)

    def read(part: HeadPart) -> torch.Tensor:
        head = eager_head(part.config, eager_weights(part, model))
        assert isinstance(head, Eagle3Head)
        return head.fused(taps)

    assert torch.allclose(read(part), torch.cat(norms, -1), atol=1e-5)
    plain = open_pair(TARGET, speculators(golden_head("eagle3")).write(tmp_path / "plain")).head
    assert plain is not None
    assert torch.equal(read(plain), torch.cat(taps, -1))


@pytest.mark.parametrize(
    ("ids", "taps"), [([1, 3, 4], (2, 4, 5)), ([2, 4, 5], (2, 4, 5)), ([3, 4, 6], (4, 5, 7)), (None, (2, 4, 5))]
)
def test_ids_of_specforge_are_outputs_unless_the_first_is_2(
    ids: list[int] | None, taps: tuple[int, ...], tmp_path: Path
) -> None:
    head = specforge(golden_head("eagle3"))
    head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
    assert opened(head, tmp_path / "head").taps == taps


def test_ids_of_speculators_are_inputs_whatever_the_first(tmp_path: Path) -> None:
    head = speculators(golden_head("eagle3"))
    head.config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    assert opened(head, tmp_path / "head").taps == (1, 3, 4)


@pytest.mark.parametrize(
    ("write", "value", "meaning"),
    [
        (specforge, True, "logits"),
        (specforge, None, "logits"),
        (specforge, False, "none"),
        (speculators, False, "logits"),
        (speculators, None, "logits"),
        (speculators, True, "recurrent"),
        (vllm_eagle3, True, "recurrent"),
    ],
)
def test_norm_output_means_what_the_producer_means(
    write: Callable[[Head], Head], value: bool | None, meaning: str, tmp_path: Path
) -> None:
    head = write(golden_head("eagle3"))
    head.config["norm_output"] = value
    assert opened(head, tmp_path / "head").output_norm == meaning


@pytest.mark.parametrize(("value", "normed"), [(True, True), (False, False), (None, False)])
def test_norm_before_residual(value: bool | None, normed: bool, tmp_path: Path) -> None:
    head = speculators(golden_head("eagle3"))
    head.config["norm_before_residual"] = value
    assert opened(head, tmp_path / "head").normed_residual == normed


def test_norms_before_fc(tmp_path: Path) -> None:
    head = speculators(golden_head("eagle3"))
    head.config["fc_norm"] = True
    head.tensors |= {f"fc_norm.{tap}.weight": torch.ones(64) for tap in range(3)}
    assert opened(head, tmp_path / "each").tap_norm == "each"
    head = vllm_eagle3(golden_head("eagle3"))
    head.config["eagle_config"]["norm_before_fc"] = True
    head.tensors["model.input_norm.weight"] = torch.ones(192)
    assert opened(head, tmp_path / "all").tap_norm == "all"


Damage = Callable[[Head], object]
REFUSALS: dict[str, tuple[Callable[[Head], Head], str, Damage, str]] = {
    "bias dropped, config says so": (
        lambda head: head,
        "eagle1",
        lambda h: h.tensors.pop("fc.bias"),
        r"bias is True in config\.json, but tensor 'fc\.bias' is missing",
    ),
    "bias dropped, config silent": (
        lambda head: head,
        "eagle1",
        lambda h: (h.tensors.pop("fc.bias"), h.config.pop("bias")),
        r"tensor 'fc\.bias' is missing, and a config without `bias`",
    ),
    "vLLM's bias dropped": (
        vllm_eagle1,
        "eagle1",
        lambda h: h.tensors.pop("fc.bias"),
        r"bias is True in config\.json",
    ),
    "q bias missing": (
        speculators,
        "eagle3",
        lambda h: h.config["transformer_layer_config"].update(attention_bias=True),
        r"attention_bias is True in config\.json, but tensor 'midlayer\.self_attn\.q_proj\.bias' is missing",
    ),
    "another LM head": (
        vllm_eagle1,
        "eagle1",
        lambda h: h.tensors["lm_head.weight"].add_(1),
        r"'lm_head\.weight' is not the target's",
    ),
    "fc_norm in the file alone": (
        speculators,
        "eagle3",
        lambda h: h.tensors.update({"fc_norm.0.weight": torch.ones(64)}),
        r"fc_norm is False in config\.json, but tensor 'fc_norm\.0\.weight' is there",
    ),
    "input_norm in the config alone": (
        speculators,
        "eagle3",
        lambda h: h.config.update(norm_before_fc=True),
        r"norm_before_fc is True in config\.json, but tensor 'input_norm\.weight' is missing",
    ),
    "norm_output of a producer that has none": (
        angelslim,
        "eagle3",
        lambda h: h.config.update(norm_output=True),
        r"norm_output has two meanings, and AngelSlim",
    ),
    "last layer tapped": (
        speculators,
        "eagle3",
        lambda h: h.config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        r"\[2, 4, 8\] names the output of the last layer",
    ),
    "embedding tapped": (
        speculators,
        "eagle3",
        lambda h: h.config.update(eagle_aux_hidden_state_layer_ids=[0, 4, 6]),
        r"names the target's embedding",
    ),
    "taps out of order": (
        speculators,
        "eagle3",
        lambda h: h.config.update(eagle_aux_hidden_state_layer_ids=[4, 2, 6]),
        r"do not name 3 ascending layers",
    ),
    "two taps": (
        speculators,
        "eagle3",
        lambda h: h.config.update(eagle_aux_hidden_state_layer_ids=[2, 4]),
        r"do not name 3 ascending layers",
    ),
    "another target width": (
        speculators,
        "eagle3",
        lambda h: h.config.update(target_hidden_size=48),
        r"target_hidden_size is 48, but the target's is 64",
    ),
    "draft vocabulary": (
        modelopt,
        "eagle3",
        lambda h: h.config.update(draft_vocab_size=45),
        r"draft_vocab_size is 45, but the tensors have 44",
    ),
    "d2t left out": (modelopt, "eagle3", lambda h: h.tensors.pop("d2t"), r"tensor 'd2t' is missing"),
    "d2t is absolute": (
        specforge,
        "eagle3",
        lambda h: h.tensors["d2t"].add_(torch.arange(44)),
        r"d2t and t2d name different tokens",
    ),
    "head_dim": (modelopt, "eagle3", lambda h: h.config.update(head_dim=32), r"head_dim 32 do not fit"),
    "two layers": (
        modelopt,
        "eagle3",
        lambda h: h.tensors.update({"layers.1.mlp.up_proj.weight": torch.ones(2, 2)}),
        r"an EAGLE-3 head of 2 layers",
    ),
    "quantised": (
        modelopt,
        "eagle3",
        lambda h: h.tensors.update({"fc.weight_scale": torch.ones(1)}),
        r"'fc\.weight_scale': it is a quantised head",
    ),
    "P-EAGLE": (
        specforge,
        "eagle3",
        lambda h: h.tensors.update(mask_hidden=torch.ones(1, 1, 192)),
        r"'mask_hidden': it is a P-EAGLE head",
    ),
    "latent attention": (
        modelopt,
        "eagle3",
        lambda h: h.tensors.update({"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}),
        r"latent attention",
    ),
    "a class of another kind": (
        specforge,
        "eagle3",
        lambda h: h.config.update(architectures=["Qwen3MTPModel"]),
        r"Qwen3MTPModel is not an EAGLE head",
    ),
    "speculators of another kind": (
        speculators,
        "eagle3",
        lambda h: h.config.update(speculators_model_type="mlp_speculator"),
        r"speculators head of type 'mlp_speculator'",
    ),
    "multi-token prediction": (
        lambda head: head,
        "eagle1",
        lambda h: h.tensors.update({"mtp.fc.weight": torch.ones(2, 2)}),
        r"multi-token-prediction layer",
    ),
    "no taps": (
        modelopt,
        "eagle3",
        lambda h: h.config["eagle_config"].update(use_aux_hidden_state=False),
        r"eagle_config\.use_aux_hidden_state is False, a variant",
    ),
    "windowed": (
        speculators,
        "eagle3",
        lambda h: h.config["transformer_layer_config"].update(layer_types=["sliding_attention"]),
        r"only full attention",
    ),
    "another layer type": (
        speculators,
        "eagle3",
        lambda h: h.config["transformer_layer_config"].update(model_type="gemma2"),
        r"of type 'gemma2'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_by_name(case: str, tmp_path: Path) -> None:
    write, kind, damage, message = REFUSALS[case]
    head = write(golden_head(kind))
    damage(head)
    with pytest.raises(ExportError, match=message):
        open_pair(TARGET, head.write(tmp_path / "head"))


def test_what_is_left_over_is_refused_by_name(tmp_path: Path) -> None:
    head = modelopt(golden_head("eagle3"))
    head.tensors["layers.0.mystery.weight"] = torch.ones(2)
    with pytest.raises(ExportError, match=r"tensor 'layers\.0\.mystery\.weight' is not used"):
        build_graphs(open_pair(TARGET, head.write(tmp_path / "head")), "fp32", 8)


def test_eager_heads_of_all_variants_compute(tmp_path: Path) -> None:
    """A variant changes what the head computes; equality with written-out equations is in test_variants.py."""
    base = opened(speculators(golden_head("eagle3")), tmp_path / "head")
    outputs = []
    variants = (base, replace(base, normed_residual=True), replace(base, output_norm="recurrent"))
    for config in (*variants, replace(base, qk_norm=True)):
        torch.manual_seed(0)
        head = build_head(config).eval()
        assert isinstance(head, Eagle3Head)
        features = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(1)) * 3
        empty = torch.zeros(1, 0, config.num_kv_heads, config.head_dim)
        mask = torch.full((1, 1, 4, 4), -torch.inf).triu(1)
        with torch.no_grad():
            hidden, _ = head(torch.arange(4)[None], features, torch.arange(4)[None], mask, [(empty, empty)])
        outputs.append(hidden)
    for index, output in enumerate(outputs[1:]):
        assert not torch.allclose(outputs[0], output), index
