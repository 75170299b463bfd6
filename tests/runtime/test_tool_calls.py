"""Conversations with tools: the answer is that of decoding without drafts, whatever may or must be called."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import with_template
from eagle_runtime import EagleModel, RequestError, SamplingParams, ToolUse
from eagle_runtime.sampling.call_grammar import calls_constraint
from eagle_runtime.sampling.sampler import Sampler
from insides import bundle_in

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}a: "
PLAN: dict[str, Any] = {
    "name": "plan",
    "description": "A journey.",
    "parameters": {
        "type": "object",
        "properties": {
            "origin": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 1, "maximum": 30},
            "cabin": {"enum": ["economy", "business"]},
            "exact": {"type": "boolean"},
            "note": {"type": "string", "maxLength": 5},
        },
        "required": ["origin", "days", "cabin", "exact", "note"],
    },
}
CLOCK: dict[str, Any] = {"name": "clock"}
TOOLS = [{"type": "function", "function": PLAN}, {"type": "function", "function": CLOCK}]
CHOICES: list[Any] = [
    "auto",
    "required",
    {"type": "function", "function": {"name": "plan"}},
    {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[1:]}},
]
DRAFTS: list[dict[str, Any]] = [
    {"method": "eagle+lookup"},
    {"tree": "dynamic"},
    {"tree": "chain"},
    {"method": "lookup"},
]


@pytest.fixture(scope="module")
def model(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EagleModel]:
    bundle = with_template(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("tools") / "pair", TEMPLATE)
    with EagleModel.load(bundle, threads=1) as loaded:
        yield loaded


@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "required", "named", "allowed"])
def test_drafts_change_no_answer(choice: Any, model: EagleModel) -> None:
    def answered(seed: int, temperature: float, **drafts: Any) -> tuple[Any, str, Any]:
        with model.conversation(tools=TOOLS, tool_format="hermes") as chat:
            turn = chat.send(
                "Plan it.", tool_choice=choice, seed=seed, temperature=temperature, max_new_tokens=60, **drafts
            )
            pieces = list(turn)
            parts = [part for piece in pieces for part in piece.parts]
            message = chat.messages[-1]
            assert turn.result is not None
            said = "".join(part.text for part in parts if part.kind == "content")
            assert said == (turn.result.message or {})["content"] or not said
            return turn.result.token_ids, said, message.get("content")

    for seed, temperature in ((1, 0.0), (2, 1.0), (3, 1.3)):
        plain = answered(seed, temperature, method="vanilla")
        for drafts in DRAFTS:
            assert answered(seed, temperature, **drafts) == plain, drafts


def test_a_conversation_with_calls(model: EagleModel, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"tool_choice": "required", "temperature": 1.0, "seed": 4, "max_new_tokens": 200}
    with model.conversation(tools=TOOLS, tool_format="llama") as chat:
        result = list(chat.send("Plan it.", **asked))[-1].result
        assert result is not None and result.finish_reason == "tool_calls" and result.message == chat.messages[-1]
        (call,) = chat.messages[-1]["tool_calls"]
        assert call["function"]["name"] in ("plan", "clock")
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        with pytest.raises(RequestError, match=r"results are of the calls \['x'\], but those of the last answer are"):
            chat.send_results({"x": 1})
        chat.save(tmp_path / "chat", kv=False)
        list(chat.send_results({call["id"]: {"ok": True}}, max_new_tokens=3, tool_choice="none"))
        roles = [message["role"] for message in chat.messages]
        assert roles == ["user", "assistant", "tool", "assistant"] and chat.messages[2]["content"] == '{"ok": true}'
        stream = model.text.stream([])
        assert stream is not None and '{"name": "' in stream.feed(chat.token_ids)
    with model.load_conversation(tmp_path / "chat") as loaded:
        again = list(loaded.regenerate(**asked))[-1].result  # in the format that was chosen
        assert again is not None and again.token_ids == result.token_ids


@pytest.mark.parametrize("name", ["qwen3-coder", "glm4_5", "gemma4"])
def test_calls_with_tagged_values(name: str, model: EagleModel) -> None:
    """Drafts change nothing, tags and names draft themselves, and the arguments have the types of their schema."""
    asked: dict[str, Any] = {"tool_choice": CHOICES[2], "temperature": 1.0, "seed": 2, "max_new_tokens": 300}
    answers = []
    for method in ("vanilla", "eagle+lookup"):
        with model.conversation(tools=TOOLS, tool_format=name) as chat:
            result = list(chat.send("Plan it.", method=method, **asked))[-1].result
            assert result is not None and result.finish_reason == "tool_calls" and chat.messages[-1] == result.message
            answers.append(result)
    plain, drafted = answers
    assert plain.token_ids == drafted.token_ids
    assert drafted.usage.target_passes < 0.5 * plain.usage.target_passes
    arguments = json.loads((drafted.message or {})["tool_calls"][0]["function"]["arguments"])
    types = {"origin": str, "days": int, "cabin": str, "exact": bool, "note": str}
    assert {key: type(value) for key, value in arguments.items()} == types
    required = PLAN["parameters"]["required"]
    assert list(arguments) == (sorted(required) if name == "gemma4" else required)


def test_a_call_that_was_cut_is_not_kept(model: EagleModel) -> None:
    with model.conversation(tools=TOOLS) as chat:
        list(chat.send("Plan it.", tool_choice=CHOICES[2], max_new_tokens=60))
        assert chat.messages[-1] == {"role": "assistant", "content": ""}
        list(chat.send("And now?", max_new_tokens=2))  # with which the chat goes on


def test_tools_of_one_message(model: EagleModel) -> None:
    with model.conversation() as chat:
        result = list(chat.send("Plan it.", tools=TOOLS[1:], tool_choice="required", max_new_tokens=80))[-1].result
        assert result is not None and chat.messages[-1]["tool_calls"][0]["function"]["name"] == "clock"
        with pytest.raises(RequestError, match=r"tools\[0\].name is None"):
            chat.send("Plan it.", tools=[{}])
    with pytest.raises(RequestError, match="tool_format is 'x', but must be one of"):
        model.conversation(tool_format="x")


def test_tools_without_a_conversation(model: EagleModel) -> None:
    """What `chat_prompt` returns is a prompt, which brings the form of its answer."""
    prompt = model.chat_prompt([{"role": "user", "content": "Plan it."}], ToolUse.of(TOOLS, CHOICES[2]))
    asked: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 200}
    result, ids = model.generate(prompt, **asked), model.text.encode_rendered(prompt.text)
    assert (model.encode(prompt), model.count_tokens(prompt), model.check(prompt)) == (ids, len(ids), ids)
    assert result.token_ids == model.generate(ids, form=prompt.form, **asked).token_ids
    assert result.message is not None and result.message["tool_calls"][0]["function"]["name"] == "plan"
    batched = [piece.result for _, piece in model.batch([prompt, {"prompt": prompt}], **asked) if piece.result]
    assert [(one.token_ids, one.finish_reason) for one in batched] == [(result.token_ids, "tool_calls")] * 2


@pytest.mark.slow
def test_calls_are_drawn_with_their_probabilities(model: EagleModel) -> None:
    """2,000 draws with drafts against the chances of plain constrained decoding: for each of 15 calls the product of
    the target's masked probabilities along its tokens, which are bytes, so that a call has one way to be written."""
    days, hours = ["mon", "tue", "wed", "thu", "sat"], [1, 2, 3]
    fields = {"day": {"enum": days}, "hour": {"enum": hours}}
    schema = {"type": "object", "properties": fields, "required": ["day", "hour"]}
    use = ToolUse.of([{"name": "p", "parameters": schema}], "required", False)
    prompt = model.chat_prompt([{"role": "user", "content": "?"}], use, tool_format="hermes")
    ids, chances = model.text.encode_rendered(prompt.text), {}
    for day, hour in itertools.product(days, hours):
        answer = model.text.encode_rendered(prompt.form.format.written([("p", {"day": day, "hour": hour})]))
        rows = np.concatenate(list(model.score([*ids, *answer], len(ids) - 1)))
        matcher = bundle_in(model).grammars.matcher(calls_constraint(prompt.form, {}, None))
        sampler = Sampler(SamplingParams(temperature=1.0), ids, len(rows[0]), matcher=matcher)
        log_chance = 0.0
        for token, row in zip(answer, rows, strict=False):
            scores = sampler.scores.filtered(sampler.scores.adjusted(row))
            log_chance += float(scores[token] - np.logaddexp.reduce(scores))
            matcher.consume(token)
        chances[day, hour] = math.exp(log_chance)
    assert sum(chances.values()) == pytest.approx(1, abs=1e-6)
    draws, counts = 2000, Counter[tuple[str, int]]()
    with model.conversation() as chat:  # which reads the prompt once
        for seed in range(draws):
            *_, last = chat.complete(ids, form=prompt.form, temperature=1.0, seed=seed, max_new_tokens=100)
            assert last.result is not None and last.result.message is not None
            given = json.loads(last.result.message["tool_calls"][0]["function"]["arguments"])
            counts[given["day"], given["hour"]] += 1
    cells = [(float(counts[call]), draws * chance) for call, chance in chances.items() if draws * chance >= 5]
    rest = draws - sum(count for count, _ in cells), draws - sum(wanted for _, wanted in cells)
    cells += [rest] if rest[1] >= 5 else []
    statistic, freedom = sum((count - wanted) ** 2 / wanted for count, wanted in cells), len(cells) - 1
    print(f"chi-square {statistic:.1f}, {freedom} degrees of freedom")
    assert freedom > 5 and statistic < freedom + 3.1 * math.sqrt(2 * freedom)  # a chance of about 0.004 to fail
