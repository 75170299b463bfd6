"""Multi-token-prediction layers: drafts of bundles equal those of the producers' modules, whatever the layout, and what
cannot be expressed is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3_code

from conftest import GOLDEN
from eagle_calib.calibrate import calibrate
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.checking import certificate
from eagle_export.checking.head_check import HeadCheck
from eagle_export.commands import cli
from eagle_export.graphs.eager import eager_head, eager_weights, read_rows
from eagle_export.graphs.pair import HeadPart, build_graphs, left_out_note, open_pair
from eagle_export.heads.eagle1 import PredictionHead
from eagle_export.inspection.report import inspect
from eagle_export.reading.families.source import load_source
from eagle_export.recording.source_text import Written, text_starts
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import DTYPE_BITS, read_manifest
from eagle_runtime.opening.exact_rows import equal_rows
from eagle_runtime.text.tokenizer import Text
from eagle_tools.grow.shape import GrowError, Shape
from eagle_train.config import TrainConfig
from eagle_train.errors import TrainError
from eagle_train.head import read_head
from eagle_train.target import FrozenTarget
from greedy_texts import check_head, own_text
from grow import grow
from insides import bundle_in
from mtp_drafts import PROMPT, assert_drafts
from mtp_writers import (
    WRITERS,
    Tensors,
    mimo,
    random_layer,
    read_folder,
    speculators,
    swapped,
    trained_layer,
    write_folder,
)
from tiny_heads import build_head

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2, which is what MiMo's target is."""
    torch.manual_seed(2)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    folder = tmp_path_factory.mktemp("mtp") / "qwen2"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def layer(target: Path) -> Tensors:
    return random_layer(read_folder(target)[1])


@pytest.fixture(scope="module")
def checkpoint(target: Path, layer: Tensors) -> Path:
    """A MiMo."""
    return mimo(target, layer, target.with_name("mimo"))


