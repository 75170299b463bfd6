"""Answers in OpenAI's harmony format: messages with heads, whatever form of a head a model writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from conftest import GOLDEN
from eagle_runtime import RequestError
from eagle_runtime.app.output import End, Output
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.text.answer_form import AnswerForm, chat_prompt
from eagle_runtime.text.answer_reader import AnswerReader, Part
from eagle_runtime.text.call_formats import HARMONY
from eagle_runtime.text.channel_reader import reader_of
from eagle_runtime.text.detokenizer import TextStream, Vocabulary
from eagle_runtime.text.tokenizer import Text
from eagle_runtime.text.tools import ToolUse
from format_model import Model, Spoken

TEMPLATE = Path(__file__).parents[1] / "data" / "chat_templates" / "gptoss.jinja"
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"enum": [1, 3]}},
        "required": ["place", "days"],
    },
}
CLOCK: dict[str, Any] = {"name": "clock.utc", "description": "The time.", "parameters": {}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
ARGUMENTS = '{"place": "Ulm", "days": 3}'
GO_ON = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>We need <the> weather.\n\n" + GO_ON
FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class Said:
    """What an answer says. calls: names and arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


REASONED = "We need <the> weather.\n\n"
CALLED = Said(REASONED, "", [("weather", ARGUMENTS)])
# Answers of models, and what they say.
ANSWERS = {
    "reasoned": (f"{THOUGHT}{FINAL}It is late.\n<|return|>", Said(REASONED, "It is late.\n")),
    "final at once": (f"{FINAL}Hi.<|return|>", Said("", "Hi.")),
    "no channel": ("<|message|>Hi.<|return|>", Said("", "Hi.")),
    "no head": ("Hi there.<|return|>", Said("", "Hi there.")),
    "no end": (f"{THOUGHT}{FINAL}It is", Said(REASONED, "It is")),
    "end in place of return": (f"{THOUGHT}{FINAL}Hi.<|end|>", Said(REASONED, "Hi.")),
    "unicode": (f"{FINAL}Zürich 🚪 門<|return|>", Said("", "Zürich 🚪 門")),
    "signs of a marker": (f"{FINAL}a <| b <|end |> <||call|> c<<|return|>", Said("", "a <| b <|end |> <||call|> c<")),
    "end of text": (f"{FINAL}Hi.<|endoftext|>", Said("", "Hi.")),
    "line between messages": (
        f"<|channel|>analysis<|message|>Hm.<|end|>\n<|start|>assistant{FINAL}Hi.<|return|>",
        Said("Hm.", "Hi."),
    ),
    "no start": (f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Hi.", Said("Hm.", "Hi.")),
    "no end of a message": (f"<|channel|>analysis<|message|>Hm.<|start|>assistant{FINAL}Hi.", Said("Hm.", "Hi.")),
    "twice": (
        f"<|channel|>analysis<|message|>One.{GO_ON}<|channel|>analysis<|message|>Two.{GO_ON}{FINAL}Hi.<|return|>",
        Said("One.\n\nTwo.", "Hi."),
    ),
    "empty reasoning": (f"<|channel|>analysis<|message|>{GO_ON}{FINAL}Hi.<|return|>", Said("", "Hi.")),
    "preamble": (
        f"{THOUGHT}<|channel|>commentary<|message|>I look.{GO_ON}{FINAL}Rain.<|return|>",
        Said(REASONED, "I look.\n\nRain."),
    ),
    "preamble and call": (
        f"<|channel|>commentary<|message|>I look.{GO_ON}"
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        Said("", "I look.", [("weather", ARGUMENTS)]),
    ),
    "json in final": (f'{FINAL.replace("<|message|>", " <|constrain|>json<|message|>")}{{"a": 1}}<|return|>',
                      Said("", '{"a": 1}')),
    "call": (
        f"{THOUGHT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        CALLED,
    ),
    "call, no space": (
        f"{THOUGHT}<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        CALLED,
    ),
    "call as in prompts": (
        f"{THOUGHT} to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        CALLED,
    ),
    "call, recipient first": (
        f"{THOUGHT} to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        CALLED,
    ),
    "call, no type": (f"{THOUGHT}<|channel|>commentary to=functions.weather<|message|>{ARGUMENTS}<|call|>", CALLED),
    "call of code": (f"{THOUGHT}<|channel|>commentary to=functions.weather code<|message|>{ARGUMENTS}<|call|>", CALLED),
    "call in analysis": (
        f"{THOUGHT}<|channel|>analysis to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        CALLED,
    ),
    "call at once": (
        "<|channel|>commentary to=functions.clock.utc <|constrain|>json<|message|>{}<|call|>",
        Said("", "", [("clock.utc", "{}")]),
    ),
}  # fmt: skip
# What a grammar of these tools refuses, and readers do not: free heads, heads that others read too.
LENIENT = {
    "no head", "no end of a message", "no start", "line between messages",
}  # fmt: skip


def use_of(choice: Any = None, parallel: bool | None = None) -> ToolUse:
    use = ToolUse.of(TOOLS, choice, parallel)
    assert use is not None
    return use


BITS = [*HARMONY.texts, "analysis", "final", "commentary", " to=functions.weather", "{}", "assistant", "a\n"]
FORM = AnswerForm(HARMONY, use_of(), thinks=True)
MODEL = Model(HARMONY, True)


def spoken(answer: str, model: Model = MODEL) -> list[Spoken]:
    """The tokens of an answer."""
    stream = TextStream(Vocabulary(model.tokenizer, "test"), [])
    ids = model.tokenizer.encode(answer, add_special_tokens=False).ids
    return [Spoken(token, stream.feed([token])) for token in ids]


def said(reader: AnswerReader) -> Said:
    return Said(reader.reasoning, reader.content, [(call.name, call.arguments) for call in reader.calls])


def joined(parts: Sequence[Part]) -> list[tuple[str, str, int]]:
    """Parts, those of the same kind in a row as one."""
    result: list[tuple[str, str, int]] = []
    for part in parts:
        if result and part.kind == result[-1][0] != "call":
            result[-1] = (part.kind, result[-1][1] + part.text, part.index)
        else:
            result.append((part.kind, part.text, part.index))
    return result


@pytest.mark.parametrize("special", [True, False], ids=["special tokens", "text"])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_taken_apart(name: str, special: bool) -> None:
    """Token by token and all at once, whether markers are special tokens or text."""
    answer, wanted = ANSWERS[name]
    model = Model(HARMONY, special)
    reader, parts = model.read(FORM, answer)
    assert said(reader) == wanted
    at_once = reader_of(FORM, model.specials)
    assert joined([*at_once.feed(spoken(answer, model)), *at_once.end()]) == joined(parts)
    assert said(at_once) == wanted and reader.kept_message.get("tool_calls", []) == reader.message.get("tool_calls", [])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(ANSWERS)), st.data())
