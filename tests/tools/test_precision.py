"""The precision report: its figures against simple slow computations, and the command from bundles to files."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import put_listed, put_tokenizer
from eagle_calib.scoring import log_softmax
from eagle_runtime import EagleModel
from eagle_tools.bench.peers import Stored
from eagle_tools.plots import precision_plot
from eagle_tools.precision import main
from eagle_tools.precision.closeness import PIECE, Closeness, Passage, compare_texts, own_text, pieces
from eagle_tools.precision.rows import rows_of, tables
from eagle_tools.precision.speed import NODES, BundleAnswers, Speed, time_models
from eagle_tools.questions import Question
from insides import bundle_in

PNG = b"\x89PNG\r\n\x1a\n"
TEXT = "Q: Ann has 3 apples and gets 4 more. How many apples?\nA: 3 + 4 = 7. Ann has 7 apples.\n" * 3
QUESTIONS = [Question(0, ("Q: Ann has 3 apples and gets 4 more.",)), Question(1, ("Q: Bob has 5 pens.", "more"))]


@pytest.fixture(scope="module")
def bundles(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An fp32 and an int8 bundle, both with a tokenizer."""
    base = tmp_path_factory.mktemp("precision")
    for precision in ("fp32", "int8"):
        shutil.copytree(bundle_of("eagle3", precision), base / precision)
        put_tokenizer(base / precision)
    return [base / "fp32", base / "int8"]


@pytest.fixture(scope="module")
def models(bundles: list[Path]) -> Iterator[list[EagleModel]]:
    with EagleModel.load(bundles[0], threads=1) as one, EagleModel.load(bundles[1], threads=1) as other:
        yield [one, other]


def test_closeness_equals_that_of_rows_scored_one_by_one(models: list[EagleModel]) -> None:
    ids = models[0].text.encode(TEXT)[:150]
    windows = [ids[:100], ids[100:]]
    measured = compare_texts(models, [Passage(tuple(window)) for window in windows])
    kl, same, nll, rows = 0.0, 0, [0.0, 0.0], 0
    for window in windows:
        for end in range(1, len(window)):
            logs = [log_softmax(bundle_in(model).target.prefill(window[:end])[0][None])[0] for model in models]
            kl += float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())
            same += int(logs[0].argmax() == logs[1].argmax())
            nll = [before - log[window[end]] for before, log in zip(nll, logs, strict=True)]
            rows += 1
    reference, int8 = measured
    assert reference.rows == int8.rows == rows == len(ids) - 2
    assert (reference.kl, reference.same) == (0, rows)
    assert int8.kl == pytest.approx(kl / rows, rel=1e-2) and int8.kl > 1e-5
    assert abs(int8.same - same) <= 1  # rounding may decide a tie differently in another forward pass
    for each, sums in zip(measured, nll, strict=True):
        assert each.perplexity == pytest.approx(math.exp(sums / rows), rel=1e-3)


def test_closeness_by_hand() -> None:
    closeness = Closeness()
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]))
    closeness.add(reference, np.log(np.array([[0.25, 0.25, 0.5], [0.25, 0.5, 0.25]])), [2, 0])
    closeness.add(reference[:1], reference[:1], [1])
    assert (closeness.rows, closeness.same) == (3, 2)
    assert closeness.kl == pytest.approx(0.25 * math.log(2) / 3)
    assert closeness.kls == pytest.approx([0.25 * math.log(2), 0, 0]) and closeness.agreement == pytest.approx(2 / 3)
    assert closeness.percentile(50) == 0 and closeness.percentile(75) == pytest.approx(0.125 * math.log(2))
    assert closeness.perplexity == pytest.approx((2 * 4 * 4) ** (1 / 3))


def test_speeds_cover_all_prompts_and_tau_is_that_of_the_generations(models: list[EagleModel]) -> None:
    calls = []
    speeds = time_models([BundleAnswers(model) for model in models], QUESTIONS, 24, lambda: calls.append(1))
    assert len(calls) == 2
    for model, speed in zip(models, speeds, strict=True):
        tree: dict[str, Any] = {"tree": "dynamic", "total_token": NODES}
        stats = [model.generate(q.turns[0], max_new_tokens=24, **tree).usage for q in QUESTIONS]
        assert speed.new_tokens == sum(s.new_tokens - 1 for s in stats) > 20
        assert speed.target_passes == sum(s.target_passes for s in stats)
        assert len(speed.vanilla) == len(speed.eagle) == len(QUESTIONS)
        for question in QUESTIONS:
            plain = model.generate(question.turns[0], method="vanilla", max_new_tokens=24)
            assert speed.answers[question.id] == plain.token_ids
        assert len(speed.passes[1]) >= sum(s.new_tokens - 1 for s in stats)  # the last trees may be a root alone
        assert len(speed.passes[NODES]) >= 8
        assert len(speed.drafts) == len(speed.passes[NODES])
        assert min(*speed.vanilla, *speed.eagle, *speed.drafts, *speed.passes[1], *speed.passes[NODES]) > 0


