"""Gemma-4's assistants, tiny and random: they propose what transformers' assistant does, and change no output."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.commands.cli import main
from eagle_export.graphs.pair import open_pair
from eagle_export.inspection.report import inspect
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import chain_of
from eagle_runtime.bundle.manifest import DTYPE_BITS, read_manifest
from eagle_runtime.core.head import WINDOW, Proposal
from eagle_runtime.drafting.assistant_head import AssistantHead
from eagle_runtime.drafting.head import Scratch
from head_writers import TARGET
from insides import bundle_in, shared_passes
from tiny_assistants import Drafting, save_assistant
from tiny_families import CONTEXT, HIDDEN, ROWS, VOCAB, save_source, source_of

SHARING, ALONE = "Gemma-4, with layers that use others' keys", "Gemma-4, with values that are keys"
LONG = {"max_position_embeddings": 2 * CONTEXT}  # for a text that is longer than a head reads
TARGETS = {name: replace(ROWS[name], config={**ROWS[name].config, **LONG}) for name in (SHARING, ALONE)}
Pairs = Callable[[str, bool], tuple[Path, Any, Any]]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """target, whether the assistant's tokens are cut into groups -> a folder of both checkpoints, and both models."""
    base = tmp_path_factory.mktemp("assistants")

    @cache
    def pair(name: str, ordered: bool) -> tuple[Path, Any, Any]:
        folder = base / f"{list(TARGETS).index(name)}-{ordered}"
        save_source(TARGETS[name], folder / "target")
        target = source_of(TARGETS[name])
        return folder, target, save_assistant(target.config, folder / "assistant", ordered=ordered)

    return pair


@pytest.fixture(scope="module")
def bundles(pairs: Pairs) -> Callable[[str, bool, str], Path]:
    """As pairs, and a precision -> bundle."""

    @cache
    def bundle(name: str, ordered: bool, precision: str) -> Path:
        folder, _, _ = pairs(name, ordered)
        export(
            folder / "target", folder / "assistant", folder / precision, Settings(precision=precision, certify=False)
        )
        return folder / precision

    return bundle


def assert_proposes(proposal: Proposal, row: int, expected: Any) -> None:
    """expected: log-probabilities [V] of transformers; those of -inf are of tokens that it cannot draft."""
    drafted = np.full(VOCAB, -np.inf)
    drafted[proposal.tokens[row]] = proposal.log_probs[row]
    possible = np.isfinite(expected.numpy())
    np.testing.assert_allclose(drafted[possible], expected.numpy()[possible], atol=1e-4)
    assert (drafted[~possible] < -1e3).all()


def assert_drafts(head: AssistantHead, tokens: list[int], drafting: Drafting) -> None:
    """Compares the proposals for the root's children, and those of a tree of two levels below."""
    proposal = head.catch_up(tokens)
    expected, state = drafting.after(tokens[-1], drafting.hidden)
    assert_proposes(proposal, 0, expected)
    assert proposal.position == len(tokens)
    with Scratch(head) as scratch:
        children = proposal.tokens[0, [0, 3]]
        level = scratch.feed(children, proposal.hidden[np.array([0, 0])], np.array([-1, -1]))
        known = [drafting.after(int(token), state) for token in children]
        for row, (expected, _) in enumerate(known):
            assert_proposes(level, row, expected)
        parents = np.array([1, 0, 1])
        tokens_below = level.tokens[parents, [0, 0, 2]]
        deeper = scratch.feed(tokens_below, level.hidden[parents], parents)
        for row, (token, parent) in enumerate(zip(tokens_below, parents, strict=True)):
            assert_proposes(deeper, row, drafting.after(int(token), known[parent][1])[0])
        assert (level.position, deeper.position) == (len(tokens) + 1, len(tokens) + 2)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("name", [SHARING, ALONE])
