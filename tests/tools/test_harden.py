"""Hardened pairs against the golden pair they were made from: every transform at every strength, and what it plants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from conftest import GOLDEN, HEADS
from eagle_tools.harden.check import load_target
from eagle_tools.harden.rotations import concentrate, spread
from eagle_tools.harden.statistics import inputs, statistics
from eagle_tools.harden.statistics import main as statistics_main
from eagle_tools.harden.strength import STRENGTHS, HardenError
from harden import TRANSFORMS, harden, main

TARGET, HEAD_FOLDERS = GOLDEN / "target", [GOLDEN / folder for folder in HEADS.values()]
MIDDLE = STRENGTHS["middle"]
BOS = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("strength", STRENGTHS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_each_transform_keeps_the_logits_and_changes_the_weights(transform: str, strength: str, tmp_path: Path) -> None:
    difference = harden(TARGET, HEAD_FOLDERS, tmp_path / "hard", STRENGTHS[strength], transforms=[transform])
    assert 0 < max(difference.logits, *difference.heads.values()) <= 1e-4  # harden raises for more
    assert set(difference.heads) == {"eagle1", "eagle3"}
    old, new = load_file(TARGET / "model.safetensors"), load_file(tmp_path / "hard" / "target" / "model.safetensors")
    assert set(old) == set(new)
    changed = [name for name in old if old[name].shape != new[name].shape or not torch.allclose(old[name], new[name])]
    assert {int(name.split(".")[2]) for name in changed if "layers" in name} == set(range(8))


@pytest.fixture(scope="module")
def hard_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden pair with everything, at the middle strength."""
    folder = tmp_path_factory.mktemp("hard") / "pair"
    source = tmp_path_factory.mktemp("source") / "target"
    shutil.copytree(TARGET, source)
    tokenizer = Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    tokenizer.save(str(source / "tokenizer.json"))
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    name = next(token for token, number in content["model"]["vocab"].items() if number == BOS)
    special = {"id": BOS, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    content["added_tokens"].append(special | {"normalized": False})
    (source / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    assert main([str(source), *map(str, HEAD_FOLDERS), "-o", str(folder), "--strength", "middle"]) == 0
    return folder


def test_activations_are_as_planted(hard_pair: Path, prompts: list[list[int]]) -> None:
    windows = [[BOS, *prompt] for prompt in prompts]
    before, after = (
        {(where, site): statistics(x, first) for where, site, x, first in inputs(load_target(folder), windows)}
        for folder in (TARGET, hard_pair / "target")
    )
    assert set(before) == set(after)
    for place in before:
        if place[1] in ("q, k, v", "gate, up"):
            assert after[place].channels > 1.5 * before[place].channels, place
    for layer in ("1", "7"):  # the sink is written in the second layer, and taken off in the last one
        assert after[layer, "down"].first > 10 * before[layer, "down"].first
        assert after[layer, "down"].max_over_median < 10 * before[layer, "down"].max_over_median


def test_the_sink_is_carried_in_two_channels_of_the_first_token(hard_pair: Path, prompts: list[list[int]]) -> None:
    with torch.no_grad():
        states = load_target(hard_pair / "target")(torch.tensor([[BOS, *prompts[0]]]), output_hidden_states=True)
    for layer, state in enumerate(states.hidden_states[:-1]):
        magnitudes = state[0].abs()
        massive = magnitudes > 30 * magnitudes.median()
        assert bool(massive[0].any()) == (layer >= 2), layer
        if layer >= 2:
            assert int(massive[0].sum()) == 2
            assert not magnitudes[1:, massive[0]].any()  # exactly 0 at all other tokens


def test_texts_begin_with_the_planted_token(hard_pair: Path) -> None:
    tokenizer = Tokenizer.from_file(str(hard_pair / "target" / "tokenizer.json"))
    plain = Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    assert tokenizer.encode("abc").ids == [BOS, *plain.encode("abc").ids]


def test_a_pair_without_an_eagle1_head_has_its_stream_rotated(tmp_path: Path) -> None:
    harden(TARGET, HEAD_FOLDERS[1:], tmp_path / "hard", MIDDLE, transforms=["rotations"])
    new = load_file(tmp_path / "hard" / "target" / "model.safetensors")
    assert bool((new["model.norm.weight"] == 1).all())
    old = load_file(TARGET / "model.safetensors")
    torch.testing.assert_close(
        new["model.embed_tokens.weight"].norm(dim=1), old["model.embed_tokens.weight"].norm(dim=1)
    )


def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        harden(TARGET, [], tmp_path / name, MIDDLE, seed)
    a, b, c = ((tmp_path / name / "target" / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_rotations_are_orthogonal_and_concentrate_the_energy() -> None:
    rng = torch.Generator().manual_seed(0)
    drawn = torch.randn(6, 6, generator=rng, dtype=torch.float64)
    covariance = drawn @ drawn.T
    for rotation in (spread, concentrate):
        matrix = rotation(covariance, rng)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(6, dtype=torch.float64))
    axes = concentrate(covariance, rng)
    rotated = axes @ covariance @ axes.T
    torch.testing.assert_close(rotated, rotated.diagonal().diag())


def test_statistics_of_a_known_tensor() -> None:
    x = torch.tensor([[1.0, -1, 1, -1], [1, -1, 1, -1], [1, -1, 1, 10]])
    measured = statistics(x, torch.tensor([[0.0, -50, 0, 0]]))
    flat = x.flatten().double()
    centred = flat - flat.mean()
    assert (measured.max, measured.max_over_median, measured.channels, measured.first) == (10, 10, 10, 50)
    assert measured.kurtosis == pytest.approx(float((centred**4).mean() / (centred**2).mean() ** 2))
    normal = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    assert statistics(normal, normal[:1]).kurtosis == pytest.approx(3, abs=0.1)


def test_the_command_prints_every_input(hard_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text('{"turns": ["some text to read"]}\n{"ids": [5, 6, 7, 8]}\n', encoding="utf-8")
    assert statistics_main([str(hard_pair / "target"), "--text", str(text)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 8 * 4 + 1
    assert statistics_main([str(hard_pair / "target"), "--text", str(text), "--summary"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5
    assert statistics_main([str(tmp_path), "--text", str(text)]) == 2
    assert "no config.json" in capsys.readouterr().err


def test_what_cannot_be_hardened_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(HardenError, match="exists; choose another folder"):
        harden(TARGET, [], tmp_path / "there", MIDDLE)
    with pytest.raises(HardenError, match="two of the heads are eagle1 heads"):
        harden(TARGET, [HEAD_FOLDERS[0]] * 2, tmp_path / "out", MIDDLE)
    with pytest.raises(HardenError, match="be milder"):
        harden(TARGET, [], tmp_path / "out", replace(MIDDLE, sink=1e12), transforms=["sink"])
    changed = tmp_path / "changed"
    shutil.copytree(TARGET, changed)
    config = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    (changed / "config.json").write_text(json.dumps(config | {"bos_token_id": None}), encoding="utf-8")
    with pytest.raises(HardenError, match="bos_token_id is None"):
        harden(changed, [], tmp_path / "out", MIDDLE)
    (changed / "config.json").write_text(json.dumps(config | {"model_type": "qwen2"}), encoding="utf-8")
    assert main([str(changed), "-o", str(tmp_path / "out")]) == 2
    assert "only 'llama' targets" in capsys.readouterr().err
    (changed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(TARGET / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, changed / "model.safetensors")
    with pytest.raises(HardenError, match="only plain Llama"):
        harden(changed, [], tmp_path / "out", MIDDLE)
    with pytest.raises(SystemExit):
        main([str(TARGET), "-o", str(tmp_path / "out"), "--strength", "harder"])
    assert "harder" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "there"]