def test_any_split_has_the_same_parts(name: str, data: st.DataObject) -> None:
    tokens = spoken(ANSWERS[name][0])
    reader, parts = reader_of(FORM, MODEL.specials), []
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        parts += reader.feed(tokens[:count])
        tokens = tokens[count:]
    parts += reader.end()
    assert said(reader) == ANSWERS[name][1]
    assert joined(parts) == joined(MODEL.read(FORM, ANSWERS[name][0])[1])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(BITS)))
def test_no_marker_is_shown(pieces: list[str]) -> None:
    """Whatever a model writes is taken apart without an error, token by token as all at once."""
    answer = "".join(pieces)
    _, parts = MODEL.read(FORM, answer)
    assert not any("<|" in part.text or "\0" in part.text for part in parts)
    at_once = reader_of(FORM, MODEL.specials)
    assert joined([*at_once.feed(spoken(answer)), *at_once.end()]) == joined(parts)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_that_are_cut_off(name: str) -> None:
    """What was said so far, and no marker; of a call without its end nothing is kept."""
    answer, wanted = ANSWERS[name]
    tokens = spoken(answer)
    for count in range(len(tokens)):
        reader = reader_of(FORM, MODEL.specials)
        reader.feed(tokens[:count])
        reader.end()
        assert wanted.reasoning.startswith(reader.reasoning)
        assert wanted.content.startswith(reader.content)
        for call, (called, arguments) in zip(reader.calls, wanted.calls, strict=False):
            assert call.name == called and arguments.startswith(call.arguments)
        kept = reader.kept_message
        whole = bool(reader.calls) and reader.calls[0].arguments == wanted.calls[0][1]
        assert ("tool_calls" in kept) == whole and kept["role"] == "assistant"


def test_calls_that_no_tool_was_offered_for() -> None:
    """They are shown as what their channel says."""
    python = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    call = "<|channel|>commentary to=functions.weather json<|message|>{}<|call|>"
    reader, _ = MODEL.read(FORM, python)
    assert said(reader) == Said("1 + 1")
    reader, _ = MODEL.read(AnswerForm(HARMONY, None, thinks=True), call)
    assert said(reader) == Said("", "{}")
    bare, _ = MODEL.read(FORM, call.replace("functions.", ""))
    assert said(bare) == Said("", "", [("weather", "{}")])