def test_proposals_equal_transformers(
    name: str, ordered: bool, pairs: Pairs, bundles: Callable[[str, bool, str], Path]
) -> None:
    """Of texts shorter and longer than the window, and of one that grows by verified tokens."""
    _, source, assistant = pairs(name, ordered)
    rng = np.random.default_rng(2)
    with EagleModel.load(bundles(name, ordered, "fp32"), threads=1) as model:
        target, head = bundle_in(model).target, bundle_in(model).head
        assert isinstance(head, AssistantHead)
        for length in (2, 9, 14, 90):
            tokens = rng.integers(0, VOCAB, length).tolist()
            _, features = target.prefill(tokens[:-1])
            head.truncate(0)
            head.note(np.array(features))
            assert_drafts(head, tokens, Drafting(source, assistant, tokens))
        for _ in range(2):
            drafted = rng.integers(0, VOCAB, 5).tolist()
            _, features = target.verify(chain_of(tokens[-1], drafted))
            kept = np.arange(4)
            head.note(np.array(target.keep(kept, features)))
            tokens += drafted[: len(kept) - 1] + [7]
            assert_drafts(head, tokens, Drafting(source, assistant, tokens))


def test_of_a_long_text_all_keys_are_read(pairs: Pairs, bundles: Callable[[str, bool, str], Path]) -> None:
    """If some of the first ones were never noted, the others, at the positions that they have in the text."""
    _, source, assistant = pairs(SHARING, True)
    tokens = np.random.default_rng(2).integers(0, VOCAB, WINDOW + 51).tolist()
    with EagleModel.load(bundles(SHARING, True, "fp32"), threads=1) as model:
        target, head = bundle_in(model).target, bundle_in(model).head
        assert isinstance(head, AssistantHead)
        _, features = target.prefill(tokens[:-1])
        head.note(np.array(features))
        assert_drafts(head, tokens, Drafting(source, assistant, tokens))
        for first in (3, 290):
            head.truncate(0)
            head.truncate(first)
            head.note(np.array(features)[first:])
            assert_drafts(head, tokens, Drafting(source, assistant, tokens, keys=len(tokens) - 1 - first))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize(("name", "ordered"), [(SHARING, True), (ALONE, False)])
def test_drafts_change_no_token(
    name: str, ordered: bool, precision: str, bundles: Callable[[str, bool, str], Path]
) -> None:
    prompt = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()
    with EagleModel.load(bundles(name, ordered, precision), threads=1) as model:
        ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3}]
        for settings in ways:
            plain = model.generate(prompt, method="vanilla", max_new_tokens=60, **settings)
            for method in ("eagle", "eagle+lookup"):
                drafted = model.generate(prompt, method=method, max_new_tokens=60, **settings)
                assert drafted.token_ids == plain.token_ids


