"""Answers written at once, on disk as they end: rows are refilled, runs go on after a stop, loops are cut."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_export.graphs.pair import open_pair
from eagle_train.answering import BUCKET, Request, Requests, TargetSampler
from eagle_train.cli import main
from eagle_train.config import Sampling
from eagle_train.data import load_tokenizer
from eagle_train.dialogues import Prompts, user_header
from eagle_train.errors import TrainError
from eagle_train.generate import Asker, _run_of
from eagle_train.graphed import GraphedSampler
from eagle_train.padded import PaddedSampler
from eagle_train.partial import PartialFile
from eagle_train.sampling import choose, cut_loop, uniform
from eagle_train.target import FrozenTarget
from listed_requests import Listed
from text_targets import CHAT, EOS, text_target

VOCAB = 61
Sampler = type[TargetSampler] | type[GraphedSampler] | type[PaddedSampler]
DIALOGUE = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("llama"), 0.4)


def random_llama(folder: Path, scale: float) -> Path:
    """Writes a Llama with biases, groups of three query heads, and no token that ends a text."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=3 * BUCKET,
        attention_bias=True,
        mlp_bias=True,
        eos_token_id=None,
        initializer_range=scale,
    )
    torch.manual_seed(3)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> FrozenTarget:
    return FrozenTarget(folder, torch.device("cpu"))


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    choices = np.random.default_rng(1)
    return [choices.integers(0, VOCAB, length).tolist() for length in lengths]


def answers(
    target: FrozenTarget,
    requests: Sequence[Request],
    rows: int,
    kind: Sampler = TargetSampler,
) -> dict[int, list[int]]:
    ended = list(kind(target, rows).answers(Listed(requests)))
    assert len(ended) == len(requests)
    return {request.number: tokens for request, tokens in ended}


@pytest.mark.parametrize("kind", [TargetSampler, GraphedSampler, PaddedSampler])
def test_rows_beside_others_write_what_each_writes_alone(target: FrozenTarget, kind: Sampler) -> None:
    """Across the ends of buckets and up to the end of the context, against the reference's own forward pass."""
    lengths = (1, 5, BUCKET - 3, BUCKET, BUCKET + 1, 3 * BUCKET - 4, 40, 2, 2 * BUCKET - 1, 7)
    limits = (140, 3, 9, 9, 8, 50, 20, 1, 12, 30)
    requests = [
        Request(ids, number, Sampling(temperature=number % 2 * 0.8, max_new_tokens=limit))
        for number, (ids, limit) in enumerate(zip(prompts(lengths), limits, strict=True))
    ]
    ended = answers(target, requests, 4, kind)
    for request in requests:
        tokens, count = ended[request.number], len(request.ids)
        assert len(tokens) == min(request.sampling.max_new_tokens, 3 * BUCKET - count)
        logits = target.model(torch.tensor([[*request.ids, *tokens[:-1]]])).logits[0, count - 1 :]
        wanted = choose(logits, [(request.sampling, request.number, place) for place in range(len(tokens))])
        assert tokens == wanted
    assert answers(target, requests, 64, kind) == ended