@pytest.fixture(scope="module")
def bundle_of(checkpoint: Path) -> Callable[[str], Path]:
    """precision -> bundle of the MiMo, drafting with its own layer."""

    def bundle(precision: str) -> Path:
        folder = checkpoint.with_name(precision)
        if not folder.exists():
            export(checkpoint, checkpoint, folder, Settings(precision=precision, certify=False, draft_top_k=10))
        return folder

    return bundle


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random Qwen3, and a layer for it in a folder of speculators, whose config is a difference from the defaults of
    transformers (src/speculators/models/mtp/config.py, serialize_transformer_config)."""
    torch.manual_seed(4)
    config = Qwen3Config(**SIZES, head_dim=16)
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.normal_(parameter, 1, 0.3)
    folder = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(folder / "target")
    layer = random_layer(config.to_dict(), bias=False)
    layer |= {f"self_attn.{part}_norm.weight": torch.linspace(0.5, 1.5, 16) for part in "qk"}
    head = speculators(folder / "target", layer, folder / "head")
    tensors, stated = read_folder(head)
    write_folder(head, tensors, stated | {"transformer_layer_config": config.to_diff_dict()})
    return folder / "target", head


class MiMoLayer(nn.Module):
    """What modeling_mimo.py of XiaomiMiMo/MiMo (MiMoMTPLayers) says in equations, with transformers' own attention
    and MLP, as there; position 0 as in vllm/model_executor/models/mimo_mtp.py."""

    def __init__(self, config: Any, layer: Tensors) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        norms = (qwen2.Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(5))
        self.token_layernorm, self.hidden_layernorm, self.final_layernorm, *inner = norms
        self.input_layernorm, self.post_attention_layernorm = inner
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn, self.mlp = qwen2.Qwen2Attention(config, 0), qwen2.Qwen2MLP(config)
        self.load_state_dict(layer)
        self.rotary = qwen2.Qwen2RotaryEmbedding(config)

    @torch.no_grad()
    def forward(self, embeddings: Tensor, previous: Tensor) -> Tensor:
        """embeddings [1, T, H] of the tokens after those whose hidden states [1, T, H] are `previous`."""
        count = embeddings.shape[1]
        embeddings = embeddings.clone()
        embeddings[:, 0] = 0
        x = torch.cat([self.hidden_layernorm(previous), self.token_layernorm(embeddings)], -1)
        x = self.input_proj(x)
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        tables = self.rotary(x, torch.arange(count)[None])
        x = x + self.self_attn(self.input_layernorm(x), position_embeddings=tables, attention_mask=mask)[0]
        x = x + self.mlp(self.post_attention_layernorm(x))
        out: Tensor = self.final_layernorm(x)
        return out


class SpeculatorsLayer(nn.Module):
    """What vllm-project/speculators, src/speculators/models/mtp/model_definitions.py (MTPLayerMixin on transformers'
    Qwen3DecoderLayer) says in equations."""

    def __init__(self, config: Any, folder: Path) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        layer = {name.removeprefix("mtp_layers.0."): tensor for name, tensor in read_folder(folder)[0].items()}
        norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        self.gains = {name: layer.pop(f"{name}.weight") for name in norms}
        self.fc, self.eps = layer.pop("input_proj.weight"), config.rms_norm_eps
        self.block, self.rotary = qwen3_code.Qwen3DecoderLayer(config, 0), qwen3_code.Qwen3RotaryEmbedding(config)
        self.block.load_state_dict(layer)

    @torch.no_grad()
    def forward(self, embeddings: Tensor, previous: Tensor) -> Tensor:
        """As MiMoLayer."""

        def norm(x: Tensor, name: str) -> Tensor:
            normed: Tensor = x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.gains[name]
            return normed

        count = embeddings.shape[1]
        x = torch.cat([norm(embeddings, "token_layernorm"), norm(previous, "hidden_layernorm")], -1) @ self.fc.T
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        positions = torch.arange(count)[None]
        x = self.block(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
        return norm(x[0] if isinstance(x, tuple) else x, "final_layernorm")


def test_drafts_of_mimo_equal_its_own_module(bundle_of: Callable[[str], Path], target: Path, layer: Tensors) -> None:
    source = Qwen2ForCausalLM.from_pretrained(target).eval()
    assert_drafts(bundle_of("fp32"), source, MiMoLayer(source.config, layer))


def test_drafts_of_speculators_equal_its_own_module(qwen3: tuple[Path, Path], tmp_path: Path) -> None:
    """Queries and keys are normalised, and heads are wider than the model divided by their number."""
    target, head = qwen3
    done = export(target, head, tmp_path / "bundle", Settings(certify=False, draft_top_k=10))
    source = Qwen3ForCausalLM.from_pretrained(target).eval()
    assert_drafts(done.bundle, source, SpeculatorsLayer(source.config, head))


@pytest.mark.parametrize("precision", ["fp32", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_drafts_change_no_token_and_no_bit(precision: str, bundle_of: Callable[[str], Path]) -> None:
    prompt = np.random.default_rng(5).integers(2, 64, 90).tolist()
    with EagleModel.load(bundle_of(precision), threads=1) as model:
        assert model.manifest.head is not None and model.manifest.head.kind == "mtp"
        ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
        drafts: list[dict[str, Any]] = [{}, {"tree": "dynamic"}, {"tree": "chain"}, {"method": "eagle+lookup"}]
        for settings in ways:
            plain = model.generate(prompt, method="vanilla", max_new_tokens=60, **settings)
            for more in drafts:
                drafted = model.generate(prompt, max_new_tokens=60, **{"method": "eagle", **more, **settings})
                assert drafted.token_ids == plain.token_ids
        assert precision == "fp32" or equal_rows(bundle_in(model).target)


def test_layers_of_all_producers_are_the_same_head(target: Path, layer: Tensors, tmp_path: Path) -> None:
    """Written from one layer, they differ in the order of fc's columns and in the first row's token alone."""
    llama, config = read_folder(target)
    plain = write_folder(tmp_path / "qwen2", llama, config)
    reference = open_pair(plain, mimo(plain, layer, tmp_path / "mimo")).head
    assert reference is not None and reference.config.hidden_first and reference.config.masks_first
    for producer, write in WRITERS.items():
        folder = write(plain, layer, tmp_path / producer.replace(" ", "_"))
        source = plain if producer == "speculators MTP" else folder
        pair = open_pair(source, folder)
        part = pair.head
        assert part is not None and part.layout.producer == producer
        assert (pair.left_out, part.own_embedding, part.d2t) == (0, False, None)
        own, theirs = (replace(each.config, hidden_first=True, masks_first=True, rope={}) for each in (part, reference))
        assert own == theirs
        borrowed = {"embed_tokens.weight", "lm_head.weight"}
        names = set(build_head(part.config).state_dict()) - borrowed
        assert names == set(part.checkpoint.tensors) - borrowed
        for name in names:
            tensor, same = (each.checkpoint.tensors[name].read() for each in (part, reference))
            if name == "fc.weight" and not part.config.hidden_first:
                tensor = swapped(tensor)
            assert torch.equal(tensor, same), (producer, name)
        torch.testing.assert_close(eager_output(part, source), eager_output(reference, source))


def eager_output(part: HeadPart, source: Path) -> Tensor:
    """Hidden states of six rows, the first row's token left out."""
    config = replace(part.config, masks_first=True)
    head = eager_head(config, eager_weights(part, load_source(source)))
    assert isinstance(head, PredictionHead)
    features = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return read_rows(head, config, torch.arange(6)[None] + 7, features)[0]


