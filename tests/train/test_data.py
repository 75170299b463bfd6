"""Training text: which tokens carry loss, windows, draft vocabulary, answers by the target, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from conftest import GOLDEN, load_trace
from eagle_train import data
from eagle_train.batches import Order
from eagle_train.cli import main
from eagle_train.config import Sampling
from eagle_train.data import Example, TextReader, Windows, write_windows
from eagle_train.dialogues import Prompts
from eagle_train.errors import TrainError
from eagle_train.head import choose_vocabulary, coverage
from text_targets import CHAT, EOS, text_target

# As reasoning models do: thoughts of earlier answers are dropped, and the prompt opens with an empty thought.
REWRITING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content.split('|')[-1] }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>||{% endif %}"
)


DIALOGUE_OF_TWO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def as_text(ids: Sequence[int]) -> str:
    return "".join("_$^"[i] if i < 3 else chr(i - 3) for i in ids)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(target: Path, *paths: Path, pattern: str = "**/*") -> list[Example]:
    return list(TextReader(target, 256, [EOS], pattern).read(paths))


DIALOGUE = [
    {"from": "gpt", "value": "lost"},  # an answer before the first question has nothing to follow from
    {"from": "system", "value": "be kind"},
    {"from": "human", "value": "hi"},
    {"from": "gpt", "value": "hello"},
    {"from": "human", "value": "1+1?"},
    {"from": "gpt", "value": "two"},
]


def test_large_files_are_read_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_rows(tmp_path / f"{name}.jsonl", [{"ids": [7, ord(name)]}, {"ids": "bad"}]) for name in "cab"]
    one = TextReader(tmp_path, 256, [EOS])
    wanted = list(one.read(files))
    monkeypatch.setattr(data, "APART", 0)
    several = TextReader(tmp_path, 256, [EOS])
    assert list(several.read(files)) == wanted and [each.ids[1] for each in wanted] == [*map(ord, "cab")]
    assert (several.skipped, several.skip_reason) == (one.skipped, one.skip_reason) and one.skipped == 3


@pytest.mark.parametrize("spelling", ["conversations", "messages"])
def test_only_answers_and_their_ends_carry_loss(tmp_path: Path, spelling: str) -> None:
    rows: list[dict[str, Any]] = DIALOGUE
    if spelling == "messages":
        roles = {"gpt": "assistant", "human": "user", "system": "system"}
        rows = [{"role": roles[row["from"]], "content": row["value"]} for row in DIALOGUE]
    target = text_target(tmp_path / "target")
    (example,) = read(target, write_rows(tmp_path / "a.jsonl", [{spelling: rows}]))
    text = as_text(example.ids)
    assert text == "^<system>be kind\n<user>hi\n<assistant>hello$\n<user>1+1?\n<assistant>two$\n"
    marked = "".join(char if on else "." for char, on in zip(text, example.mask, strict=True))
    assert marked.replace(".", " ").split() == ["hello$", "two$"]
    assert sum(example.mask) == len("hello$two$")


def test_the_day_of_llamas_template_is_that_of_the_first_run(tmp_path: Path) -> None:
    """A run that is resumed on another day reads the same text, and answers are given on the day that is learned."""
    template = Path(__file__).parents[1] / "data" / "chat_templates" / "llama3_2.jinja"
    target = text_target(tmp_path / "target", template.read_text(encoding="utf-8"))
    (example,) = read(target, write_rows(tmp_path / "a.jsonl", [GOOD]))
    prompt = as_text(Prompts(tmp_path, target, 256, 900, Sampling()).rendered(DIALOGUE_OF_TWO[:1], None))
    assert "Today Date: 26 Jul 2024" in prompt and as_text(example.ids).startswith(prompt)


def test_a_template_that_rewrites_earlier_turns_gives_one_example_per_answer(tmp_path: Path) -> None:
    target = text_target(tmp_path / "target", REWRITING)
    turns = [("user", "q"), ("assistant", "thought|a"), ("user", "r"), ("assistant", "idea|b")]
    rows = [{"messages": [{"role": role, "content": content} for role, content in turns]}]
    first, second = read(target, write_rows(tmp_path / "a.jsonl", rows))
    assert as_text(first.ids) == "<user>q\n<assistant>thought|a$\n"
    assert as_text(second.ids) == "<user>q\n<assistant>a$\n<user>r\n<assistant>idea|b$\n"
    for example, answer in ((first, "thought|a$"), (second, "idea|b$")):
        assert as_text([i for i, on in zip(example.ids, example.mask, strict=True) if on]) == answer


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_thoughts_that_a_template_leaves_out_are_learned(tmp_path: Path, opened: str) -> None:
    """DeepSeek's leaves them out of every answer, though the target writes them first, and opens them itself."""
    template = Path(__file__).parents[1] / "data" / "chat_templates" / "deepseek_r1_distill.jinja"
    ascii_template = template.read_text(encoding="utf-8").replace("｜", "|").replace("▁", " ")
    target = text_target(tmp_path / "target", ascii_template)
    turns = [("user", "q"), ("assistant", f"{opened}thought</think>a"), ("user", "r"), ("assistant", "b")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    first, second = read(target, write_rows(tmp_path / "a.jsonl", [row]))
    assert as_text(first.ids) == "^<|User|>q<|Assistant|><think>\nthought</think>a$"
    assert as_text([i for i, on in zip(first.ids, first.mask, strict=True) if on]) == "thought</think>a$"
    assert as_text(second.ids).startswith("^<|User|>q<|Assistant|>a<")
    assert as_text([i for i, on in zip(second.ids, second.mask, strict=True) if on]) == "b<|end of sentence|>"


def test_conversations_the_template_refuses_are_counted(tmp_path: Path) -> None:
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    target = text_target(tmp_path / "target", strict + CHAT)
    bad = {"messages": [{"role": "user", "content": "q"}, {"role": "tool", "content": "x"}]}
    bad["messages"].append({"role": "assistant", "content": "a"})
    reader = TextReader(target, 256, [EOS])
    path = write_rows(tmp_path / "a.jsonl", [bad, {"conversations": DIALOGUE}])
    assert len(list(reader.read([path]))) == 1
    assert reader.skipped == 1
    assert "no tools" in reader.skip_reason and f"{path}, line 1" in reader.skip_reason


def test_plain_text_and_folders(tmp_path: Path) -> None:
    target = text_target(tmp_path / "target")
    folder = tmp_path / "code" / "deep"
    folder.mkdir(parents=True)
    (folder / "b.py").write_text("x = 1\n", encoding="utf-8", newline="\n")
    (folder.parent / "a.py").write_text("y = 2\n", encoding="utf-8", newline="\n")
    (folder / "c.bin").write_bytes(b"\xff\xfe\x00")
    examples = read(target, tmp_path / "code", pattern="**/*.py")
    assert [as_text(e.ids) for e in examples] == ["y = 2\n", "x = 1\n"]
    assert all(all(e.mask) for e in examples)


def test_rows_of_ids_need_no_tokenizer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"ids": [5, 6, 7, 8], "prompt_tokens": 3}, {"ids": [9, 9]}])
    first, second = read(GOLDEN / "target", path)
    assert first.mask == [False, False, False, True]
    assert second.mask == [True, True]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"ids": [1, 256]}', "a.jsonl, line 1: ids must be"),
        ("a.jsonl", b'{"ids": [1, true]}', "a.jsonl, line 1: ids must be"),
        ("a.jsonl", b'\n{"ids": [1', "a.jsonl, line 2 is not readable JSON"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1 does not hold a JSON object"),
        ("a.jsonl", b'{"id": 1}', "a.jsonl, line 1: the row holds no 'ids'"),
        ("a.jsonl", b'{"ids": [1], "prompt_tokens": 2}', "prompt_tokens is 2"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a message needs role and content"),
        ("a.jsonl", b'{"messages": 3}', "a message needs role and content"),
        ("a.txt", b"ab\xff", "not UTF-8 text (byte 2)"),
        ("a.txt", b"ab\0c", "is not text"),
        ("a.txt", b"hello", "no tokenizer.json"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_sentence(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainError) as caught:
        read(GOLDEN / "target", tmp_path / name)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("[" * 100_000, "a.jsonl, line 1 is not readable JSON"),
        (r'{"text": "ab\ud800"}', "a.jsonl, line 1 holds half a character"),
        (r'{"messages": [{"role": "user", "content": "\udfff"}]}', "a.jsonl, line 1 holds half a character"),
        ('{"text": ["ab"]}', "a.jsonl, line 1: the row holds no"),
        ('{"messages": [{"role": ["user"], "content": "x"}]}', "a.jsonl, line 1: a message needs role and content"),
    ],
)
def test_rows_that_no_tokenizer_reads(tmp_path: Path, row: str, says: str) -> None:
    (tmp_path / "a.jsonl").write_text(row)
    with pytest.raises(TrainError, match=says):
        read(text_target(tmp_path / "target"), tmp_path / "a.jsonl")


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    row = {"text": "x\u2028😀"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (example,) = read(text_target(tmp_path / "target"), tmp_path / "a.jsonl")
    assert as_text(example.ids) == "x"


@pytest.mark.parametrize("template", ["{{ messages[0].content.nosuch() }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"])
def test_a_template_that_fails(tmp_path: Path, template: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Skipped in training, as any conversation that the template refuses; one line where answers are asked for."""
    target = text_target(tmp_path / "target", template)
    data = write_rows(tmp_path / "a.jsonl", [{"turns": ["hi"], "messages": DIALOGUE_OF_TWO}])
    with pytest.raises(TrainError, match="line 1: the chat template refuses it"):
        read(target, data)
    assert answer(target, data, tmp_path / "out.jsonl") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the chat template of {target} fails on a prompt" in line


TOOL_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
GOOD = {"messages": DIALOGUE_OF_TWO}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]}, "role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]}, "only text is learned"),
        ({"messages": "hi"}, "role and content"),
        ({"prompt": 5, "chosen": DIALOGUE_OF_TWO[1:]}, "role and content"),
        ({"messages": DIALOGUE_OF_TWO, "tools": "{"}, "tools are text that is not JSON"),
        ({"messages": DIALOGUE_OF_TWO[:1]}, "no message of the assistant follows one of the user (the roles are user)"),
        ({"conversations": [{"from": "user", "value": "a"}, {"from": "AI", "value": "b"}]}, "(the roles are user, AI)"),
        ({"something": 1}, "the row holds no 'ids'"),
        ({"ids": [1, 999]}, "ids must be"),
        ({"text": "\ud800"}, "half a character"),
        ([1], "does not hold a JSON object"),
        ("{", "is not readable JSON"),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path, form: str, bad: Any, says: str) -> None:
    rows = [json.dumps(GOOD), bad if isinstance(bad, str) else json.dumps(bad), json.dumps(GOOD)]
    path = tmp_path / ("a.jsonl" if form == "lines" else "a.json")
    path.write_text("\n".join(rows) if form == "lines" else f"[\n{','.join(rows)}\n]", encoding="utf-8")
    reader = TextReader(text_target(tmp_path / "target"), 256, [EOS])
    damaged_array = form == "array" and bad == "{"  # nothing after it can be read either
    assert len(list(reader.read([path]))) == (1 if damaged_array else 2)
    assert reader.skipped == 1
    assert says in reader.skip_reason and f"{path}, {'line' if form == 'lines' else 'row'} 2" in reader.skip_reason


def test_where_every_row_is_left_out_the_first_reason_is_given(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"messages": 3}] * 5)
    with pytest.raises(TrainError, match=r"line 1: a message needs .*, and 4 more rows cannot be used"):
        read(GOLDEN / "target", path)


PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
QUESTION, HO = "<user>hi\n<assistant>", "ho$"


@pytest.mark.parametrize(
    ("row", "text", "learned"),
    [
        ({"messages": [{"role": "user", "content": PARTS}, DIALOGUE_OF_TWO[1]]}, "^<user>h\ni\n<assistant>ho$\n", HO),
        ({"conversation": [{"from": "chatgpt", "value": "x"}, *DIALOGUE_OF_TWO]}, f"^{QUESTION}ho$\n", HO),
        ({"prompt": DIALOGUE_OF_TWO[:1], "completion": DIALOGUE_OF_TWO[1:]}, f"^{QUESTION}ho$\n", HO),
        ({"prompt": "hi", "chosen": DIALOGUE_OF_TWO[1:], "rejected": []}, f"^{QUESTION}ho$\n", HO),
        ({"prompt": "hi", "chosen": DIALOGUE_OF_TWO, "rejected": []}, f"^{QUESTION}ho$\n", HO),
        ({"prompt": "hi ", "completion": "ho"}, "hi ho", "ho"),
        ({"instruction": "hi", "input": "", "output": "ho"}, f"^{QUESTION}ho$\n", HO),
        ({"text": "hi", "messages": DIALOGUE_OF_TWO}, f"^{QUESTION}ho$\n", HO),
        ({"text": "hi"}, "hi", "hi"),
        ({"text": "hi", "messages": None, "ids": None, "prompt": None}, "hi", "hi"),
        ({"messages": None, "conversations": DIALOGUE_OF_TWO, "tools": None}, f"^{QUESTION}ho$\n", HO),
        ({"messages": [DIALOGUE_OF_TWO[0], {**DIALOGUE_OF_TWO[1], "tool_calls": []}]}, f"^{QUESTION}ho$\n", HO),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_forms_of_rows(tmp_path: Path, row: dict[str, Any], text: str, learned: str) -> None:
    """By a template that takes one call or none, as Llama-3's do."""
    one_call = "{% for m in messages %}{{ m.tool_calls[0].id if 'tool_calls' in m }}{% endfor %}"
    target = text_target(tmp_path / "target", one_call + CHAT)
    for name, content in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row], indent=1))):
        (tmp_path / name).write_text(content)
        (example,) = read(target, tmp_path / name)
        assert as_text(example.ids) == text
        assert as_text([i for i, on in zip(example.ids, example.mask, strict=True) if on]) == learned


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (json.dumps([GOOD, GOOD]), 2),
        (json.dumps({"data": [GOOD, GOOD, GOOD]}), 3),
        (json.dumps(GOOD, indent=2), 1),
        (f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n", 2),  # lines under the other name
    ],
    ids=["array", "object of rows", "one row", "lines"],
)
def test_json_files_of_rows(tmp_path: Path, content: str, count: int) -> None:
    (tmp_path / "a.json").write_text(content)
    examples = read(text_target(tmp_path / "target"), tmp_path / "a.json")
    assert [as_text(example.ids) for example in examples] == [f"^{QUESTION}ho$\n"] * count


