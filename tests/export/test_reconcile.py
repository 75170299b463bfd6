"""Where the parts of a checkpoint contradict each other: what counts, and that a note says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import GOLDEN
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair, weight_sources
from eagle_export.inspection.headers import open_headers
from eagle_export.inspection.report import inspect
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD
from eagle_export.reading.families.registry import check_config, family_of, read_config
from eagle_export.reading.families.source import load_source
from eagle_export.reading.families.target import open_target
from eagle_export.writing.pair_checks import unreadable_templates
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel, RequestError
from eagle_runtime.base.files import MANIFEST_NAME
from eagle_runtime.text.tokenizer import Text
from export_workplace import configure, edit, make_target
from systems import read_tensors
from tiny_families import ROWS, save_source

IDS = [5, 7, 200, 33, 7, 5, 90, 41]


def renamed(change: Callable[[str], str]) -> Callable[[dict[str, Tensor]], object]:
    def rename(tensors: dict[str, Tensor]) -> None:
        old = tensors.copy()
        tensors.clear()
        tensors.update({change(name): tensor for name, tensor in old.items()})

    return rename


def test_tied_by_the_config_and_stored_apart(tmp_path: Path) -> None:
    """transformers does not tie then; neither does a bundle, and names with a wrapper are read too."""
    plain = make_target(tmp_path / "plain")
    configure(plain, tie_word_embeddings=True)
    wrapped = shutil.copytree(plain, tmp_path / "wrapped")
    tensors = load_file(plain / "model.safetensors")
    save_file({f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, wrapped / "model.safetensors")
    done = export(wrapped, None, tmp_path / "bundle", Settings(certify=False))
    assert any("'_orig_mod.'" in warning for warning in done.warnings)
    assert any("ties the LM head" in warning and LM_HEAD in warning for warning in done.warnings)
    with torch.no_grad():
        (expected,) = load_source(plain)(torch.tensor([IDS])).logits.numpy()
        assert np.array_equal(load_source(wrapped)(torch.tensor([IDS])).logits[0].numpy(), expected)
    with EagleModel.load(tmp_path / "bundle") as model:
        scored = np.concatenate([rows.copy() for rows in model.score(IDS)])
    assert np.abs(scored - expected).max() < 1e-3


def test_a_copy_of_a_tied_embedding_is_left_out(tmp_path: Path) -> None:
    """As Qwen3-0.6B has one. Headers do not show that it is a copy, and inspect says so."""
    target = make_target(tmp_path / "t", lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].clone()}))
    assert not open_pair(target, None).tied, "its config does not tie it"
    configure(target, tie_word_embeddings=True)
    pair = open_pair(target, None)
    assert pair.tied and pair.config.tie_word_embeddings and not pair.target.notes
    assert weight_sources(pair)["target"][LM_HEAD] == weight_sources(pair)["target"][EMBEDDING]
    source = load_source(target)
    assert source.lm_head.weight is source.model.embed_tokens.weight
    facts = inspect(str(target), None).target
    assert not facts.tied and facts.parameters == pair.target.numbers + 256 * 64
    assert any("compares their values and stores one if they are equal" in note for note in facts.notes)


def test_a_config_ties_as_its_class_does_where_it_says_nothing(tmp_path: Path) -> None:
    save_source(ROWS["Gemma"], tmp_path)
    configure(tmp_path, tie_word_embeddings=None)
    edit(tmp_path, lambda tensors: tensors.update({LM_HEAD: tensors[EMBEDDING].clone()}))
    assert open_pair(tmp_path, None).tied
    edit(tmp_path, lambda tensors: tensors[LM_HEAD].mul_(2))
    pair = open_pair(tmp_path, None)
    assert not pair.tied and not pair.config.tie_word_embeddings and "differs" in pair.target.notes[0]


def test_an_lm_head_that_is_neither_stored_nor_tied(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t", lambda tensors: tensors.pop(LM_HEAD))
    with pytest.raises(ExportError, match="tie_word_embeddings"):
        open_pair(target, None)
    configure(target, tie_word_embeddings=True)
    assert open_pair(target, None).tied


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda name: f"_orig_mod.{name}", "'_orig_mod.'"),
        (lambda name: f"module.{name}", "'module.'"),
        (lambda name: f"base_model.model.{name}", "'base_model.model.'"),
        (lambda name: f"module._orig_mod.{name}", "'module._orig_mod.'"),
        (lambda name: name.replace("layers.1.", "layers.1._fsdp_wrapped_module."), "'_fsdp_wrapped_module.'"),
        (lambda name: name.removeprefix("model."), "'model.'"),
        (lambda name: f"module.{name.removeprefix('model.')}", "'model.'"),
    ],
    ids=["compiled", "parallel", "peft", "both", "within", "no class", "no class, parallel"],
)
def test_names_of_tensors(tmp_path: Path, change: Callable[[str], str], named: str) -> None:
    target = make_target(tmp_path / "t", renamed(change))
    pair = open_pair(target, None)
    assert set(pair.target.tensors) == set(open_target(make_target(tmp_path / "plain")).tensors)
    assert any(named in note for note in pair.target.notes)
    assert open_headers(str(target))[0].notes == pair.target.notes  # as inspect reads it


def test_heads_are_unwrapped_too(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(GOLDEN / "head_eagle1", head)
    tensors = read_tensors(head / "model.safetensors")
    save_file({f"module.{name}": tensor for name, tensor in tensors.items()}, head / "model.safetensors")
    part = open_pair(GOLDEN / "target", head).head
    assert part is not None and set(part.checkpoint.tensors) == set(tensors)


def test_adapters_are_named(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    target = make_target(tmp_path / "t", lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    with pytest.raises(ExportError, match=r"an adapter that is not merged .*lora_A.*merge_and_unload"):
        open_target(target)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "config.json").write_text((target / "config.json").read_text(encoding="utf-8"))
    (folder / "adapter_config.json").write_text("{}")
    save_file({name: torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    with pytest.raises(ExportError, match="an adapter without its model"):
        open_target(folder)
    (folder / "config.json").unlink()  # as PEFT saves one
    with pytest.raises(ExportError, match="an adapter without its model"):
        open_target(folder)


def test_an_adapter_beside_a_whole_model_is_left_out_with_a_warning(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t")
    (target / "adapter_config.json").write_text("{}")
    (note,) = open_target(target).notes
    assert "an adapter lies next to the model" in note and "merge_and_unload" in note


def test_templates_that_cannot_be_read_are_told_at_export(tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", tmp_path / "tokenizer.json")
    chat, tools = tmp_path / "chat_template.jinja", tmp_path / "chat_template.tool_use.jinja"
    assert unreadable_templates(Text(tmp_path)) == []
    chat.write_text("{% if x %}\n{% endfor %}")
    (note,) = unreadable_templates(Text(tmp_path))
    assert note.startswith(f"{chat} is not a template that can be read (line 2: ")
    tools.write_text("{{ messages")
    notes = unreadable_templates(Text(tmp_path))
    assert [str(path) in note for path, note in zip((chat, tools), notes, strict=True)] == [True, True]


def test_tokens_without_rows_are_told_at_export_and_named_in_prompts(tmp_path: Path) -> None:
    """As Gemma-3's text models have one, and models with tokens that were added without new rows."""
    content = json.loads((GOLDEN / "byte_tokenizer.json").read_text(encoding="utf-8"))
    rows = len(content["model"]["vocab"])
    ends = (EMBEDDING, LM_HEAD)
    target = make_target(tmp_path / "t", lambda tensors: tensors.update({n: tensors[n][:rows].clone() for n in ends}))
    configure(target, vocab_size=rows)
    flags = dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False)
    content["added_tokens"].append({"id": rows, "content": "<image>", "special": True, **flags})
    (target / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (target / "chat_template.jinja").write_text("{{")
    done = export(target, None, tmp_path / "bundle", Settings(certify=False))
    assert any("chat_template.jinja is not a template that can be read" in w for w in done.warnings)
    assert any(
        "its tokenizer has the token '<image>' (id 131) for which the model has no row" in w for w in done.warnings
    )
    with (
        EagleModel.load(tmp_path / "bundle") as model,
        pytest.raises(
            RequestError, match=r"the prompt holds '<image>', for which the model has no row \(id 131 of 131\)"
        ),
    ):
        model.generate("an <image> here")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model-Q4_K_M.gguf", r"GGUF files; give the file itself, such as .*model-Q4_K_M\.gguf"),
        ("consolidated.00.pth", "pickled weights"),
        ("onnx/model.onnx", "ONNX graphs of another program"),
        (MANIFEST_NAME, "a finished bundle"),
    ],
)
def test_folders_without_a_checkpoint_are_named_by_what_they_hold(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(ExportError, match=said):
        open_target(tmp_path)


def test_of_pickled_weights_an_unknown_family_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_text("x")
    (tmp_path / "config.json").write_text('{"model_type": "opt"}')
    for refused in (lambda: open_target(tmp_path), lambda: inspect(str(tmp_path), None)):
        with pytest.raises(ExportError, match="model_type is 'opt', but only"):
            refused()
    configure(tmp_path, model_type="llama")
    with pytest.raises(ExportError, match="pickled weights"):
        open_target(tmp_path)


@pytest.mark.parametrize("name", ["qweight", "weight_scale_inv", "weight.absmax", "scales"])
def test_quantised_weights_are_named_where_the_config_says_nothing(tmp_path: Path, name: str) -> None:
    extra = {f"model.layers.0.mlp.up_proj.{name}": torch.zeros(2)}
    target = make_target(tmp_path / "t", lambda tensors: tensors.update(extra))
    with pytest.raises(ExportError, match=rf"quantised already \(tensor 'model.layers.0.mlp.up_proj.{name}'\)"):
        open_target(target)


def test_weights_that_mlx_quantised_are_refused_by_the_config(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t")
    configure(target, quantization={"bits": 4})
    with pytest.raises(ExportError, match="quantised already; export the original"):
        open_pair(target, None)


@pytest.mark.parametrize(
    ("stated", "read"),
    [
        ({"quantization_config": None}, {}),
        ({"quantization_config": {}}, {}),
        ({"pad_token_id": 256}, {"pad_token_id": None}),
        ({"pad_token_id": -1}, {"pad_token_id": None}),
        ({"pad_token_id": 255}, {"pad_token_id": 255}),
        ({"sliding_window": -1}, {}),
        ({"rope_theta": None}, {}),
        ({"rope_scaling": {"type": None, "factor": None}}, {}),
        ({"num_key_value_heads": None, "head_dim": None}, {}),
    ],
    ids=lambda value: "-".join(value) or "nothing",
)
def test_values_that_say_nothing(tmp_path: Path, stated: dict[str, Any], read: dict[str, Any]) -> None:
    target = make_target(tmp_path / "t")
    path = target / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **stated}))
    checkpoint = open_target(target)
    check_config(family_of(checkpoint), checkpoint)
    config = read_config(family_of(checkpoint), checkpoint)
    assert {name: getattr(config, name) for name in read} == read
    assert checkpoint.notes == ()


def test_sizes_that_the_tensors_do_not_have_are_the_configs_fault(tmp_path: Path) -> None:
    target = make_target(tmp_path / "t")
    configure(target, vocab_size=300)
    with pytest.raises(ExportError, match=r"\[256, 64\], but config.json asks for \[300, 64\]"):
        open_pair(target, None)