def test_command_prints_the_table_and_writes_everything(
    bundles: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.jsonl").write_text("".join(json.dumps({"turns": q.turns}) + "\n" for q in QUESTIONS))
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out"
    arguments = ["--text", str(tmp_path / "text.txt"), "--prompts", str(tmp_path / "set.jsonl"), "-o", str(out)]
    limits = ["--count", "1", "--max-new-tokens", "24", "--threads", "1", "--tokens", "120", "--own-tokens", "90"]
    assert main([*map(str, bundles), *arguments, *limits]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert printed == (out / "precision.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\w+) \| ([\w, ]+) \| [\d.]+ \| ([\d.]+) \| ([\d.]+)% \| ([\d.e-]+) \|", printed, re.M)
    assert [line[:2] for line in lines] == [("fp32", "fp32"), ("int8", "int8, head int4")]
    assert lines[0][3:] == ("100.00", "0") and 0 < float(lines[1][4]) < 0.1 and float(lines[1][3]) > 85
    assert 32 <= float(lines[0][2]) < 34 and 8 < float(lines[1][2]) < 20  # bits, of a graph that is large here
    rows = [json.loads(line) for line in (out / "precision.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[1]["bytes"] < 0.5 * rows[0]["bytes"]
    assert rows[0]["same_start"] == 24 >= rows[1]["same_start"] >= 0
    assert rows[0]["own_kl_percentiles"] == [0, 0, 0] < rows[1]["own_kl_percentiles"]
    assert rows[0]["perplexity_change"] == 0 != rows[1]["perplexity_change"]
    assert all(row["tau"] > 1.5 and row["draft_ms"] > 0 for row in rows)
    assert all(row["pass_16_ms"] > 0 < row["pass_1_ms"] for row in rows)
    assert (out / "precision.png").read_bytes().startswith(PNG)


def test_wrong_input_is_refused_before_the_work(
    bundles: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.jsonl").write_text('{"turns": ["a"]}')
    (tmp_path / "text.txt").write_text(TEXT)
    sound = {"--text": tmp_path / "text.txt", "--prompts": tmp_path / "set.jsonl", "-o": tmp_path / "out"}
    other = tmp_path / "other"
    shutil.copytree(bundles[1], other)
    put_listed(other, "tokenizer.json", (bundles[1] / "tokenizer.json").read_bytes() + b"\n")
    cases: list[tuple[dict[str, object], str]] = [
        ({"--text": tmp_path / "none.txt"}, "none.txt cannot be read"),
        ({"--prompts": tmp_path / "none.jsonl"}, "none.jsonl cannot be read"),
        ({"-o": tmp_path / "no" / "out"}, "no does not exist"),
        ({"-o": tmp_path / "text.txt"}, "text.txt exists and is not a folder"),
        ({"--tokens": 1}, "tokens is 1"),
        ({"--count": 0}, "questions is 0"),
        ({"--max-new-tokens": 0}, "max_new_tokens is 0"),
        ({"--own-tokens": -1}, "own_tokens is -1"),
        ({"--own-temperature": -1}, "own_temperature is -1.0"),
        ({"--peer-formats": "llama.cpp/q4_0"}, "give --peer-target TARGET too"),
        ({"--peer-target": tmp_path / "none", "--peer-formats": "llama.cpp/q8_0"}, "none has no config.json"),
        ({"--peer-target": tmp_path, "--peer-formats": "llama.cpp/q3"}, "peer 'llama.cpp/q3' is unknown"),
        ({"--threads": 0}, "threads is 0"),
    ]
    for changes, says in cases:
        argv = [str(part) for pair in {**sound, **changes}.items() for part in pair]
        assert main([str(bundles[0]), *argv]) == 2
        err = capsys.readouterr().err
        assert err.startswith("eagle-precision: ") and err.count("\n") == 1 and says in err
    argv = [str(part) for pair in sound.items() for part in pair]
    assert main([str(bundles[0]), str(other), *argv]) == 2
    assert f"{other} has another vocabulary than {bundles[0]}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_text_is_needed(bundles: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set.jsonl").write_text('{"turns": ["a"]}')
    argv = [str(bundles[0]), "--prompts", str(tmp_path / "set.jsonl"), "-o", str(tmp_path / "out"), "--own-tokens", "0"]
    assert main(argv) == 2 and "there is no text to compare on" in capsys.readouterr().err


def test_tables_without_the_columns_of_what_was_not_measured(tmp_path: Path) -> None:
    own, text = Closeness([0.0, 0.1, 0.2], 2, 9.0), Closeness()
    speed = Speed(vanilla=[10.0, 30.0], answers={0: (1, 2, 3), 1: (4, 5, 6, 7)})
    other = Speed(vanilla=[20.0], eagle=[40.0], answers={0: (1, 9, 3, 3), 1: (4, 5, 6, 7, 8)})
    names, sizes = [("a", "fp32"), ("b/q4", "q4")], [Stored(4_000_000, 32.0), Stored(500_000, None)]
    rows = rows_of(names, sizes, [own, own], [text, text], [speed, other])
    assert (rows[0].same_start, rows[1].same_start) == (3.5, 2.5)
    assert rows[1].own_kl_percentiles == pytest.approx((0.1, 0.19, 0.198))
    quality, speeds = tables(rows).split("\n\n")
    titles = "| | precision | MB | bits per weight | own text: top-1 | KL | KL 50 % | KL 95 % | KL 99 % |"
    assert quality.splitlines()[0].replace("|  |", "| |") == f"{titles} same start, tokens |"
    assert quality.splitlines()[3] == "| b/q4 | q4 | 0.5 | - | 66.67% | 0.1 | 0.1 | 0.19 | 0.2 | 2.5 |"
    assert speeds.splitlines()[2:] == ["| a | fp32 | 20.0 | - |", "| b/q4 | q4 | 20.0 | 40.0 |"]
    points = [(row.name, row.eagle_tokens_per_s, row.own_agreement or 0.0) for row in rows]
    precision_plot(points, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)


def test_own_text_is_the_models_and_the_same_for_a_seed(models: list[EagleModel]) -> None:
    prompts = [models[0].text.encode(question.turns[0]) for question in QUESTIONS]
    passages = own_text(models[0], prompts, 100, 5)
    assert passages == own_text(models[0], prompts, 100, 5) != own_text(models[0], prompts, 100, 6)
    assert sum(len(passage.tokens) - 1 - passage.first for passage in passages) == 100
    for number, passage in enumerate(passages):
        prompt = prompts[number % 2]
        assert list(passage.tokens[: passage.first + 1]) == prompt
        new = passage.tokens[len(prompt) :]
        made = models[0].generate(prompt, temperature=1.0, seed=5 + number, max_new_tokens=len(new))
        assert made.token_ids == new
    scored = compare_texts(models, passages)
    assert scored[0].rows == scored[1].rows == 100
    assert own_text(models[0], prompts, 0, 5) == []
    greedy = own_text(models[0], prompts, 40, 5, temperature=0.0)
    assert [p.tokens[: p.first + 1] for p in greedy] == [tuple(prompt) for prompt in prompts], "one text per prompt"
    assert greedy == own_text(models[0], prompts, 40, 6, temperature=0.0)


def test_pieces_keep_the_rows_in_order() -> None:
    rows = np.arange(5 * PIECE // 2 * 3, dtype=np.float32).reshape(-1, 3)
    for sizes in ([len(rows)], [1] * len(rows), [7, PIECE, 5, len(rows) - 12 - PIECE]):
        made = list(pieces(iter(np.split(rows, np.cumsum(sizes)[:-1]))))
        assert [len(piece) for piece in made] == [PIECE, PIECE, PIECE // 2]
        assert (np.concatenate(made) == rows).all()
    assert list(pieces(iter([]))) == []


@pytest.mark.parametrize(("content", "says"), [("", "holds no text"), ('{"ids": [1]}', "no text of two tokens")])
def test_a_text_without_a_pair_of_tokens_is_refused(
    content: str, says: str, bundles: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text(content)
    (tmp_path / "set.jsonl").write_text('{"turns": ["a"]}')
    argv = [str(bundles[0]), "--prompts", str(tmp_path / "set.jsonl"), "-o", str(tmp_path / "out"), "--threads", "1"]
    assert main([*argv, "--text", str(tmp_path / "text.jsonl")]) == 2
    assert says in capsys.readouterr().err