@pytest.mark.parametrize("content", ['{"name": "x", "version": 1}', "[1, 2]", "// no JSON"])
def test_other_json_files_are_text(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    (example,) = read(text_target(tmp_path / "target"), tmp_path / "a.json")
    assert as_text(example.ids) == content and all(example.mask)


def test_calls_of_tools_reach_the_template(tmp_path: Path) -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.x }}){% endfor %}"
        "{{ m.content or '' }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    calls = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    messages = [DIALOGUE_OF_TWO[0], calls, {"role": "tool", "content": "1", "tool_call_id": "1"}, DIALOGUE_OF_TWO[1]]
    row = {"messages": messages, "tools": json.dumps([{"type": "function", "function": {"name": "f"}}])}
    (example,) = read(text_target(tmp_path / "target", template), write_rows(tmp_path / "a.jsonl", [row]))
    assert as_text(example.ids) == "[f]<user>hi<assistant>f(1)$<tool>1<assistant>ho$"
    assert as_text([i for i, on in zip(example.ids, example.mask, strict=True) if on]) == "f(1)$ho$"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_files_with_the_byte_order_mark_of_windows(tmp_path: Path, name: str) -> None:
    content = "hi" if name == "a.txt" else json.dumps(GOOD) if name == "a.jsonl" else json.dumps([GOOD])
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    reader = TextReader(text_target(tmp_path / "target"), 256, [EOS])
    (example,) = reader.read([tmp_path / name])
    assert as_text(example.ids) == ("hi" if name == "a.txt" else f"^{QUESTION}ho$\n") and reader.skipped == 0


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="does not exist"):
        read(GOLDEN / "target", tmp_path / "nothing.jsonl")


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.integers(0, 10)), max_size=8),
    st.integers(4, 12),
    st.booleans(),
)
def test_windows_are_the_texts_cut_to_length(
    tmp_path_factory: pytest.TempPathFactory, texts: list[tuple[list[int], int]], seq_len: int, begin: bool
) -> None:
    prefix = [2] if begin else []
    examples = [Example(ids, [i >= prompt for i in range(len(ids))], prefix) for ids, prompt in texts]
    wanted = []
    for example in examples:
        for first in range(0, len(example.ids), seq_len - len(prefix)):
            part = slice(first, first + seq_len - len(prefix))
            ids = prefix + list(example.ids[part])
            mask = [False] * len(prefix) + list(example.mask[part])
            if any(mask[2:]):
                wanted.append((ids, mask))
    folder = tmp_path_factory.mktemp("windows")
    if not wanted:
        with pytest.raises(TrainError, match="nothing to learn from"):
            write_windows(examples, folder, seq_len, "data")
        return
    windows = write_windows(examples, folder, seq_len, "data")
    cut = [(windows.ids[w].tolist(), windows.mask[w].tolist()) for w in map(windows.window, range(len(windows)))]
    assert cut == wanted
    counts = windows.loss_counts(256)
    under_loss = [i for ids, mask in wanted for i, on in zip(ids, mask, strict=True) if on]
    assert counts.tolist() == [under_loss.count(token) for token in range(256)]


