"""Prompts to train on: of many kinds, none twice, none like a held-out one, and the same for the same seed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from eagle_tools.prompts.__main__ import main
from eagle_tools.prompts.articles import article_prompts, articles
from eagle_tools.prompts.dedupe import Seen
from eagle_tools.prompts.mix import FURTHER, JOINED, OWN_SHARE, TEMPERATURES, mixed, texts_of
from eagle_tools.prompts.own import SYSTEMS
from eagle_tools.prompts.passages import Function, functions, prose
from eagle_tools.prompts.templates import ON_CODE, made_up, on_code
from eagle_train.data import load_tokenizer
from text_targets import EOS, text_target

MODULE = '''
def area(width, height):
    """Return the area of a rectangle. LONG

    It is the product of both."""
    if width < 0 or height < 0:
        raise ValueError("negative")
    return width * height


def tiny():
    return 1
'''
LONG = " ".join(f"Sentence {number} tells what a part of this module is for and how." for number in "abcdefgh")


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "shapes.py").write_text(MODULE.replace("LONG", LONG), encoding="utf-8")
    (folder / "broken.py").write_text("def (", encoding="utf-8")
    return folder


def test_functions_come_without_their_docstrings(modules: Path) -> None:
    (function,) = functions(modules)
    assert function.name == "area" and function.summary.startswith("Return the area of a rectangle.")
    assert function.source.splitlines() == [
        "def area(width, height):",
        "    if width < 0 or height < 0:",
        '        raise ValueError("negative")',
        "    return width * height",
    ]
    compile(function.source, "area", "exec")
    tasks = {text for seed in range(60) for _, text, _ in on_code(random.Random(seed), [function])}
    assert len(tasks) >= len(ON_CODE)
    broken = [text for text in tasks if "Is there a bug" in text]
    assert broken and all(function.source not in text for text in broken)


def test_prose_has_no_code_and_no_repetition(modules: Path) -> None:
    taken = prose(modules)
    assert any("Sentence c tells what" in passage for passage in taken)
    assert len(taken) == len(set(taken))
    assert not [passage for passage in taken if ">>>" in passage or "://" in passage]
    assert all(40 <= len(passage.split()) <= 130 for passage in taken)


def test_copies_are_found_by_text_and_by_eight_words() -> None:
    seen = Seen(["Who wrote the book about the two cities, and when was it printed?", "Why?"])
    assert not seen.is_new("why")
    assert not seen.is_new("Tell me: who wrote the BOOK about the two cities -- now")  # eight words
    assert seen.is_new("who wrote the book about the two seas")  # seven
    assert not seen.is_new("Who wrote the book about the two seas?")
    text = "a passage of more than eight words that is used only once"
    assert seen.is_new(f"Summarize: {text}", text)
    assert not seen.is_new(f"Explain this to me: {text}")
    assert seen.is_new("How many apples does Anna have after she gives 3 away?")
    assert seen.is_new("How many apples does Anna have after she gives 4 away?")  # a template's words may repeat


def test_a_mix_has_all_kinds_and_no_repetition() -> None:
    own = [{"kind": "facts", "system": "Be brief.", "text": f"Why is number {n} odd?"} for n in range(50) for _ in "ab"]
    passages = [f"{LONG.replace('part', f'part{n}')}" for n in range(5)]
    code = [Function("f", "def f():\n    a = 1\n    b = 2\n    return a + b", "")]
    held_out = ["Why is number 7 odd?", passages[0]]
    rows = mixed(own, passages, code, held_out, 200, seed=3)
    assert (
        rows == mixed(own, passages, code, held_out, 200, seed=3) != mixed(own, passages, code, held_out, 200, seed=4)
    )
    texts = [row["messages"][-1]["content"] for row in rows]
    assert len(set(texts)) == len(rows) == 200
    assert sum("is number" in text for text in texts) == 49 <= OWN_SHARE * 200
    assert "Why is number 7 odd?" not in texts
    assert not [text for text in texts if passages[0] in text]
    assert {"facts", "code", "maths", "tables", "extraction", "writing"} <= {row["kind"] for row in rows}
    assert {row.get("temperature") for row in rows} == {settings.get("temperature") for _, settings in TEMPERATURES}
    assert {row.get("further", 0) for row in rows} == set(range(len(FURTHER)))
    assert {len(row["messages"]) for row in rows} == {1, 2}


def test_requests_for_articles_differ() -> None:
    rows = list(article_prompts(200, seed=2))
    assert rows == list(article_prompts(200, seed=2))
    texts = {row["messages"][0]["content"] for row in rows}
    assert len(texts) > 190 and not [text for text in texts if "{" in text]
    assert {row["max_new_tokens"] for row in rows} == {512}


def test_articles_that_are_long_enough_are_texts_to_ask_about(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, file, out = text_target(tmp_path / "target"), tmp_path / "articles.jsonl", tmp_path / "out"
    report = "The bridge of Leeds was closed on Monday, said the mayor. " * 8
    question = {"role": "user", "content": "Write."}
    rows = [{"messages": [question, {"role": "assistant", "content": text}]} for text in (f" {report}", "Too short.")]
    assert list(articles([*rows, {"messages": [question]}])) == [report.strip()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = ["--articles", str(file), "--modules", str(modules)]
    monkeypatch.setattr("eagle_tools.prompts.__main__.prose", lambda root: [])  # thousands of this machine's texts
    assert main(["mix", str(target), *files, "--count", "40", "-o", str(out)]) == 0
    assert "The bridge of Leeds was closed" in (out / "train-00.jsonl").read_text(encoding="utf-8")


def test_half_of_the_passages_are_joined_to_long_texts() -> None:
    passages = [f"passage {n}" for n in range(100)]
    texts = texts_of(random.Random(0), passages)
    assert texts[:50] == passages[:50] and "\n\n".join(texts[50:]) == "\n\n".join(passages[50:])
    assert {text.count("passage") for text in texts[50:-1]} <= set(range(JOINED[0], JOINED[1] + 1))


def test_made_up_problems_differ() -> None:
    maker = made_up(random.Random(0))
    texts = [next(maker)[1] for _ in range(300)]
    assert len(set(texts)) > 285


def test_from_headers_to_files(modules: Path, tmp_path: Path) -> None:
    """The target's answers stand in the file that `eagle-train generate` would write."""
    target = text_target(tmp_path / "target")
    tokenizer = load_tokenizer(target, "here")
    headers, asked, out = tmp_path / "headers.jsonl", tmp_path / "asked.jsonl", tmp_path / "out"
    assert main(["headers", str(target), "--count", "40", "-o", str(headers)]) == 0
    rows = [json.loads(line) for line in headers.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 40 and {row["kind"] for row in rows} <= set(SYSTEMS)
    for row in rows:
        system = f"<system>{row['system']}\n" if row["system"] else ""
        assert tokenizer.decode(row["ids"]) == f"<s>{system}<user>"
    texts = [
        "What is the sum of 3 and 4?",
        "too short",
        "Without an end there",
        *(f"Who is number {n}?" for n in range(37)),
    ]
    lines = []
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        new = [*tokenizer(text, add_special_tokens=False)["input_ids"], *([] if number == 2 else [EOS])]
        lines.append(json.dumps({"ids": row["ids"] + new, "prompt_tokens": len(row["ids"])}))
    asked.write_text("\n".join(lines) + "\n", encoding="utf-8")
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"turns": ["who is number 5"]}\n', encoding="utf-8")
    files = ["--headers", str(headers), "--asked", str(asked), "--held-out", str(held_out), "-o", str(out)]
    files += ["--modules", str(modules)]
    assert main(["mix", str(target), *files, "--count", "70", "--evaluation", "10", "--shards", "2"]) == 0
    taken = {path.name: path.read_text(encoding="utf-8").splitlines() for path in out.iterdir()}
    assert {name: len(rows) for name, rows in taken.items()} == {
        "eval.jsonl": 10,
        "train-00.jsonl": 30,
        "train-01.jsonl": 30,
    }
    asked_texts = [json.loads(line)["messages"][-1]["content"] for rows in taken.values() for line in rows]
    assert texts[0] in asked_texts and "Who is number 6?" in asked_texts
    assert not {"too short", "Without an end there", "Who is number 5?"} & set(asked_texts)
    assert main(["mix", str(target), "--count", "5", "--evaluation", "5", "-o", str(out)]) == 2
    assert main(["mix", str(target), "--count", "5", "--headers", str(out / "eval.jsonl"), "-o", str(out)]) == 2
