"""A source that runs layer by layer, with its bundle as drafter, gives the certificate of the whole source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import OlmoeConfig, OlmoeForCausalLM

from conftest import GOLDEN, HEADS, load_trace
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.checking import certificate as module
from eagle_export.checking.certificate import compare_with_source
from eagle_export.graphs.pair import open_pair
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_export.reading.families.source import load_source
from eagle_export.recording.layered_continuations import verified_continuations
from eagle_export.recording.source_text import Written
from eagle_runtime.bundle.manifest import read_manifest
from greedy_texts import check_head
from source_continuations import continuations
from systems import read_tensors

DEMO = Path(__file__).parents[2] / "tools" / "demo_pair"


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for the whole source."""
    monkeypatch.setattr(module, "_fits_whole", lambda *_: False)


@pytest.mark.parametrize(
    ("kind", "precision"), [("eagle1", "fp32"), pytest.param("eagle3", "int4", marks=pytest.mark.slow)]
)
def test_the_certificate_is_that_of_the_whole_source(
    kind: str, precision: str, bundle_of: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    source, bundle = open_checkpoint(GOLDEN / "target"), bundle_of(kind, precision)
    whole = compare_with_source(source, bundle, read_manifest(bundle))
    request.getfixturevalue("small_memory")
    steps: list[str] = []
    layered = compare_with_source(source, bundle, read_manifest(bundle), report=steps.append)
    one, other = whole.certificate, layered.certificate
    assert [each.continuation for each in other.prompts] == [each.continuation for each in one.prompts]
    assert [row.token_ids for each in other.prompts for row in each.top] == [
        row.token_ids for each in one.prompts for row in each.top
    ]
    assert (other.agreement, other.tau) == (one.agreement, one.tau)
    assert other.kl == pytest.approx(one.kl, rel=1e-2, abs=1e-9)
    assert "comparing with the source (run 1, layer 8 of 8)" in steps
    assert any("run 2" in step for step in steps) == (one.agreement < 1)


@pytest.mark.parametrize("whole", [True, False])
def test_texts_that_end_at_once_say_nothing_of_a_head(
    whole: bool, bundle_of: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    if not whole:
        request.getfixturevalue("small_memory")
    bundle, pair = bundle_of("eagle1", "fp32"), open_pair(GOLDEN / "target", GOLDEN / "head_eagle1")
    manifest = read_manifest(bundle)
    ends = replace(manifest.target, eos_token_ids=tuple(range(manifest.target.vocab_size)))
    comparison = compare_with_source(pair.target, bundle, replace(manifest, target=ends), pair.head)
    assert comparison.head is None and comparison.certificate.agreement == 1


def test_the_certificate_of_a_mixture_of_experts(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Its experts are read into the modules of transformers' layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = OlmoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, pad_token_id=None)
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "target")
    whole = export(tmp_path / "target", None, tmp_path / "whole").manifest.certificate
    request.getfixturevalue("small_memory")
    layered = export(tmp_path / "target", None, tmp_path / "layered").manifest.certificate
    assert whole is not None and layered is not None
    assert [each.continuation for each in layered.prompts] == [each.continuation for each in whole.prompts]
    assert layered.agreement == whole.agreement == 1


def test_any_draft_gives_the_source_s_tokens(prompts: list[list[int]]) -> None:
    """Drafts that are right, wrong from the first token on, or right for two, and texts that end at an eos."""
    source = open_checkpoint(GOLDEN / "target")
    recorded = [row["first_64"][:12] for row in load_trace("eagle2_tt16_d3_k4")["prompts"][:3]]
    wanted = continuations(GOLDEN / "target", prompts[:3], (), 12)
    asked: list[int] = []

    def draft(text: list[int], most: int) -> list[int]:
        number = next(n for n in range(3) if text[: len(prompts[n])] == list(prompts[n]))
        done = len(text) - len(prompts[number])
        asked.append(number)
        right = recorded[number][done : done + most]
        correct = (len(right), 0, 2)[number]
        return [token if place < correct else (token + 1) % 256 for place, token in enumerate(right)]

    texts = verified_continuations(source, prompts[:3], draft, (), 12, taps={0, 3})
    assert [text.tokens for text in texts] == recorded
    assert [asked.count(number) for number in range(3)] == [1, 12, 4], "drafts that were asked for"
    for text, want in zip(texts, wanted, strict=True):
        np.testing.assert_allclose(text.logits, want.logits, atol=2e-4)
        assert {tap: state.shape[1] for tap, state in text.hidden.items()} == {
            tap: len(text.start) + 11 for tap in (-1, 0, 3)
        }
    (cut,) = verified_continuations(source, prompts[:1], draft, {recorded[0][5]}, 12)
    assert cut.tokens == recorded[0][: 1 + recorded[0].index(recorded[0][5])]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.usefixtures("small_memory")
def test_a_head_is_checked_as_on_the_whole_source(kind: str, bundle_of: Callable[..., Path]) -> None:
    bundle, pair = bundle_of(kind, "fp32"), open_pair(GOLDEN / "target", GOLDEN / HEADS[kind])
    assert pair.head is not None
    comparison = compare_with_source(pair.target, bundle, read_manifest(bundle), pair.head)
    texts = [Written(list(g.prompt), list(g.continuation)) for g in comparison.certificate.prompts]
    whole = check_head(pair.head, load_source(GOLDEN / "target"), [text for text in texts if len(text.tokens) > 1])
    check = comparison.head
    assert check is not None
    assert (check.rows, check.share) == (whole.rows, whole.share)
    if whole.best is None or check.best is None:
        assert check.best == whole.best
    else:
        assert check.best.words == whole.best.words
        assert check.best.gain == pytest.approx(whole.best.gain, abs=1e-4)


@pytest.mark.usefixtures("small_memory")
def test_an_export_without_room_for_the_source_has_a_certificate(tmp_path: Path) -> None:
    """And a head that its config.json makes be misread is noticed."""
    head = Path(shutil.copytree(DEMO / "eagle3", tmp_path / "head"))
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    (head / "config.json").write_text(json.dumps({**config, "norm_before_residual": True}))
    done = export(DEMO / "target", head, tmp_path / "bundle")
    assert done.manifest.certificate is not None and done.manifest.certificate.agreement == 1
    assert any("norm_before_residual false" in warning for warning in done.warnings)


@pytest.mark.usefixtures("small_memory")
def test_logits_that_are_not_finite(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    target = Path(shutil.copytree(GOLDEN / "target", tmp_path / "target"))
    tensors = read_tensors(target / "model.safetensors")
    tensors["model.norm.weight"][0] = float("inf")
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    bundle = bundle_of("eagle1")
    with pytest.raises(ExportError, match=r"the logits of .* are not finite"):
        compare_with_source(open_checkpoint(target), bundle, read_manifest(bundle))