@pytest.mark.parametrize("name", ANSWERS)
def test_the_grammar_lets_models_write_as_they_do(name: str) -> None:
    answer, wanted = ANSWERS[name]
    text = answer
    for marker in ("<|return|>", "<|endoftext|>"):
        text = text.removesuffix(marker)
    if name == "end in place of return":
        text = text.removesuffix("<|end|>")
    free, must = (AnswerForm(HARMONY, use_of(choice), thinks=True) for choice in ("auto", "required"))
    if name in LENIENT:
        assert not MODEL.accepts(free, text)
        return
    assert MODEL.accepts(free, text) and MODEL.accepts(must, text) == bool(wanted.calls)
    named = AnswerForm(HARMONY, use_of({"type": "function", "function": {"name": "clock.utc"}}), thinks=True)
    assert MODEL.accepts(named, text) == any(call == "clock.utc" for call, _ in wanted.calls)
    assert not MODEL.accepts(free, f"{text}<|start|>")


def test_what_the_grammar_refuses() -> None:
    call = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    assert MODEL.accepts(FORM, THOUGHT + call.format("weather", ARGUMENTS))
    for name, arguments in (("radar", "{}"), ("weather", "{}"), ("weather", '{"place": "Ulm", "days": 2}')):
        assert not MODEL.accepts(FORM, THOUGHT + call.format(name, arguments))
    for parallel in (None, True, False):  # a call ends the answer
        form = AnswerForm(HARMONY, use_of("required", parallel), thinks=True)
        one = call.format("clock.utc", "{}")
        assert MODEL.accepts(form, one) and not MODEL.accepts(form, f"{one}<|start|>assistant{one}")
    assert not MODEL.accepts(FORM, "<|channel|>commentary to=python code<|message|>1<|call|>")
    assert not MODEL.accepts(FORM, "<|channel|>analysis<|message|>Hm.")  # no answer yet


CONTENT = {
    "json_schema": (Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}},
                                            "required": ["a"], "additionalProperties": False}), '{"a": 1}'),
    "regex": (Constraint.regex("[a-z]/+"), "a//"),
    "lark": (Constraint.lark('start: "}" x\nx: /[0-9]+/'), "}12"),
    "choice": (Constraint.choice(["yes", "no {"]), "no {"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTENT)
def test_constraints_are_of_the_content(kind: str) -> None:
    """Heads and reasoning are free; a preamble, which is content, is not."""
    constraint, content = CONTENT[kind]
    form = AnswerForm(HARMONY, None, thinks=True)
    typed = FINAL.replace("<|message|>", " <|constrain|>json<|message|>")
    for before in ("", THOUGHT, THOUGHT + THOUGHT):
        for head in (FINAL, "<|message|>", typed):
            assert MODEL.accepts(form, before + head + content, constraint)
            assert not MODEL.accepts(form, f"{before}{head}Hello.", constraint)
            assert not MODEL.accepts(form, f"{before}{head}{content}!", constraint)
    assert not MODEL.accepts(form, content, constraint)
    preamble = f"<|channel|>commentary<|message|>I look.{GO_ON}"
    assert not MODEL.accepts(form, preamble + FINAL + content, constraint)


def test_a_schema_beside_tools() -> None:
    constraint, content = CONTENT["json_schema"]
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    for text in (content, THOUGHT + FINAL + content, THOUGHT + call):
        assert MODEL.accepts(FORM, text, constraint) == (text != content)
    assert not MODEL.accepts(FORM, f"{THOUGHT}{FINAL}Hello.", constraint)
    must = AnswerForm(HARMONY, use_of("required"), thinks=True)
    assert MODEL.accepts(must, call, constraint) and not MODEL.accepts(must, FINAL + content, constraint)
    with pytest.raises(RequestError, match="constraint may be a JSON schema where tools are offered"):
        MODEL.accepts(FORM, call, CONTENT["regex"][0])


def output_of(answer: str, *strings: str) -> Output:
    """What is shown of an answer, which ends at a stop string or at its end."""
    ends = frozenset(MODEL.specials[text] for text in ("<|return|>", "<|call|>", "<|endoftext|>"))
    stream = TextStream(Vocabulary(MODEL.tokenizer, "test"), [])
    output = Output(stream, End(limit=1000, eos=ends, strings=strings), reader_of(FORM, MODEL.specials))
    shown = ""
    for token in MODEL.tokenizer.encode(answer, add_special_tokens=False).ids:
        going = output.add(token, drafted=False)
        shown += output.release().text
        if not going:
            break
    assert shown == output.shown_text
    return output


