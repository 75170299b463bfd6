"""The script that trained the shipped pair: its data, and its target on a few steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

import small_llama
import train_demo_pair
from eagle_runtime.base.errors import EagleError
from eagle_tools.questions import read_questions

TOKENIZER = Path(train_demo_pair.PAIR) / "target" / "tokenizer.json"
SOURCE = '''
def first(values, default=None):
    """Return the first of the values, or the default where there is none.

    values: any iterable, which is read one item far.
    default: what is returned for an empty one.
    """
    for value in values:
        return value
    return default


def short():
    pass
'''


def test_held_out_files_are_few_and_the_same_everywhere() -> None:
    paths = [f"package/module_{number}.py" for number in range(2000)]
    held = [path for path in paths if train_demo_pair.is_held_out(path)]
    assert 30 < len(held) < 90
    assert train_demo_pair.is_held_out("venv/__init__.py") == train_demo_pair.is_held_out("venv/__init__.py")


def test_openings_are_the_first_lines_of_long_enough_functions() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    (opening,) = train_demo_pair.openings(tokenizer, [("a.py", SOURCE)])
    assert SOURCE.lstrip().startswith(opening) and opening.endswith("\n")
    low, high = train_demo_pair.PROMPT_TOKENS
    assert low <= len(tokenizer.encode(opening).ids) <= high


def test_held_out_prompts_were_not_trained_on() -> None:
    """Read from this Python's own library: its held-out files hold the prompts, unless its text has changed."""
    prompts = [question.turns[0] for question in read_questions(train_demo_pair.PAIR / "heldout.jsonl")]
    held: list[str] = []
    trained: list[str] = []
    for path, text in train_demo_pair.sources():
        (held if train_demo_pair.is_held_out(path) else trained).append(text)
    seen = [prompt for prompt in prompts if any(prompt in text for text in trained)]
    assert len(prompts) == train_demo_pair.PROMPTS and not seen
    assert any(prompt in text for prompt in prompts for text in held)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Token files of a text that is easy to learn."""
    for name in ("train", "heldout"):
        np.tile(np.arange(7, dtype=np.uint16), 700).tofile(tmp_path / f"{name}.bin")
    return tmp_path


@pytest.mark.slow
def test_target_learns_continues_where_it_stopped_and_is_saved_in_fp16(work: Path) -> None:
    small_llama.train_target(work, work / "target", 4.0, workers=2)
    journal = work / "target.log.jsonl"
    spent = json.loads(journal.read_text(encoding="utf-8").splitlines()[-1])["seconds"]  # over 4 on a slow machine
    small_llama.train_target(work, work / "target", spent + 4.0, workers=2)
    rows = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    starts = [row["step"] for row in rows if "workers" in row]
    ends = [row for row in rows if row.get("done")]
    assert starts == [0, ends[0]["step"]] and ends[1]["step"] > ends[0]["step"] >= 1
    assert ends[1]["held_out_loss"] < ends[0]["held_out_loss"] < 9
    model = LlamaForCausalLM.from_pretrained(work / "target", dtype="auto")
    assert model.dtype == torch.float16


def test_stages_in_the_wrong_order_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work, out = ["-w", str(tmp_path)], ["-o", str(tmp_path / "out")]
    assert train_demo_pair.main(["target", *work, *out]) == 2
    assert "run the" in capsys.readouterr().err


def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"broken did not reach its end \(.*config.json is missing"):
        train_demo_pair.in_parallel(
            [("broken", ["generate", str(tmp_path), "--data", "none.jsonl", "-o", str(tmp_path / "o")])], tmp_path
        )


def test_an_edit_holds_a_text_its_continuation_and_the_text_under_another_name(tmp_path: Path) -> None:
    assert train_demo_pair.renamed("def count(self, x):\n    return self.count + x.counter") == (
        "def other(self, x):\n    return self.other + x.counter"
    )
    assert train_demo_pair.renamed("if self: pass") == "if self: pass"
    shipped = (train_demo_pair.PAIR / "edits.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [question.turns[0] for question in read_questions(train_demo_pair.PAIR / "heldout.jsonl")]
    for edit in read_questions(train_demo_pair.PAIR / "edits.jsonl"):
        text = prompts[int(edit.id)]
        assert edit.turns[0].startswith(text) and edit.turns[0].endswith("\n\n\n" + train_demo_pair.renamed(text))
    shutil.copytree(train_demo_pair.PAIR / "target", tmp_path / "target")
    first = (train_demo_pair.PAIR / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)[:6]
    (tmp_path / "heldout.jsonl").write_text("".join(first), encoding="utf-8")
    assert train_demo_pair.main(["edits", "-w", str(tmp_path / "work"), "-o", str(tmp_path)]) == 0
    made = (tmp_path / "edits.jsonl").read_text(encoding="utf-8").splitlines()
    assert 0 < len(made) < 6 and made == shipped[: len(made)]