def with_bos(target: Path) -> Path:
    """Lets the tokenizer put a bos before each text, as Llama's do."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(target / "tokenizer.json"))
    return target


@pytest.mark.parametrize(
    ("row", "windows"),
    [
        ({"text": "abcdefgh"}, ["^abc", "^def", "^gh"]),
        ({"text": "^abcdef"}, ["^abc", "^def"]),  # rendered by a chat template, so it has its bos
        ({"prompt": "^ab", "completion": "cdef"}, ["^abc", "^def"]),
        ({"ids": [2, *(ord(char) + 3 for char in "abcdef")]}, ["^abc", "^def"]),
        ({"ids": [ord(char) + 3 for char in "abcdef"]}, ["abcd"]),
        ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "abcdef"}]}, ["^abc", "^def"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_every_window_of_a_text_with_a_bos_begins_with_it_once(
    tmp_path: Path, row: dict[str, Any], windows: list[str]
) -> None:
    """The target never reads a text without it, and states of a second one are unlike others."""
    target = with_bos(
        text_target(tmp_path / "target", "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    row = json.loads(json.dumps(row).replace("^", "<s>"))
    examples = read(target, write_rows(tmp_path / "a.jsonl", [row]))
    cut = write_windows(examples, tmp_path / "windows", 4, "data")
    assert [as_text(cut.ids[cut.window(index)].tolist()) for index in range(len(cut))] == windows


def test_ids_of_another_tokenizer_are_left_out(tmp_path: Path) -> None:
    target = text_target(tmp_path / "target")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<{number}>" for number in range(200)])
    tokenizer.save(str(target / "tokenizer.json"))
    reader = TextReader(target, 256, [EOS])
    assert len(list(reader.read([write_rows(tmp_path / "a.jsonl", [{"text": "ab<199>"}, {"text": "abc"}])]))) == 1
    assert "line 1: the tokenizer gives the id 330, but the target knows 256" in reader.skip_reason


def test_digest_tells_data_apart(tmp_path: Path) -> None:
    def digest(name: str, *examples: Example) -> str:
        windows: Windows = write_windows(examples, tmp_path / name, 8, name)
        return windows.digest

    same = Example([1, 2, 3, 4], [True] * 4)
    first = digest("a", same, same)
    assert digest("b", same, same) == first
    assert digest("c", Example([1, 2, 3, 4] * 2, [True] * 8)) != first  # the same ids, cut otherwise
    assert digest("d", same, Example([1, 2, 3, 4], [False, True, True, True])) != first


def test_draft_vocabulary_keeps_the_frequent_and_the_special() -> None:
    counts = np.array([0, 7, 3, 0, 3, 9])
    vocabulary = choose_vocabulary(counts, 3, [0])
    assert vocabulary is not None
    assert vocabulary.ids.tolist() == [0, 1, 5]
    assert vocabulary.member.tolist() == [True, True, False, False, False, True]
    assert coverage(counts, vocabulary) == pytest.approx(16 / 22)
    tied = choose_vocabulary(counts, 4, [0])
    assert tied is not None and tied.ids.tolist() == [0, 1, 2, 5]
    assert choose_vocabulary(counts, None, []) is None
    assert coverage(counts, None) == 1.0
    for size in (1, 7):
        with pytest.raises(TrainError, match="change draft_vocab"):
            choose_vocabulary(counts, size, [0, 3])


@given(st.integers(1, 20), st.integers(1, 7), st.integers(1, 3), st.integers(0, 5))
def test_every_epoch_visits_every_window_once(count: int, batch: int, ranks: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(3, 9, count)
    orders = [Order(lengths, batch, seed, rank, ranks) for rank in range(ranks)]
    order = [i for s in range(-(-count * 2 // (batch * ranks))) for own in orders for i in own.windows(s)]
    assert sorted(order[:count]) == list(range(count))
    assert sorted(order[count : 2 * count]) == list(range(count))


@pytest.mark.parametrize("count", [1024, 1027])
def test_batches_hold_windows_of_like_length_in_no_order_of_length(count: int) -> None:
    """In every epoch, also where the windows are no whole number of batches."""
    lengths = np.random.default_rng(0).integers(10, 500, count)
    order = Order(lengths, 8, 0)
    batches = np.array([lengths[order.windows(step)] for step in range(3 * 128)])
    padded = batches.max(1).sum() * 8 / batches.sum()
    assert padded < 1.05 < lengths[:1024].reshape(128, 8).max(1).sum() * 8 / lengths[:1024].sum()
    assert abs(np.corrcoef(np.arange(128), batches[:128].mean(1))[0, 1]) < 0.3


def answer(target: Path, prompts: Path, out: Path, *options: str) -> int:
    command = ["generate", str(target), "--data", str(prompts), "-o", str(out), "--backend", "cpu", "--threads", "1"]
    return main([*command, *options])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_greedy_answers_are_the_targets_own(tmp_path: Path) -> None:
    """Prompts of all lengths in one batch, against the reference's greedy decoding, cut at the end of the text."""
    traces = load_trace("eagle2_tt16_d3_k4")["prompts"]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"ids": trace["prompt_ids"]} for trace in traces])
    out = tmp_path / "out.jsonl"
    assert answer(GOLDEN / "target", prompts, out, "--max-new-tokens", "64", "--batch-size", "5") == 0
    for row, trace in zip(rows_of(out), traces, strict=True):
        wanted = trace["first_64"]
        wanted = wanted[: wanted.index(EOS) + 1] if EOS in wanted else wanted
        assert row == {"ids": trace["prompt_ids"] + wanted, "prompt_tokens": len(trace["prompt_ids"])}