def test_a_token_depends_on_its_own_row_alone() -> None:
    logits = torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    plain, nucleus = Sampling(temperature=1), Sampling(temperature=0.7, top_p=0.8, seed=4)
    kinds = [Sampling(), plain, nucleus, Sampling(temperature=2, top_k=5)]
    rows = [(kinds[number % 4], number, number // 4) for number in range(40)]
    together = choose(logits, rows)
    assert together == [choose(logits[place : place + 1], [row])[0] for place, row in enumerate(rows)]
    assert together[::4] == logits[::4].argmax(-1).tolist()
    assert together != choose(logits, [(kinds[number % 4], number + 1, number // 4) for number in range(40)])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 0.6, 0), (1.3, 1.0, 4), (1.0, 0.7, 6), (2.0, 0.999, 0)]
)
def test_samples_follow_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    """Against the definition, over more tokens than a nucleus is first looked for in."""
    count, vocab = 4000, 400
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 1.5
    drawn = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    tokens = choose(row.expand(count, -1), [(drawn, number, 0) for number in range(count)])
    order = row.argsort(descending=True)
    probs = torch.softmax(row[order[: top_k or vocab]] / temperature, -1)
    probs[probs.cumsum(-1) - probs >= top_p] = 0
    wanted = torch.zeros(vocab).index_add(0, order[: top_k or vocab], probs / probs.sum())
    seen = torch.bincount(torch.tensor(tokens), minlength=vocab) / count
    assert not seen[wanted == 0].any()
    assert float((seen - wanted).abs().sum()) / 2 < 1.3 * float((wanted / count).sqrt().sum()) / 2


def test_random_numbers_are_even_and_unrelated() -> None:
    keys = [(seed, number, place) for seed in (0, 1) for number in range(50) for place in range(50)]
    numbers = uniform(np.array(keys, np.uint64))
    assert len(set(numbers.tolist())) == 5000
    assert np.histogram(numbers, 10, (0, 1))[0].min() > 400
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=0, max_size=20), st.integers(1, 20), st.integers(1, 5))
def test_a_text_ends_where_it_begins_to_repeat_itself(start: list[int], period: int, more: int) -> None:
    passage = [10 + place for place in range(period)]
    rounds = max(3, -(-32 // period)) + more
    text = [5, 4, *start, 4, *passage * rounds]
    assert cut_loop(text) == cut_loop([5, 4, *start, 4]) + passage
    once = [*range(200), *range(200)]
    assert cut_loop(once) == once


def test_a_loop_ends_an_answer_at_once(tmp_path: Path) -> None:
    target = FrozenTarget(random_llama(tmp_path / "dull", 0.02), torch.device("cpu"))  # soon repeats a token
    (ids,) = prompts([9])
    plain, cut = (
        answers(target, [Request(ids, 0, Sampling(max_new_tokens=120, cut_loops=loops))], rows=1)[0]
        for loops in (False, True)
    )
    assert len(plain) == 120
    assert cut == cut_loop(plain) != plain


def generate(folder: Path, rows: Path, out: Path, *options: str) -> list[str]:
    command = ["generate", str(folder), "--data", str(rows), "-o", str(out), "--backend", "cpu", "--threads", "1"]
    return [*command, "--temperature", "0.9", *options]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def interrupt_after(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the program interrupt itself, as Ctrl+C does, when it has written that many rows."""
    add, written = PartialFile.add, 0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background programs are started without it

    def adding(file: PartialFile, *row: Any) -> None:
        nonlocal written
        add(file, *row)
        written += 1
        if written == rows:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(PartialFile, "add", adding)


def test_a_stopped_run_goes_on(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that had ended are kept, half a line is not, and the file is the same as without the stop."""
    rows = write(tmp_path / "prompts.jsonl", [{"ids": ids} for ids in prompts([4] * 40)])
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    partial = tmp_path / "out.partial.jsonl"
    options = ["--max-new-tokens", "40", "--batch-size"]
    interrupt_after(3, monkeypatch)
    assert main(generate(folder, rows, out, *options, "2")) == 130
    finished = partial.read_bytes()
    assert 3 <= finished.count(b"\n") < 40
    assert not out.exists()
    with partial.open("ab") as file:
        file.write(b'{"ids": [1, 2')  # what a process that is killed may leave
    capsys.readouterr()
    assert main(generate(folder, rows, out, *options, "64")) == 2
    assert "give --resume to go on" in capsys.readouterr().err
    assert main(generate(folder, rows, out, *options, "64", "--resume", "--seed", "1")) == 2
    assert "other prompts, target or settings" in capsys.readouterr().err
    assert partial.read_bytes() == finished
    assert main(generate(folder, rows, out, *options, "64", "--resume")) == 0
    new = 40 - finished.count(b"\n")
    assert f"40 of 40 answers, {new * 40} tokens" in capsys.readouterr().err
    assert main(generate(folder, rows, whole, *options, "64")) == 0
    assert out.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl", "whole.jsonl"]
    capsys.readouterr()
    assert main(generate(folder, rows, out, *options, "64", "--resume")) == 0
    assert capsys.readouterr().err == f"eagle-train: {out} is complete\n"
    assert main(generate(folder, rows, out, *options, "64", "--seed", "1")) == 2
    said = f"eagle-train: {out} exists; choose another name, delete it to begin anew, or give --resume to keep it"
    assert capsys.readouterr().err == f"{said}\n" and out.read_bytes() == whole.read_bytes()


def test_what_decides_the_answers_decides_whether_a_run_goes_on(tmp_path: Path) -> None:
    """Not the name and size of files: answers may be written next to the weights, which may be trained meanwhile."""
    target, rows = text_target(tmp_path / "target"), write(tmp_path / "prompts.jsonl", [{"prompt": "a"}])

    def run() -> str:
        return _run_of(target, rows, Sampling(), None)

    before = run()
    (target / "answers.partial.jsonl").write_text("{}", encoding="utf-8")
    assert run() == before
    weights = next(path for path in target.glob("*.safetensors"))
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run() != before
    weights.write_bytes(content)
    assert run() == before
    template = target / "tokenizer_config.json"
    template.write_text(template.read_text(encoding="utf-8").replace("<user>", "<USER>") + " ", encoding="utf-8")
    assert run() != before


def test_a_row_has_settings_of_its_own(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ids,) = prompts([6])
    greedy = {"ids": ids, "temperature": 0.0, "max_new_tokens": 5}
    rows = write(tmp_path / "prompts.jsonl", [{"ids": ids}, greedy, {"ids": ids}, greedy])
    assert main(generate(folder, rows, tmp_path / "out.jsonl", "--max-new-tokens", "9")) == 0
    first, second, third, fourth = map(json.loads, (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines())
    assert second == fourth and len(second["ids"]) == 11
    assert first != third and len(first["ids"]) == len(third["ids"]) == 15
    for wrong, says in (
        ({"top_p": 2}, "top_p above 0"),
        ({"temperature": "hot"}, "not supported"),
        ({"temperature": math.nan}, "0 or more"),
    ):
        write(rows, [{"ids": ids}, {"ids": ids, **wrong}])
        assert main(generate(folder, rows, tmp_path / "new.jsonl")) == 2
        (line,) = capsys.readouterr().err.splitlines()[-1:]
        assert "line 2" in line and says in line
        assert not list(tmp_path.glob("new*"))


class Scripted:
    """An AnswerSampler that says what it is given, in the order of the requests."""

    vocab_size = 131
    context = 90

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = list(texts)
        self.requests: list[Request] = []

    def answers(self, requests: Requests) -> Iterator[tuple[Request, list[int]]]:
        while (request := requests.take()) is not None:
            self.requests.append(request)
            text = self.texts.pop(0)
            yield request, [ord(c) + 3 for c in text.rstrip("$")] + [EOS] * text.endswith("$")


def test_the_target_asks_further_questions_itself(tmp_path: Path) -> None:
    target = text_target(tmp_path / "target")
    rows: list[dict[str, Any]] = [{"turns": ["a", "b"], "further": 2}, {"turns": ["c"], "further": 1}, {"turns": ["d"]}]
    file = write(tmp_path / "prompts.jsonl", [*rows, {"turns": ["e"], "further": 2}])
    sampler = Scripted(
        ["A$", "B$", "f?$", "F$", "g?$", "no end", "C$", " $", "D$", "E$", "longer than holds here" * 3 + "$"]
    )
    asked = Prompts(file, target, 131, 90, Sampling(max_new_tokens=9))
    ended = list(Asker(sampler, asked, set()).answered())
    contents = [[message["content"] for message in dialogue.messages] for dialogue, _ in ended]
    assert contents == [["a", "A", "b", "B", "f?", "F", "g?", "no end"], ["c", "C"], ["d", "D"], ["e", "E"]]
    assert [tokens for _, tokens in ended] == [2 + 2 + 2 + 6, 2, 2, 2]  # of the answers alone
    headers = [bytes(token - 3 for token in request.ids if token > 2).decode() for request in sampler.requests]
    assert headers[2] == "<user>a\n<assistant>A\n<user>b\n<assistant>B\n<user>"
    assert headers[3] == headers[2] + "f?\n<assistant>"
    assert [request.sampling.temperature for request in sampler.requests] == [0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1]
    assert len({request.number for request in sampler.requests}) == 11
    assert [dialogue.number for dialogue, _ in Asker(Scripted(["D$"]), asked, {0, 1, 3}).answered()] == [2]


LATE = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"


def test_prompts_that_cannot_be_answered_end_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that is empty or beyond the context, or one that the template refuses, is left out before the first
    answer, and not where a run has come so far."""
    target = text_target(tmp_path / "target", f"{LATE}{{% endfor %}}{CHAT}")
    system, user = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
    rows: list[dict[str, Any]] = [{"prompt": "a"}, {"prompt": "b" * 3000}, {"turns": ["c" * 3000]}]
    rows += [
        {"messages": [system, system, user]},
        {"prompt": ""},
        {"ids": []},
        {"messages": [system]},
        {"turns": ["d"]},
    ]
    out, file = tmp_path / "out.jsonl", write(tmp_path / "prompts.jsonl", rows)
    assert main(generate(target, file, out, "--max-new-tokens", "4")) == 0
    said, *_ = capsys.readouterr().err.splitlines()
    assert "6 prompts cannot" in said and "jsonl, line 2: 3000 tokens, but the target's context is 2048)" in said
    first, last = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert first["ids"][0] == ord("a") + 3 and last["messages"][0]["content"] == "d"
    write(file, rows[3:4])
    assert main(generate(target, file, tmp_path / "new.jsonl")) == 2
    assert "line 1: the chat template" in capsys.readouterr().err


def test_prompts_come_in_the_forms_of_training_data(tmp_path: Path) -> None:
    """A JSON array, Alpaca's rows, and TRL's prompts of messages were refused, though heads are trained on them."""
    target, file = text_target(tmp_path / "target"), tmp_path / "prompts.json"
    alpaca = {"instruction": "add", "input": "1 2", "output": "3"}
    user = {"role": "user", "content": "u"}
    rows = [{"prompt": "a"}, alpaca, {"instruction": "b"}, {"prompt": [user]}, {"conversation": [*DIALOGUE]}]
    file.write_text(json.dumps(rows), encoding="utf-8")
    asked = Prompts(file, target, 131, 90, Sampling())
    assert asked.count() == 5 and not asked.left_out
    first, *others = asked.dialogues()
    assert first.ids == [ord("a") + 3]
    assert [each.questions[0]["content"] for each in others] == ["add\n\n1 2", "b", "u", "hi"]
    assert all(len(each.questions) == 1 for each in others), "answers that a row holds are written anew"


def test_a_row_of_messages_is_a_dialogue_whatever_else_it_holds(tmp_path: Path) -> None:
    """UltraChat repeats the first question under "prompt", Alpaca renders question and answer by another template under
    "text". Text with a bos of its own gets no second one."""
    target, file = text_target(tmp_path / "target"), tmp_path / "prompts.jsonl"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    tokenizer.save(str(target / "tokenizer.json"))
    rows: list[dict[str, Any]] = [{"prompt": "hi", "messages": DIALOGUE}]
    rows += [{"instruction": "add", "input": "", "output": "3", "text": "### add\n### 3"}, {"prompt": "<s>b"}]
    asked = Prompts(write(file, [*rows, {"prompt": "c", "chosen": "d"}]), target, 131, 90, Sampling())
    assert asked.count() == 4 and not asked.left_out
    chat, alpaca, rendered, pair = asked.dialogues()
    assert [each.questions[0]["content"] for each in (chat, alpaca)] == ["hi", "add"]
    assert [each.ids for each in (rendered, pair)] == [[2, ord("b") + 3], [2, ord("c") + 3]]


def test_tools_are_described_to_the_target_without_results_of_calls_that_it_did_not_make(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    target = text_target(tmp_path / "target", "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + CHAT)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    messages = [DIALOGUE[0], call, {"role": "tool", "content": "7"}, DIALOGUE[1], {"role": "user", "content": "b"}]
    messages += [call, {"role": "tool", "content": "8"}]
    file = write(tmp_path / "prompts.jsonl", [{"messages": messages, "tools": tools, "further": 1}])
    asked, sampler = Prompts(file, target, 131, 90, Sampling(max_new_tokens=9)), Scripted(["A$", "B$", "c$", "C$"])
    assert asked.count() == 1
    ((dialogue, _),) = Asker(sampler, asked, set()).answered()
    assert [each["content"] for each in dialogue.messages] == ["hi", "A", "b", "B", "c", "C"]
    assert dialogue.row() == {"messages": dialogue.messages, "tools": tools}
    assert all(
        bytes(token - 3 for token in request.ids if token > 2).startswith(b"[f]") for request in sampler.requests
    )


def test_rows_without_a_prompt_of_text_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, image = text_target(tmp_path / "target"), {"role": "user", "content": [{"type": "image", "url": "x"}]}
    nothing = {"role": "user", "content": None}
    rows: list[dict[str, Any]] = [{"prompt": "a", "temperature": None}, {"messages": [nothing]}, {"messages": [image]}]
    file = write(tmp_path / "prompts.jsonl", [*rows, {"ids": [999]}])
    assert main(generate(target, file, tmp_path / "out.jsonl", "--max-new-tokens", "4")) == 0
    said, *_ = capsys.readouterr().err.splitlines()
    assert f"3 prompts cannot be answered and are left out ({file}, line 2: a message needs role" in said
    assert len((tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()) == 1


def test_a_later_question_that_the_template_refuses_ends_its_dialogue_alone(tmp_path: Path) -> None:
    target = text_target(tmp_path / "target", f"{LATE}{{% endfor %}}{CHAT}")
    messages = [{"role": role, "content": role[0]} for role in ("user", "assistant", "system", "user")]
    file = write(tmp_path / "prompts.jsonl", [{"messages": messages}, {"turns": ["b", "c"]}])
    asked = Prompts(file, target, 131, 90, Sampling(max_new_tokens=9))
    assert asked.count() == 2
    ended = [dialogue.messages for dialogue, _ in Asker(Scripted(["A$", "B$", "C$"]), asked, set()).answered()]
    assert sorted([message["content"] for message in each] for each in ended) == [["b", "B", "c", "C"], ["u", "A"]]


def test_texts_end_where_those_of_a_bundle_do(tmp_path: Path) -> None:
    """A fine-tune whose tokenizer alone names what ends a turn: an answer would go on to the last token allowed."""
    folder = text_target(tmp_path / "target")
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            stated = json.loads((folder / name).read_text(encoding="utf-8"))
            (folder / name).write_text(json.dumps({**stated, "eos_token_id": 2}), encoding="utf-8")
    assert FrozenTarget(folder, torch.device("cpu")).eos == open_pair(folder, None).generation.eos == (2, EOS)


def test_the_header_of_the_users_turn_is_the_templates(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(text_target(tmp_path / "target"), "here")
    assert user_header(tokenizer, []) == "<s><user>"
    assert user_header(tokenizer, DIALOGUE) == "<s><user>hi\n<assistant>ho</s>\n<user>"
    tokenizer = load_tokenizer(text_target(tmp_path / "other", "{{ messages[0].content | length }}"), "here")
    with pytest.raises(TrainError, match="cannot ask in their place"):
        user_header(tokenizer, [])
