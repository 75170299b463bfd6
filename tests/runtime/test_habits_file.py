"""Files of habits: what is kept, what is refused, and that they change no token."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from conftest import put_tokenizer
from eagle_runtime import EagleModel, RequestError
from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.commands.cli import main
from eagle_runtime.drafting.habits import SUCCESSORS, Habits
from eagle_runtime.opening.habits_file import FORMAT, HabitsFile
from insides import bundle_in


@pytest.fixture(scope="module")
def alone(bundle_of: Callable[..., Path]) -> Path:
    return bundle_of("alone", "int8")


def learned(path: Path, bundle: Path, seed: int, count: int = 50) -> HabitsFile:
    """A saved file of habits after `count` random rows."""
    file, rng = HabitsFile(path, bundle), np.random.default_rng(seed)
    for _ in range(count):
        context = tuple(rng.integers(0, file.habits.vocab_size, int(rng.integers(1, 4))).tolist())
        tokens = rng.choice(file.habits.vocab_size, int(rng.integers(1, SUCCESSORS + 1)), replace=False).tolist()
        file.habits.put([(context, dict(zip(tokens, rng.dirichlet(np.ones(len(tokens))).tolist(), strict=True)))])
    file.save()
    return file


def test_what_was_saved_is_read_again(alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "habits.bin"
    entries = learned(path, alone, 1).habits.entries()
    again = HabitsFile(path, alone).habits
    assert [context for context, _, _ in again.entries()] == [context for context, _, _ in entries]
    for (_, row, count), (_, old_row, old_count) in zip(again.entries(), entries, strict=True):
        assert row == pytest.approx(old_row, rel=1e-6) and count == pytest.approx(old_count)
        assert list(row) == list(old_row)
    assert again.learned == 0 and (os.name != "posix" or path.stat().st_mode & 0o77 == 0)
    few = Habits(again.vocab_size, most=7)
    few.restore(again.entries())
    assert few.entries() == again.entries()[-7:]


def test_an_empty_file_is_written_at_once_and_later_when_enough_was_learned(alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "habits.bin"
    file = HabitsFile(path, alone)
    empty = path.read_bytes()
    file.habits.put([((3,), {4: 1.0})])
    file.save(2)
    assert path.read_bytes() == empty
    file.save(1)
    assert len(HabitsFile(path, alone).habits) == 1


def spoiled(path: Path, **changed: Any) -> None:
    from safetensors import safe_open

    with safe_open(path, "numpy") as stored:
        metadata = stored.metadata()
    save_file({**load_file(path), **changed}, path, metadata)


@pytest.mark.parametrize(
    "name",
    ["contexts", "counts", "ends", "ids", "sums"],
)
def test_damaged_files_are_refused_and_left_alone(name: str, alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "habits.bin"
    learned(path, alone, 2)
    good, tensors = path.read_bytes(), load_file(path)
    vocab = HabitsFile(path, alone).habits.vocab_size
    array = tensors[name]
    wrong: list[Any] = [array[:-1], array.astype(np.float64), np.full_like(array, -2)]
    if name in ("contexts", "ids"):
        wrong.append(np.full_like(array, vocab))
    elif name in ("counts", "sums"):
        wrong += [np.full_like(array, np.nan), np.full_like(array, 1e9)]
    else:
        wrong += [array[::-1].copy(), array + 1]
    for values in wrong:
        path.write_bytes(good)
        spoiled(path, **{name: values})
        bad = path.read_bytes()
        with pytest.raises(RequestError, match=r"habits\.bin is damaged, or no file of habits; give another file name"):
            EagleModel.load(alone, threads=1, habits=path)
        assert path.read_bytes() == bad
    path.write_bytes(good)
    assert len(HabitsFile(path, alone).habits) > 50


@pytest.mark.parametrize("content", [b"", b"text of a user", bytes(40), b"\x10" + bytes(7) + b'{"a": [1, 2, 3]}'])
def test_other_files_are_refused_and_left_alone(content: bytes, alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(RequestError, match="damaged, or no file of habits"):
        EagleModel.load(alone, threads=1, habits=path)
    assert path.read_bytes() == content


def test_files_of_other_vocabularies_and_places_that_cannot_be_written(alone: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "habits.bin", tmp_path / "other"
    shutil.copytree(alone, other)
    put_tokenizer(other)
    learned(path, other, 3)
    before = path.read_bytes()
    with pytest.raises(RequestError, match="made with another tokenizer or vocabulary"):
        HabitsFile(path, alone)
    assert path.read_bytes() == before
    with pytest.raises(RequestError, match=r"cannot be written .*; give another file name"):
        HabitsFile(tmp_path / "no" / "folder.bin", alone)
    with pytest.raises(RequestError, match=r"cannot be read .* is not a regular file"):
        HabitsFile(tmp_path, alone)
    spoiled_format = load_file(path)
    save_file(spoiled_format, path, {"format": FORMAT + "0", "text": ""})
    with pytest.raises(RequestError, match="damaged, or no file of habits"):
        HabitsFile(path, other)


def test_a_file_that_cannot_be_written_later_is_warned_of(alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    file = learned(folder / "habits.bin", alone, 4)
    shutil.rmtree(folder)
    file.habits.put([((3,), {4: 1.0})])
    with pytest.warns(EagleWarning, match="could not be written"):
        file.save()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_habits_of_an_earlier_run_draft_and_change_no_token(
    precision: str, bundle_of: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    path, bundle = tmp_path / "habits.bin", bundle_of("alone", precision)
    settings: dict[str, Any] = {"max_new_tokens": 32, "ignore_eos": True}
    answers: list[list[Any]] = []
    for _ in range(2):
        with EagleModel.load(bundle, threads=1, habits=path) as model:
            assert model.default_method == "recycling"
            rows = []
            for temperature in (0.0, 1.0):
                settings |= {"temperature": temperature, "seed": 5}
                plain = model.generate(prompts[0], method="vanilla", **settings)
                cycles: list[Any] = []
                drafted = model.generate(prompts[0], on_cycle=cycles.append, **settings)
                assert drafted.token_ids == plain.token_ids
                rows.append(plain.token_ids)
            twin = model.twin()
            assert bundle_in(twin).habits is bundle_in(model).habits and len(bundle_in(model).habits) > 10
            kept = bundle_in(model).habits.entries()
        answers.append(rows)
    assert answers[0] == answers[1]
    file = HabitsFile(path, bundle)
    assert [context for context, _, _ in file.habits.entries()] == [context for context, _, _ in kept]


def test_the_command_keeps_habits(
    alone: Path, bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "habits.bin"
    given = ["--prompt-ids", "5,6,7", "--max-new-tokens", "12", "--threads", "1", "--habits", str(path)]
    assert main([str(alone), *given]) == 0
    assert len(HabitsFile(path, alone).habits) > 5
    capsys.readouterr()
    with_head = str(bundle_of("eagle1", "int8"))
    path.unlink()
    assert main([with_head, *given]) == 2
    assert "--habits is for method recycling, but method eagle+lookup drafts; add" in capsys.readouterr().err
    assert main([with_head, *given, "--method", "recycling"]) == 0
    assert len(HabitsFile(path, Path(with_head)).habits) > 5