def test_samples_differ_and_a_seed_repeats_them(tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"ids": [84, 35]}, {"ids": [70, 114]}])
    outs = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        options = ["--temperature", "1.5", "--samples", "3", "--max-new-tokens", "12", "--seed", seed]
        assert answer(GOLDEN / "target", prompts, tmp_path / name, *options) == 0
        outs.append(rows_of(tmp_path / name))
    assert outs[0] == outs[1] != outs[2]
    assert [row["prompt_tokens"] for row in outs[0]] == [2] * 6
    assert len({tuple(row["ids"]) for row in outs[0]}) == 6


def test_every_turn_of_a_conversation_is_answered(tmp_path: Path) -> None:
    target = text_target(tmp_path / "target")
    old = {"conversations": DIALOGUE}
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"turns": ["Count: 1,", "Go on"]}, old, {"prompt": "Table of"}])
    out = tmp_path / "out.jsonl"
    assert answer(target, prompts, out, "--max-new-tokens", "8") == 0
    asked, kept, text = rows_of(out)
    assert [m["role"] for m in asked["messages"]] == ["user", "assistant"] * 2
    assert [m["content"] for m in asked["messages"][::2]] == ["Count: 1,", "Go on"]
    assert [m["role"] for m in kept["messages"]] == ["system", *["user", "assistant"] * 2]
    assert kept["messages"][2]["content"] != "hello"  # the old answer is gone
    assert text["prompt_tokens"] == len("Table of")
    examples = read(target, out)
    for example, row in zip(examples, (asked, kept), strict=False):
        loss = as_text([i for i, on in zip(example.ids, example.mask, strict=True) if on])
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        assert loss.replace("$", "") == "".join(answers)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"ids": []}, "line 1: the prompt is empty"),
        ({"ids": [-1]}, "ids must be"),
        ({"ids": [70] * 2048}, "context is 2048"),
        ({"turns": ["hi"]}, "no tokenizer.json"),
        ({"prompt": "hi"}, "no tokenizer.json"),
    ],
)
def test_prompts_that_cannot_be_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], says: str
) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", [row])
    assert answer(GOLDEN / "target", prompts, tmp_path / "out.jsonl") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]