Damage = Callable[[Tensors, dict[str, Any]], object]
MTP = "model.mtp_layers.0."
REFUSALS: dict[str, tuple[str, Damage, str]] = {
    "final norm dropped": (
        "MiMo MTP",
        lambda tensors, config: tensors.pop(f"{MTP}final_layernorm.weight"),
        r"tensor 'model\.mtp_layers\.0\.final_layernorm\.weight' is missing from its multi-token-prediction layer",
    ),
    "a norm dropped, DeepSeek": (
        "DeepSeek MTP",
        lambda tensors, config: tensors.pop("model.layers.3.hnorm.weight"),
        r"tensor 'model\.layers\.3\.hnorm\.weight' is missing",
    ),
    "attention dropped": (
        "Qwen MTP",
        lambda tensors, config: tensors.pop("mtp.layers.0.self_attn.o_proj.weight"),
        r"tensor 'layers\.0\.self_attn\.o_proj\.weight' is missing",
    ),
    "left over": (
        "speculators MTP",
        lambda tensors, config: tensors.update({"masked_embedding.centroids.weight": torch.ones(2)}),
        r"'masked_embedding\.centroids\.weight' is not used",
    ),
    "left over in the layer": (
        "MiMo MTP",
        lambda tensors, config: tensors.update({f"{MTP}gate.weight": torch.ones(2)}),
        r"'model\.mtp_layers\.0\.gate\.weight' is not used",
    ),
    "another LM head": (
        "DeepSeek MTP",
        lambda tensors, config: tensors["model.layers.3.shared_head.head.weight"].add_(1),
        r"'model\.layers\.3\.shared_head\.head\.weight' is not the target's",
    ),
    "experts": (
        "Qwen MTP",
        lambda tensors, config: tensors.update({"mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}),
        r"'mtp\.layers\.0\.mlp\.experts\.0\.up_proj\.weight': it is a layer with a mixture of experts",
    ),
    "latent attention": (
        "DeepSeek MTP",
        lambda tensors, config: tensors.update(
            {"model.layers.3.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}
        ),
        r"'model\.layers\.3\.self_attn\.kv_a_proj_with_mqa\.weight': it is a head with latent attention",
    ),
    "linear attention": (
        "Qwen MTP",
        lambda tensors, config: tensors.update({"mtp.layers.0.linear_attn.in_proj_qkvz.weight": torch.ones(2, 2)}),
        r"'mtp\.layers\.0\.linear_attn\.in_proj_qkvz\.weight': it is a layer with linear attention",
    ),
    "gated attention": (
        "Qwen MTP",
        lambda tensors, config: tensors.update({"mtp.layers.0.self_attn.q_proj.weight": torch.ones(64, 32)}),
        r"do not fit projections of 64 and 16 rows",
    ),
    "another kind of layer": (
        "speculators MTP",
        lambda tensors, config: config["transformer_layer_config"].update(model_type="qwen3_5_text"),
        r"of type 'qwen3_5_text', but only llama, qwen2, qwen3, mimo layers are known",
    ),
    "a target with another kind of layer": (
        "MiMo MTP",
        lambda tensors, config: config.update(model_type="gemma"),
        r"a multi-token-prediction layer of a model of type 'gemma' is not known",
    ),
    "another width": (
        "speculators MTP",
        lambda tensors, config: tensors.update({"mtp_layers.0.input_proj.weight": torch.ones(16, 32)}),
        r"fc\.weight has shape \[16, 32\]",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_by_name(case: str, target: Path, layer: Tensors, tmp_path: Path) -> None:
    producer, damage, message = REFUSALS[case]
    folder = WRITERS[producer](target, layer, tmp_path / "head")
    tensors, config = read_folder(folder)
    damage(tensors, config)
    write_folder(folder, tensors, config)
    with pytest.raises(ExportError, match=message) as refusal:
        build_graphs(open_pair(target, folder), "fp32", 8)
    assert "\n" not in str(refusal.value)


def test_a_target_alone_leaves_its_layers_out_and_says_so(
    checkpoint: Path, layer: Tensors, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, config = read_folder(checkpoint)
    more = {f"model.mtp_layers.1.{name}": tensor for name, tensor in layer.items()}
    folder = write_folder(tmp_path / "two", tensors | more, config | {"num_nextn_predict_layers": 2})
    alone = open_pair(folder, None)
    note = f"{folder} has a multi-token-prediction layer, which the bundle leaves out; eagle-export {folder} {folder}"
    assert (alone.left_out, left_out_note(alone)) == (2, f"{note} drafts with it")
    drafting = open_pair(folder, folder)
    assert drafting.left_out == 1 and "the first drafts, fed with its own output" in (left_out_note(drafting) or "")
    assert left_out_note(open_pair(checkpoint, checkpoint)) is None
    assert cli.main([str(checkpoint), "-o", str(tmp_path / "bundle"), "--no-certificate"]) == 0
    printed = capsys.readouterr()
    assert "multi-token-prediction layer, which the bundle leaves out" in printed.err
    assert "no draft head" in printed.out
    weights = read_manifest(tmp_path / "bundle").target.graph.weights
    assert set(tensors) & set(weights) == {name for name in tensors if "mtp_layers" not in name}
    assert not any("mtp" in name for name in weights)


def test_inspect_names_the_layer_and_how_to_use_it(
    checkpoint: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["inspect", str(checkpoint), str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert (
        f"note: it has a multi-token-prediction layer (MiMo MTP); eagle-export {checkpoint} {checkpoint} drafts with it"
    ) in printed
    assert "Multi-token prediction in the layout of MiMo MTP, 0.0 M parameters" in printed
    assert "fits the target" in printed
    report = inspect(str(checkpoint), str(checkpoint))
    assert report.head is not None and report.head.parameters == sum(
        tensor.numel() for name, tensor in read_folder(checkpoint)[0].items() if "mtp_layers" in name
    )
    assert report.target.parameters == inspect(str(target), None).target.parameters
    tensors, config = read_folder(checkpoint)
    tensors[f"{MTP}mlp.experts.0.up_proj.weight"] = torch.ones(2, 2)
    (note,) = inspect(str(write_folder(tmp_path / "experts", tensors, config)), None).target.notes
    assert "it has a multi-token-prediction layer, which cannot draft: " in note and "a mixture of experts" in note


@pytest.mark.parametrize("precision", ["fp32", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_sizes_are_those_of_exports(precision: str, bundle_of: Callable[[str], Path], checkpoint: Path) -> None:
    weights = read_manifest(bundle_of(precision)).models["draft"].graph.weights
    stored = sum(
        prod(map(int, each.shape)) * DTYPE_BITS[each.dtype] / 8 for name, each in weights.items() if "." in name
    )
    needs = inspect(str(checkpoint), str(checkpoint)).needs
    (need,) = (each for each in needs if (each.backend, each.precision) == ("cpu", precision))
    assert need.draft is not None and need.draft.stored == pytest.approx(stored, rel=0.005)


@dataclass
class Trained:
    """The MiMo with a layer that learned its texts. texts: that it generates. layer: see mtp_writers."""

    folder: Path
    model: Any
    texts: list[Written]
    layer: Tensors


@pytest.fixture(scope="module")
def trained(target: Path) -> Trained:
    model = load_source(target)
    starts = text_starts(Text(target), 64, 16, 8, 8, 4096)
    texts = own_text(model, starts, 48, ())
    layer = trained_layer(model, torch.tensor([[*text.start, *text.tokens] for text in texts]))
    return Trained(mimo(target, layer, target.with_name("trained")), model, texts, layer)


def checked(trained: Trained, target: Path, head: Path) -> HeadCheck:
    part = open_pair(target, head).head
    assert part is not None
    return check_head(part, trained.model, trained.texts)


def test_a_layer_that_is_read_as_it_was_trained_passes(trained: Trained) -> None:
    check = checked(trained, trained.folder, trained.folder)
    assert check.share > 0.85 and check.warning() is None
    assert check.best is not None and check.best.gain < 0


def test_inputs_in_the_other_order_are_named(trained: Trained, target: Path, tmp_path: Path) -> None:
    layer = trained.layer | {"input_proj.weight": swapped(trained.layer["input_proj.weight"])}
    folder = mimo(target, layer, tmp_path / "mimo")
    warning = checked(trained, folder, folder).warning()
    assert warning is not None
    assert "with its two inputs in the other order: the file is not written as MiMo MTP writes its own" in warning


def test_another_rope_theta_is_named(trained: Trained, tmp_path: Path) -> None:
    folder = speculators(trained.folder, trained.layer, tmp_path / "head")
    tensors, config = read_folder(folder)
    config["transformer_layer_config"]["rope_parameters"]["rope_theta"] = 100.0
    warning = checked(trained, trained.folder, write_folder(folder, tensors, config)).warning()
    assert warning is not None and "rope_theta 640000: config.json does not say" in warning


def test_an_export_is_checked_and_certified(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the source runs layer by layer."""
    done = export(trained.folder, trained.folder, tmp_path / "bundle")
    assert done.manifest.head is not None and done.manifest.head.kind == "mtp"
    assert done.head_check is not None and done.head_check.share > 0.85
    assert done.manifest.certificate is not None and done.manifest.certificate.tau > 1.3
    assert not any("head" in warning for warning in done.warnings)

    asked: list[int] = []

    def refuse(needed: int) -> None:
        asked.append(needed)
        if len(asked) == 1:  # for the whole source; then one layer of it has room
            raise ExportError("comparing takes 40.0 GB of memory and 3.0 GB are free")

    monkeypatch.setattr(certificate, "check_memory", refuse)
    pair = open_pair(trained.folder, trained.folder)
    layered = certificate.compare_with_source(pair.target, done.bundle, read_manifest(done.bundle), pair.head)
    assert layered.certificate.tau == done.manifest.certificate.tau
    texts = [Written(list(each.prompt), list(each.continuation)) for each in layered.certificate.prompts]
    assert pair.head is not None and layered.head is not None
    whole = check_head(pair.head, trained.model, [text for text in texts if len(text.tokens) > 1])
    assert (layered.head.rows, layered.head.share) == (whole.rows, whole.share)


def test_what_changes_or_trains_heads_refuses_a_layer_by_name(tmp_path: Path) -> None:
    target = GOLDEN / "target"
    head = speculators(target, random_layer(read_folder(target)[1], bias=False), tmp_path / "head")
    with pytest.raises(TrainError, match="multi-token prediction layer, which is not trained here"):
        read_head(head, FrozenTarget(target, torch.device("cpu")), TrainConfig("eagle1", steps=1))
    with pytest.raises(GrowError, match="only EAGLE and block heads are grown"):
        grow(target, [head], tmp_path / "grown", Shape(8, 64, 4, 2, 16, 160))


@pytest.mark.parametrize("settings", [{"precision": "int8-static"}, {"precision": "int8", "draft_vocab": 40}], ids=str)
def test_a_calibration_of_the_pair_serves_its_own_layer(
    settings: dict[str, Any], bundle_of: Callable[[str], Path], checkpoint: Path, tmp_path: Path
) -> None:
    """Its inputs have the names of the head's tensors, and its borrowed LM head is trimmed to frequent tokens."""
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"ids": PROMPT * (2 + count)}) + "\n" for count in range(4)))
    calibrate(bundle_of("fp32"), tmp_path / "calibration", data=data, threads=1)
    done = export(
        checkpoint,
        checkpoint,
        tmp_path / "bundle",
        Settings(calibration=tmp_path / "calibration", certify=False, **settings),
    )
    assert done.manifest.head is not None
    assert done.manifest.head.draft_vocab_size == settings.get("draft_vocab", 64)
    with EagleModel.load(done.bundle, threads=1) as model:
        plain = model.generate(PROMPT, method="vanilla", max_new_tokens=40, temperature=0.0)
        assert model.generate(PROMPT, method="eagle", max_new_tokens=40, temperature=0.0).token_ids == plain.token_ids