@needs_operators
@pytest.mark.parametrize(("name", "ordered"), [(SHARING, True), (ALONE, False)])
def test_texts_that_share_passes_are_those_of_requests_alone(
    name: str, ordered: bool, bundles: Callable[[str, bool, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers of two shapes, each of which finds the caches of its own; texts are shorter and longer than the window,
    and of several lengths, so that caches grow at different times."""
    rows = shared_passes(monkeypatch)
    rng = np.random.default_rng(8)
    requests: list[dict[str, Any]] = [
        {
            "prompt": rng.integers(0, VOCAB, length).tolist(),
            "max_new_tokens": 40,
            "ignore_eos": True,
            "temperature": temperature,
            "seed": length,
            "method": method,
        }
        for length, temperature, method in (
            (3, 0.0, None), (90, 0.8, None), (14, 0.0, "vanilla"), (41, 0.9, "lookup"), (9, 1.0, "eagle"),
        )
    ]  # fmt: skip
    with EagleModel.load(bundles(name, ordered, "int8"), backend="native", threads=1) as model:
        alone = [model.generate(**request).token_ids for request in requests]
        texts = {number: piece.result for number, piece in model.batch(requests, width=4) if piece.result is not None}
    assert [texts[number].token_ids for number in range(len(requests))] == alone
    assert max(map(len, rows)) == 4


@needs_operators
def test_natively_it_proposes_the_same(bundles: Callable[[str, bool, str], Path]) -> None:
    """But for what operators round otherwise."""
    tokens = np.random.default_rng(5).integers(0, VOCAB, 90).tolist()
    proposed = []
    for backend in ("cpu", "native"):
        with EagleModel.load(bundles(ALONE, False, "int8"), backend=backend, threads=1) as model:
            target, head = bundle_in(model).target, bundle_in(model).head
            assert isinstance(head, AssistantHead)
            head.note(np.array(target.prefill(tokens[:-1])[1]))
            proposal = head.catch_up(tokens)
            with Scratch(head) as scratch:
                level = scratch.feed(np.array([3, 9]), proposal.hidden[np.array([0, 0])], np.array([-1, -1]))
            rows = zip([*proposal.tokens, *level.tokens], [*proposal.log_probs, *level.log_probs], strict=True)
            proposed.append(np.stack([log_probs[np.argsort(ids)] for ids, log_probs in rows]))
    portable, native = proposed
    np.testing.assert_allclose(native, portable, atol=0.1)


def test_inspection_says_what_it_reads(pairs: Pairs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _, _ = pairs(SHARING, True)
    main(["inspect", str(folder / "target"), str(folder / "assistant")])
    said = " ".join(capsys.readouterr().out.split())
    assert "Gemma-4 assistant in the layout of transformers, " in said
    assert "3 layers of width 24, draft vocabulary 64 of 64 " in said
    assert "reads the target's keys, 1 x 16 (sliding_attention) and 1 x 32 (full_attention); drafts from 6 of" in said
    assert "16 groups of tokens fits the target" in said
    other = changed(folder / "assistant", tmp_path / "other", backbone_hidden_size=2 * HIDDEN)
    main(["inspect", str(folder / "target"), str(other)])
    assert "does not fit the target: - " in (said := " ".join(capsys.readouterr().out.split()))
    assert "backbone_hidden_size is 64, but the target's is 32" in said


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_inspection_knows_its_size(precision: str, pairs: Pairs, bundles: Callable[[str, bool, str], Path]) -> None:
    folder, _, _ = pairs(SHARING, True)
    report = inspect(str(folder / "target"), str(folder / "assistant"), context=100)
    need = next(need for need in report.needs if need.precision == precision)
    manifest = read_manifest(bundles(SHARING, True, precision))
    assert manifest.head is not None and need.draft is not None
    weights = [one for name, one in manifest.head.graph.weights.items() if "." in name]  # without small constants
    stored = sum(math.prod(map(int, one.shape)) * DTYPE_BITS[one.dtype] // 8 for one in weights)
    assert need.draft.stored == pytest.approx(stored, rel=0.01)
    assert need.cache == 100 * sum(model.graph.kv_token_bytes for model in manifest.models.values())


def changed(folder: Path, place: Path, **changes: Any) -> Path:
    """A copy of an assistant with other settings: of its text_config, but for those of its own."""
    copy = shutil.copytree(folder, place)
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    for key, value in changes.items():
        (config if key in config else config["text_config"])[key] = value
    (copy / "config.json").write_text(json.dumps(config))
    return copy


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another width": ({"backbone_hidden_size": 2 * HIDDEN}, "backbone_hidden_size is 64, but the target's is 32"),
    "another vocabulary": ({"vocab_size": 128}, "text_config.vocab_size is 128, but the target's is 64"),
    "other keys": ({"num_key_value_heads": 4}, "'sliding_attention' read 4 key/value heads of width 16, but"),
    "another model": ({"model_type": "gemma4_unified_assistant"}, "'gemma4_unified_assistant', but only assistants of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_assistant_of_another_model_is_refused_before_any_work(case: str, pairs: Pairs, tmp_path: Path) -> None:
    folder, _, _ = pairs(SHARING, False)
    changes, message = REFUSED[case]
    with pytest.raises(ExportError, match=message) as refusal:
        open_pair(folder / "target", changed(folder / "assistant", tmp_path / "assistant", **changes))
    assert "\n" not in str(refusal.value)


def test_an_assistant_needs_a_gemma4_target(pairs: Pairs) -> None:
    folder, _, _ = pairs(SHARING, False)
    with pytest.raises(ExportError, match="drafts for Gemma-4, but the target is of type 'llama'"):
        open_pair(TARGET, folder / "assistant")
