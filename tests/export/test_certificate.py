"""The certificate: the source's continuations, figures that get worse with the bundle, and exports without one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from conftest import GOLDEN, HEADS, load_trace
from eagle_calib.replay import GOLDEN_TEXTS, GOLDEN_TOKENS, compare, golden_prompts
from eagle_export.base import memory
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.checking.certificate import compare_with_source
from eagle_export.commands.cli import main
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_runtime import EagleModel
from eagle_runtime.bundle.listed_files import verify_hashes
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Certificate, read_manifest
from eagle_runtime.text.tokenizer import Text
from source_continuations import continuations
from systems import read_tensors


def certificate_of(bundle: Path, source: Path = GOLDEN / "target") -> Certificate:
    return compare_with_source(open_checkpoint(source), bundle, read_manifest(bundle)).certificate


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden target with its tokenizer."""
    folder = tmp_path_factory.mktemp("certificate") / "target"
    shutil.copytree(GOLDEN / "target", folder)
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", folder / "tokenizer.json")
    return folder


def test_continuations_are_those_of_the_recorded_traces(prompts: list[list[int]]) -> None:
    recorded = [row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]
    assert [each.tokens for each in continuations(GOLDEN / "target", prompts, (), 64)] == recorded
    (cut,) = continuations(GOLDEN / "target", prompts[:1], recorded[0][5:6], 64)
    assert cut.tokens == recorded[0][: 1 + recorded[0].index(recorded[0][5])]  # the eos included


def test_stored_rows_are_those_of_one_forward_pass_over_the_text(bundle_of: Callable[..., Path]) -> None:
    model = LlamaForCausalLM.from_pretrained(GOLDEN / "target", local_files_only=True, dtype=torch.float32)
    for golden in certificate_of(bundle_of("eagle1")).prompts:
        with torch.inference_mode():
            logits = model(torch.tensor([golden.prompt + golden.continuation])).logits[0].numpy()
        rows = logits[len(golden.prompt) - 1 : -1]
        assert 1 <= len(golden.continuation) == len(golden.top) <= GOLDEN_TOKENS
        for token, top, row in zip(golden.continuation, golden.top, rows, strict=True):
            assert top.token_ids[0] == token == row.argmax()
            assert top.token_ids == tuple(np.argsort(-row, kind="stable")[:5].tolist())
            np.testing.assert_allclose(top.logits, row[list(top.token_ids)], atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "precision", "kl"),
    [("eagle1", "fp32", 1e-9), ("eagle3", "fp32", 1e-9), ("eagle1", "fp16", 1e-4), ("eagle3", "int8", 1e-2)],
)
def test_figures_of_faithful_bundles(kind: str, precision: str, kl: float, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of(kind, precision)
    certificate = certificate_of(bundle)
    assert certificate.agreement >= (0.98 if precision == "int8" else 1.0)
    assert kl / 1e6 < certificate.kl < kl
    with EagleModel.load(bundle, threads=1) as model:
        stats = [
            model.generate(list(g.prompt), tree="dynamic", max_new_tokens=GOLDEN_TOKENS).usage
            for g in certificate.prompts
        ]
        assert compare(model, certificate.prompts).agreement == pytest.approx(certificate.agreement, abs=1e-6)
    tau = sum(s.new_tokens - 1 for s in stats) / sum(s.target_passes for s in stats)
    assert certificate.tau == round(tau, 4) > 1.5


def test_a_bundle_of_another_model_has_worse_figures(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """One matrix of the source differs, as after an export with a mixed-up weight."""
    other = tmp_path / "target"
    shutil.copytree(GOLDEN / "target", other)
    tensors = read_tensors(other / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"] *= 3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    certificate = certificate_of(bundle_of("eagle1"), other)
    assert certificate.agreement < 0.95
    assert certificate.kl > 0.01


def test_the_command_prints_and_writes_it(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    assert main([str(target), str(GOLDEN / HEADS["eagle1"]), "-o", str(bundle), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    manifest = read_manifest(bundle)
    verify_hashes(bundle, manifest)
    certificate = manifest.certificate
    assert certificate is not None and err == ""
    figures = {"agreement": certificate.agreement, "kl": certificate.kl, "tau": certificate.tau}
    limits = {"limits": {"agreement": 0.99, "kl": 1e-5}, "within_limits": True}
    assert report["certificate"] == figures | limits
    assert [list(golden.prompt) for golden in certificate.prompts] == [
        Text(target).encode(text) for text in GOLDEN_TEXTS
    ]
    assert certificate.agreement == 1


def test_an_export_without_a_certificate(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = tmp_path / "bundle"
    assert main([str(target), str(GOLDEN / HEADS["eagle1"]), "-o", str(bundle), "--no-certificate"]) == 0
    out, err = capsys.readouterr()
    assert "agreement" not in out and err == ""
    assert read_manifest(bundle).certificate is None


def test_a_machine_that_is_too_small_exports_with_a_warning(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1_000_000)
    done = export(target, GOLDEN / HEADS["eagle1"], tmp_path / "bundle")
    assert done.manifest.certificate is None and done.manifest == read_manifest(done.bundle)
    (warning,) = done.warnings
    assert warning.startswith("the bundle has no certificate: ") and "0.0 GB are free" in warning


def test_no_engine_no_certificate(bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of("eagle1")
    monkeypatch.delitem(sys.modules, "eagle_runtime.ort.library", raising=False)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ExportError, match="onnxruntime is not installed"):
        certificate_of(bundle)


def test_a_bundle_that_does_not_run(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle_of("eagle1"), bundle)
    (bundle / "draft/model.onnx").write_bytes(b"")
    with pytest.raises(ExportError, match="the bundle does not run here"):
        certificate_of(bundle)


def test_weights_that_are_not_finite(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    tensors = load_file(GOLDEN / "target/model.safetensors")
    tensors["model.norm.weight"][0] = torch.inf
    shutil.copytree(GOLDEN / "target", tmp_path / "target")
    save_file(tensors, tmp_path / "target/model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match="not finite"):
        certificate_of(bundle_of("eagle1"), tmp_path / "target")


@pytest.mark.parametrize(("context", "prompt", "continuation"), [(40, 16, 24), (20, 10, 10), (3, 1, 2)])
def test_a_short_context(
    context: int, prompt: int, continuation: int, bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle"))
    data = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    data["target"]["context"] = context
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    certificate = certificate_of(bundle)
    assert {len(golden.prompt) for golden in certificate.prompts} == {prompt}
    assert max(len(golden.continuation) for golden in certificate.prompts) == continuation
    assert certificate.agreement == 1
    data["target"]["context"] = 1
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(ExportError, match="a context of 1 tokens has no room"):
        certificate_of(bundle)


def test_golden_prompts_fit_any_model(target: Path, tmp_path: Path) -> None:
    words, none = Text(target), Text(tmp_path)
    assert golden_prompts(words, 256, 2048)[0] == words.encode(GOLDEN_TEXTS[0])
    assert max(map(len, golden_prompts(words, 256, 60))) == 30
    for vocab in (2, 100):  # the tokenizer has more ids than the model
        ids = golden_prompts(words, vocab, 2048)
        assert ids == golden_prompts(none, vocab, 2048)
        assert len(ids) == 4 and max(map(max, ids)) < vocab