def test_what_is_shown_is_the_content() -> None:
    output = output_of(f"{THOUGHT}{FINAL}It is late.<|return|>")
    assert output.shown_text == "It is late." and output.finish_reason == "stop"
    assert output.text == f"{THOUGHT}{FINAL}It is late."  # with which a conversation's next prompt is compared
    output = output_of(ANSWERS["call"][0])
    assert output.shown_text == "" and output.finish_reason == "tool_calls"
    output = output_of(ANSWERS["call"][0], ARGUMENTS[3:6])  # which cuts the arguments: the call is not to be made
    assert output.message["tool_calls"] and output.finish_reason == "stop"


def test_stop_strings_count_in_all_texts_but_heads() -> None:
    answer = f"{THOUGHT}{FINAL}In the final analysis, json.<|return|>"
    for string, reasoning, content in (
        ("weather", "We need <the> ", ""),
        ("analysis", REASONED, "In the final "),
        ("final", REASONED, "In the "),
        ("assistant", REASONED, "In the final analysis, json."),
        ("\n\nIn", REASONED, "In the final analysis, json."),  # over the head
        ("json", REASONED, "In the final analysis, "),
    ):
        output = output_of(answer, string)
        assert (output.message.get("reasoning_content", ""), output.shown_text) == (reasoning, content), string
    assert output_of("<|start|>assistant<|end|>Text without a head.", "without").shown_text == "Text "


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Text]:
    """transformers' tokenizer and ours."""
    folder = tmp_path_factory.mktemp("harmony")
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", folder / "tokenizer.json")
    shutil.copyfile(TEMPLATE, folder / "chat_template.jinja")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return AutoTokenizer.from_pretrained(folder), Text(folder)


USER = {"role": "user", "content": "Weather in Ulm, and the time?"}


def call(name: str, id: str, **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", **more, **({"tool_calls": list(calls)} if calls else {})}


def result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


ULM, NOW = call("weather", "a", place="Ulm", days=3), call("clock.utc", "b")
# Chats as OpenAI's API has them, and as the template takes them.
CHATS = {
    "reasoning and text before a call": (
        [USER, answer(ULM, reasoning_content="Hm.", content="I look."), result("a", "rain")],
        [USER, answer(ULM, thinking="Hm.\n\nI look."), result("a", "rain")],
    ),
    "reasoning before a call": (
        [USER, answer(ULM, reasoning_content="Hm.", content=None), result("a", "rain")],
        [USER, answer(ULM, thinking="Hm."), result("a", "rain")],
    ),
    "text before a call": ([USER, answer(ULM, content="I look."), result("a", "rain")],) * 2,
    "two calls": (
        [USER, answer(ULM, NOW, reasoning_content="Hm."), result("b", "12:00"), result("a", "rain")],
        [USER, answer(ULM, thinking="Hm."), result("a", "rain"), answer(NOW), result("b", "12:00")],
    ),
    "two calls, one result": (
        [USER, answer(ULM, NOW), result("b", "12:00")],
        [USER, answer(ULM), answer(NOW), result("b", "12:00")],
    ),
    "results without ids": (
        [USER, answer(ULM, NOW), {"role": "tool", "content": "rain"}, {"role": "tool", "content": "12:00"}],
        [USER, answer(ULM), {"role": "tool", "content": "rain"}, answer(NOW), {"role": "tool", "content": "12:00"}],
    ),
    "an answer drops what was thought": (
        [USER, answer(ULM, reasoning_content="Hm."), result("a", "rain"), answer(content="Rain.", thinking="So"), USER],
        [USER, answer(ULM), result("a", "rain"), answer(content="Rain."), USER],
    ),
    "effort": ([{"role": "system", "content": "Be brief."}, USER],) * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_prompts_are_those_of_transformers(name: str, texts: tuple[Any, Text]) -> None:
    theirs, text = texts
    messages, taken = CHATS[name]
    kwargs = {"reasoning_effort": "high"} if name == "effort" else {}
    made = chat_prompt(text, messages, use_of(), template_kwargs=kwargs)
    offered = [{"type": "function", "function": {"description": "", **tool}} for tool in (WEATHER, CLOCK)]
    wanted = theirs.apply_chat_template(taken, tools=offered, tokenize=False, add_generation_prompt=True, **kwargs)
    assert made.text == wanted and made.text.endswith("<|start|>assistant")
    assert made.form == AnswerForm(HARMONY, use_of(), thinks=True)
    assert ("Reasoning: high" in made.text) == (name == "effort")


def test_the_template_says_how_answers_are_written(texts: tuple[Any, Text]) -> None:
    assert chat_prompt(texts[1], [USER]).form == AnswerForm(HARMONY, None, thinks=True)
    assert chat_prompt(texts[1], [USER], tool_format="harmony").form.format == HARMONY
    with pytest.raises(RequestError, match="tool_format is 'hermes', but this model writes harmony alone"):
        chat_prompt(texts[1], [USER], tool_format="hermes")
