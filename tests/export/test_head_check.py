"""The check of a head on its target's own text: heads that are read as they were trained pass, and each known way to
misread one is noticed and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from conftest import GOLDEN
from eagle_export.checking import head_check
from eagle_export.checking.head_check import HeadCheck
from eagle_export.checking.source_reading import reading_of_pair
from eagle_export.commands.cli import main
from eagle_export.graphs.eager import eager_head, eager_weights
from eagle_export.graphs.pair import open_pair
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.reading.families.source import load_source
from eagle_export.recording.source_text import Written, text_starts
from eagle_runtime.text.tokenizer import Text
from greedy_texts import check_head, own_text
from head_writers import read, speculators
from systems import read_tensors

DEMO = Path(__file__).parents[2] / "tools" / "demo_pair"
TARGETS = {"demo": DEMO / "target", "golden": GOLDEN / "target"}
HEADS = {
    ("demo", "eagle1"): DEMO / "eagle1",
    ("demo", "eagle3"): DEMO / "eagle3",
    ("golden", "eagle1"): GOLDEN / "head_eagle1",
    ("golden", "eagle3"): GOLDEN / "head_eagle3_dv44",
}


@dataclass
class Source:
    """A target in transformers, and its own text."""

    model: Any
    texts: list[Written]


@pytest.fixture(scope="module")
def source_of() -> Callable[[str], Source]:
    made: dict[str, Source] = {}

    def source(name: str) -> Source:
        if name not in made:
            model = load_source(TARGETS[name])
            starts = text_starts(Text(TARGETS[name]), int(model.config.vocab_size), 16, 8, 8, 4096)
            made[name] = Source(model, own_text(model, starts, 48, (1,)))
        return made[name]

    return source


def checked(source: Source, target: str, head: Path) -> HeadCheck:
    part = open_pair(TARGETS[target], head).head
    assert part is not None
    return check_head(part, source.model, source.texts)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[..., Path]:
    """kind, changes of config.json -> a copy of the demo pair's head."""

    def copy(kind: str, **changes: Any) -> Path:
        folder = tmp_path / f"{kind}_copy"
        shutil.copytree(HEADS["demo", kind], folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
        return folder

    return copy


def test_own_text_is_greedy_and_ends_at_eos(source_of: Callable[[str], Source]) -> None:
    source = source_of("golden")
    text = source.texts[0]
    ids = torch.tensor([[*text.start, *text.tokens]])
    with torch.inference_mode():
        logits = source.model(input_ids=ids).logits[0]
    assert logits[len(text.start) - 1 : -1].argmax(-1).tolist() == text.tokens
    assert all(1 not in text.tokens[:-1] for text in source.texts)
    end = text.tokens[9]
    (cut,) = own_text(source.model, [text.start], 20, (end,))
    assert cut.tokens == text.tokens[: 1 + text.tokens.index(end)]


@pytest.mark.parametrize(("target", "kind"), HEADS)
def test_heads_that_are_read_as_trained_pass(target: str, kind: str, source_of: Callable[[str], Source]) -> None:
    check = checked(source_of(target), target, HEADS[target, kind])
    assert check.rows > 300
    assert check.share > 0.5
    assert check.warning() is None
    assert check.best is None or check.best.gain < 0


@pytest.mark.parametrize(("target", "kind"), HEADS)
def test_texts_that_are_read_together_count_as_one_after_the_other(
    target: str, kind: str, source_of: Callable[[str], Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(target)
    lengths = [len(text.tokens) - number % 2 for number, text in enumerate(source.texts[:5])]
    texts = [Written(text.start, text.tokens[:length]) for text, length in zip(source.texts, lengths, strict=False)]
    together = checked(Source(source.model, texts), target, HEADS[target, kind])
    monkeypatch.setattr(head_check, "TEXTS", 1)
    apart = checked(Source(source.model, texts), target, HEADS[target, kind])
    assert (together.share, together.rows) == (apart.share, apart.rows)
    assert apart.rows == sum(lengths) - len(lengths)
    if apart.best is not None and together.best is not None:
        assert together.best.words == apart.best.words
        assert together.best.gain == pytest.approx(apart.best.gain, abs=1e-4)


@pytest.mark.parametrize("target", ["demo", "golden"])
def test_the_share_is_that_of_a_count_by_hand(target: str, source_of: Callable[[str], Source]) -> None:
    """EAGLE-1's equations row by row: each prefix is a forward pass of its own."""
    source = source_of(target)
    part = open_pair(TARGETS[target], HEADS[target, "eagle1"]).head
    assert part is not None
    text = source.texts[3]
    check = check_head(part, source.model, [text])
    head, tokens = eager_head(part.config, eager_weights(part, source.model)), [*text.start, *text.tokens]
    assert isinstance(head, Eagle1Head | Eagle3Head)
    right = 0
    for end in range(len(text.start) + 1, len(tokens)):  # tokens[end] is drafted from tokens[:end]
        with torch.inference_mode():
            features = source.model.model(input_ids=torch.tensor([tokens[: end - 1]])).last_hidden_state
            rows = end - 1
            empty = torch.zeros(1, 0, part.config.num_kv_heads, part.config.head_dim)
            mask = torch.full((1, 1, rows, rows), -1e30).triu(1)
            ids = torch.tensor([tokens[1:end]])
            hidden, _ = head(ids, features, torch.arange(rows)[None], mask, [(empty, empty)])
            right += int(head.logits(hidden)[0, -1].argmax()) == tokens[end]
    assert check.rows == len(text.tokens) - 1
    assert check.share == pytest.approx(right / check.rows)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_before_residual": True}, "norm_before_residual false"),
        ({"rope_theta": 100.0}, "rope_theta 10000"),
    ],
    ids=str,
)
def test_a_planted_misreading_is_named(
    changes: dict[str, Any], words: str, source_of: Callable[[str], Source], copied: Callable[..., Path]
) -> None:
    warning = checked(source_of("demo"), "demo", copied("eagle3", **changes)).warning()
    assert warning is not None
    assert words in warning


@pytest.mark.parametrize(("ids", "words"), [([1, 3, 4], "one layer later"), ([3, 5, 6], "one layer earlier")])
def test_taps_off_by_one_are_named(
    ids: list[int], words: str, source_of: Callable[[str], Source], tmp_path: Path
) -> None:
    """The head was trained on the outputs of layers 1, 3 and 4; speculators' ids are inputs."""
    head = speculators(read(DEMO / "eagle3"))
    del head.tensors["embed_tokens.weight"]  # of the golden target
    head.config["eagle_aux_hidden_state_layer_ids"] = ids
    warning = checked(source_of("demo"), "demo", head.write(tmp_path / "head")).warning()
    assert warning is not None
    assert f"{words} (the outputs of layers [1, 3, 4])" in warning


def test_tokens_are_as_likely_as_the_target_makes_them(tmp_path: Path) -> None:
    """Granite divides logits: with twice the LM head, by two, it is the Llama model."""
    folder = Path(shutil.copytree(TARGETS["golden"], tmp_path / "granite"))
    tensors, config = (
        read_tensors(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
    )
    save_file(tensors | {"lm_head.weight": 2 * tensors["lm_head.weight"]}, folder / "model.safetensors")
    same = {"attention_multiplier": config["head_dim"] ** -0.5, "logits_scaling": 2.0}
    (folder / "config.json").write_text(json.dumps(config | same | {"model_type": "granite"}))
    head = Path(shutil.copytree(HEADS["golden", "eagle1"], tmp_path / "head"))
    stated = json.loads((head / "config.json").read_text(encoding="utf-8"))
    (head / "config.json").write_text(json.dumps(stated | {"rope_theta": 500.0}))
    readings = [reading_of_pair(open_pair(each, head)) for each in (folder, TARGETS["golden"])]
    divided, plain = (None if each is None else each.read()[1] for each in readings)
    assert divided == plain and plain is not None and plain.best is not None


def test_a_head_of_another_target_is_loud(source_of: Callable[[str], Source], copied: Callable[..., Path]) -> None:
    folder = copied("eagle1")
    weights = read_tensors(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    weights["fc.weight"] = weights["fc.weight"][:, torch.randperm(512, generator=generator)]
    save_file(weights, folder / "model.safetensors")
    check = checked(source_of("demo"), "demo", folder)
    assert check.share < 0.1
    warning = check.warning()
    assert warning is not None and warning.startswith("only ") and "another target" in warning


def test_the_command_says_so(tmp_path: Path, copied: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    head = copied("eagle3", norm_before_residual=True)
    assert main([str(TARGETS["demo"]), str(head), "-o", str(tmp_path / "bundle"), "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert 0.3 < report["first_token_share"] < 0.8
    assert "warning: the head may be misread: " in err and "norm_before_residual false" in err
    assert any("norm_before_residual false" in warning for warning in report["warnings"])
