"""`python -m eagle_tools.batches`: several answers at once, in this process and over HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import GOLDEN
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_tools import batches
from eagle_tools.served import Command, eagle_serve, served

PROMPTS = [[5, 9, 30, 11], [7, 8, 9], [40, 41, 42, 43, 44]]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"question_id": n, "turns": [f"def f{n}(self, other):"]} for n in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_server_answers_as_the_model_does(chatting: Path) -> None:
    bundle = chatting
    with EagleModel.load(bundle, threads=1) as model:
        results = [model.generate(ids, max_new_tokens=9, ignore_eos=True, temperature=0) for ids in PROMPTS]
    for method in ("vanilla", "eagle"):
        with served(eagle_serve(bundle, method, 2, 1, 64)) as client:
            assert client.answers(PROMPTS, 9) == [list(result.token_ids) for result in results]
            with pytest.raises(RequestError, match="answered 400"):
                client.answers([[1] * 90], 9)


def test_a_server_that_does_not_start_says_why() -> None:
    program = "print('no weights here'); raise SystemExit(3)"
    with (
        pytest.raises(RequestError, match=r"it ended with status 3 before it was ready: no weights here"),
        served(Command("it", (sys.executable, "-c", program))),
    ):
        raise AssertionError("it did not start")


def test_another_system_begins_each_group() -> None:
    """As in eagle-bench: the one that always followed the same other would find the same caches and clocks."""
    asked: list[str] = []

    def system(name: str) -> batches.Answer:
        def answer(prompts: Sequence[list[int]], count: int) -> batches.Answers:
            asked.append(name)
            return [[0] * count for _ in prompts]

        return answer

    timed = batches.measure({name: system(name) for name in "abc"}, PROMPTS, 1, 2)
    assert "".join(asked) == "abc" + "abc" + "bca" + "cab"
    assert [(one.system, len(one.rates), one.answers) for one in timed] == [(name, 3, [[0, 0]] * 3) for name in "abc"]


def test_the_table_has_all_widths(chatting: Path, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", str(questions), "--max-new-tokens", "6", "--widths", "1,2", "--threads", "1"]
    assert batches.main([str(chatting), *options]) == 0
    said = capsys.readouterr().out
    assert [line.split("|")[1:3] for line in said.splitlines() if "ours, " in line] == [
        [" 1 ", " ours, vanilla "], [" 1 ", " ours, eagle+lookup "],
        [" 2 ", " ours, vanilla "], [" 2 ", " ours, eagle+lookup "],
    ]  # fmt: skip
    assert "1 thread" in said and "answers of ours that differ from those alone: 0" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--llama-server", "nowhere", "--target", str(GOLDEN / "target")], "there is no program at nowhere; build"),
        (["--llama-server", sys.executable], "--llama-server needs the weights to serve; give --target FOLDER"),
        (["--target", "a", "--target", "b"], "there are 1 bundles but 2 --target; give one for each"),
        (["--widths", "1,5"], "there are 4 prompts, but a width of 5; raise --count"),
    ],
)
def test_wrong_input_is_one_sentence(
    chatting: Path,
    questions: Path,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert batches.main([str(chatting), "--prompts", str(questions), *options]) == 2
    assert message in capsys.readouterr().err
