"""Formats of calls: recognised from published templates, equal to what these write, followed and taken apart again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from conftest import GOLDEN
from eagle_runtime import RequestError
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.sampling.schemas import argument_schema
from eagle_runtime.text.answer_form import AnswerForm, chat_prompt
from eagle_runtime.text.call_formats import FORMATS, CallFormat, format_named, recognised
from eagle_runtime.text.channel_reader import reader_of
from eagle_runtime.text.tokenizer import Text
from eagle_runtime.text.tools import ToolUse
from format_model import Model, Spoken, told

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
PUBLISHED = {
    "deepseek_r1_distill": "deepseek",
    "deepseek_v3_1": "deepseek-v3.1",
    "gemma3": "gemma3",
    "gemma4_v5": "gemma4",
    "glm4_7": "glm4_7",
    "glm4moe": "glm4_5",
    "gptoss": "harmony",
    "granite3_3": "granite",
    "granite4": "hermes",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "ministral3": "mistral-args",
    "mistral_small3_2": "mistral-ids",
    "mistral_v3_tekken": "mistral",
    "phi4_mini": "phi4-mini",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3-coder",
    "qwen3_coder": "qwen3-coder",
    "seed_oss": "seed-oss",
    "smollm3": "smollm3",
    "gemma": "generic",
    "phi_4": "generic",
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "enum": [1, 3, 7]}, "place": {"type": "string"}},
            "required": ["place", "days"],
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {}}}
ARGUMENTS = {"place": 'Zürich "West"', "days": 3}
USER = {"role": "user", "content": "Weather in Zürich?"}


def called(**arguments: Any) -> dict[str, Any]:
    """An answer as OpenAI's API has it: its arguments are JSON text."""
    function = {"name": "weather", "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abc", "type": "function", "function": function}],
    }


RESULT = {"role": "tool", "tool_call_id": "abc", "content": '{"celsius": -3.5}'}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Text]]:
    """transformers' tokenizer and ours for each template."""
    made = {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name in PUBLISHED:
        folder = tmp_path_factory.mktemp(name)
        shutil.copyfile(GOLDEN / "byte_tokenizer.json", folder / "tokenizer.json")
        shutil.copyfile(TEMPLATES / f"{name}.jinja", folder / "chat_template.jinja")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        made[name] = (AutoTokenizer.from_pretrained(folder), Text(folder))
    return made


def test_formats_are_recognised_from_published_templates() -> None:
    said = {name: recognised((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")).name for name in PUBLISHED}
    assert said == PUBLISHED
    assert recognised("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}").name == "mistral-args"
    assert {row.name for row in FORMATS} == {*PUBLISHED.values(), "exaone4"}  # whose template has another licence
    with pytest.raises(RequestError, match="tool_format is 'x', but must be one of harmony, deepseek"):
        format_named("x")


@pytest.mark.parametrize("name", PUBLISHED)
def test_prompts_are_what_the_template_writes(name: str, sources: dict[str, tuple[Any, Text]]) -> None:
    """Of templates that know tools the whole prompt, and the calls in it, are theirs; others are told in a message."""
    theirs, text = sources[name]
    form = recognised(text.template_source(tools=True))
    chat = [USER, called(**ARGUMENTS), RESULT]
    prompt = chat_prompt(text, chat, ToolUse.of([WEATHER])).text
    ways = ('"weather"', "'weather'", "type weather =", "<name>weather</name>", "def weather(", ":weather{description:")
    assert any(way in prompt for way in ways)
    written = form.written([("weather", ARGUMENTS)])
    known = "tool_calls" in text.template_source(tools=True)
    cut = written if form.name != "mistral" else written.removesuffix("}]")  # whose template goes on with an id
    ids = re.compile(r'"(id|call_id)": "[0-9a-zA-Z]{9}"|\[(CALL_ID|TOOL_RESULTS)\][0-9a-zA-Z]{9}(?=\[)')
    assert re.sub(r'\\"', '"', ids.sub("", cut)) in re.sub(r'\\"', '"', ids.sub("", prompt))
    assert RESULT["content"] in prompt.replace('\\"', '"')
    if form.tools_as == "tools" and known:
        read = {**chat[1], "tool_calls": [{**chat[1]["tool_calls"][0], "id": "8c4Cb2xV1"}]}
        read["tool_calls"][0] = {**read["tool_calls"][0], "function": {"name": "weather", "arguments": ARGUMENTS}}
        wanted = theirs.apply_chat_template(
            [USER, read, {**RESULT, "tool_call_id": "8c4Cb2xV1"}], tools=[WEATHER], tokenize=False,
            add_generation_prompt=True,
        )  # fmt: skip
        assert ids.sub("", prompt) == ids.sub("", wanted)


@pytest.mark.parametrize(("name", "role"), [("gemma3", "system"), ("gemma", "user")])
def test_contents_in_parts_are_written_as_text(name: str, role: str, sources: dict[str, tuple[Any, Text]]) -> None:
    """Where a template is told of tools, of calls or of their results in the content of messages."""
    first = [{"role": "system", "content": "Be brief."}] if role == "system" else []

    def prompt(parts: bool) -> str:
        said = [dict(message) for message in (*first, USER, {**called(**ARGUMENTS), "content": "I look."}, RESULT)]
        if parts:
            said = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in said]
        return chat_prompt(sources[name][1], said, ToolUse.of([WEATHER])).text

    assert prompt(parts=True) == prompt(parts=False)
    with pytest.raises(RequestError, match="must be text, or parts that have text"):
        chat_prompt(sources[name][1], [{"role": role, "content": [{"type": "image"}]}], ToolUse.of([WEATHER]))


def test_calls_in_a_prompt_of_deepseek_v3_1(sources: dict[str, tuple[Any, Text]]) -> None:
    """They stand in the content, which makes the prompt that the template makes of calls."""
    theirs, text = sources["deepseek_v3_1"]
    one, two = ({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in (("a", "weather", ARGUMENTS), ("b", "clock", {})))  # fmt: skip
    for content, calls in ((None, [one]), ("I look.", [one, two])):
        answer: dict[str, Any] = {"role": "assistant", "tool_calls": calls} | ({"content": content} if content else {})
        chat: list[dict[str, Any]] = [USER, answer, *({**RESULT, "tool_call_id": call["id"]} for call in calls)]
        for messages in (chat, [*chat, {"role": "assistant", "content": "Cold."}, USER]):
            wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert chat_prompt(text, messages).text == wanted and "<｜tool▁sep｜>" in wanted


def use_of(tools: Sequence[dict[str, Any]] = (WEATHER, CLOCK), choice: Any = None, parallel: bool = True) -> ToolUse:
    use = ToolUse.of(tools, choice, parallel)
    assert use is not None
    return use


SAID = {"days": 7, "place": "Ulm"}
CALLS = [("weather", SAID), ("clock", {})]


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_grammar_and_reader_of_a_format(row: CallFormat, special: bool) -> None:
    model = Model(row, special)
    auto, must = (AnswerForm(row, use_of(choice=choice)) for choice in ("auto", "required"))
    one = row.written(CALLS[:1])
    for form in (auto, must):
        assert model.accepts(form, one)
        assert model.accepts(form, row.written(CALLS)) == (row.between is not None)
    assert not model.accepts(AnswerForm(row, use_of(choice="required", parallel=False)), row.written(CALLS))
    late = told(row, "It is late.")
    assert model.accepts(auto, late) and not model.accepts(must, late)
    assert model.read(auto, late)[0].content == "It is late."
    assert not model.accepts(auto, row.written([("weather", {**SAID, "days": 2})]))  # no such number of days
    assert not model.accepts(auto, row.written([("weather", {**SAID, "more": 1})]))
    assert not model.accepts(auto, row.written([("radar", {})]))
    assert not model.accepts(must, one[:-3])
    only = AnswerForm(row, use_of(choice={"type": "function", "function": {"name": "clock"}}))
    assert model.accepts(only, row.written(CALLS[1:])) and not model.accepts(only, one)
    for begin in row.begins:
        assert model.accepts(auto, begin + one.removeprefix(row.begin)) or row.begin
    reader, parts = model.read(auto, one)
    assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == CALLS[:1]
    assert reader.content == "" and parts[0].kind == "call" and len(parts) > 3
    assert "".join(part.text for part in parts[1:]) == json.dumps(SAID)
    if row.between is not None:
        reader, parts = model.read(auto, row.written(CALLS))
        assert [(call.name, json.loads(call.arguments)) for call in reader.calls] == CALLS
        assert [part.index for part in parts if part.kind == "call"] == [0, 1]
        assert len({call.id for call in reader.calls}) == 2
    if row.trigger:
        reader, parts = model.read(auto, f"I shall look.\n{one}")
        assert reader.content == "I shall look." and len(reader.calls) == 1
        assert model.accepts(auto, f"I shall look.\n{one}")


def test_a_call_that_is_cut_off() -> None:
    row = format_named("hermes")
    form, model = AnswerForm(row, use_of()), Model(row, False)
    reader, _ = model.read(form, '<tool_call>\n{"name": "weather", "arguments": {"place": "U')
    assert reader.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"place": "U'}
    assert reader.kept_message == {"role": "assistant", "content": ""}
    reader, parts = model.read(form, "Well. <tool_c")  # which begins no call after all
    assert reader.content == "Well. <tool_c" and {part.kind for part in parts} == {"content"}


def test_reasoning_is_split_off() -> None:
    row = format_named("hermes")
    answer = "<think>\nTwo < three.\n\nSo </thin air.\n</think>\n\nYes."
    model = Model(row, False)
    for use in (None, use_of()):
        reader, parts = model.read(AnswerForm(row, use, thinks=True), answer)
        assert (reader.reasoning, reader.content) == ("Two < three.\n\nSo </thin air.", "Yes.")
        assert "".join(part.text for part in parts if part.kind == "reasoning") == reader.reasoning
        assert reader.message["reasoning_content"] == reader.reasoning
    begun = AnswerForm(row, None, thinks=True, thinking=True)
    assert model.read(begun, answer.removeprefix("<think>\n"))[0].content == "Yes."
    assert model.read(begun, "no end")[0].reasoning == "no end"
    assert model.read(AnswerForm(row, None, thinks=True), "<b>Yes.</b>")[0].content == "<b>Yes.</b>"


@pytest.mark.parametrize("at_once", [1, 2, 9])
def test_special_tokens_out_of_place_are_no_text(at_once: int) -> None:
    """Nor does what an answer says depend on how many of its tokens come at once."""
    specials = {"[THINK]": 1, "[/THINK]": 2, "[TOOL_CALLS]": 3}
    reader = reader_of(AnswerForm(format_named("mistral"), use_of(), thinks=True, thinking=True), specials)
    said = ["[THINK]", "\nHm.", "[THINK]", "[/THINK]", "Yes.\n", "[/THINK]", "[TOOL_CALLS]", '[{"name": "weather", ']
    tokens = [Spoken(specials.get(text, 0), "" if text in specials else text) for text in (*said, '"arguments": {}}]')]
    for first in range(0, len(tokens), at_once):
        reader.feed(tokens[first : first + at_once])
    reader.end()
    assert (reader.reasoning, reader.content, len(reader.calls)) == ("Hm.", "Yes.", 1)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_reasoning_before_calls(choice: str) -> None:
    """What is reasoned about a call is no call."""
    row = format_named("hermes")
    model = Model(row, False)
    one = row.written(CALLS[:1])
    form = AnswerForm(row, use_of(choice=choice), thinks=True)
    thought = "<think>\nI could write <tool_call> here.\n</think>\n\n"
    assert model.accepts(form, thought + one) and model.accepts(form, one)
    assert model.accepts(form, thought + "No.") == (choice == "auto")
    assert not model.accepts(form, f"{thought}<tool_call>\nNo.")
    reader, _ = model.read(form, thought + one)
    assert reader.reasoning == "I could write <tool_call> here." and len(reader.calls) == 1
    begun = AnswerForm(row, use_of(choice=choice), thinks=True, thinking=True)
    assert model.accepts(begun, f"Hm. <tool_call> or not?\n</think>\n\n{one}")
    assert not model.accepts(begun, one)


# As EXAONE 4's template describes and writes calls, in words of our own.
IN_ONE_LINE = (
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for message in messages %}[|{{ message.role }}|]"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}{{ '' if loop.first else '\n' }}"
    "{{ '<tool_call>' }}{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "{{ '</tool_call>' }}{% endfor %}{% endfor %}"
)


def test_calls_in_one_line(tmp_path: Path) -> None:
    """As EXAONE 4 writes them: no line end within the tags, for which the answer of Hermes' form was text."""
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(IN_ONE_LINE)
    text = Text(tmp_path)
    row = recognised(text.template_source(tools=True))
    assert row.name == "exaone4"
    calls = [{"id": str(number), "type": "function", "function": {"name": name, "arguments": arguments}}
             for number, (name, arguments) in enumerate(CALLS)]  # fmt: skip
    prompt = chat_prompt(text, [USER, {"role": "assistant", "content": None, "tool_calls": calls}], use_of()).text
    assert prompt.endswith(f"[|assistant|]{row.written(CALLS)}")
    assert (
        row.written(CALLS[:1]) == '<tool_call>{"name": "weather", "arguments": {"days": 7, "place": "Ulm"}}</tool_call>'
    )


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_line_end_before_reasoning(choice: str, special: bool) -> None:
    """As GLM-4.5 begins its answers: neither a call nor the schema of the content could follow it."""
    row = format_named("glm4_5")
    model, form = Model(row, special), AnswerForm(row, use_of(choice=choice), thinks=True)
    one, schema = row.written(CALLS[:1]), Constraint.json_object()
    for begin in ("\n<think>", "<think>"):
        for thought in ("Look <up> there.", ""):
            answer = f"{begin}{thought}</think>\n{one}"
            assert model.accepts(form, answer)
            assert not model.accepts(form, f"{begin}{thought}{one}")
            reader, _ = model.read(form, answer)
            assert (reader.reasoning, reader.content, len(reader.calls)) == (thought, "", 1)
        assert model.accepts(AnswerForm(row, thinks=True), f'{begin}Hm.</think>\n{{"a": 1}}', schema)
    assert not model.accepts(form, f"\n\n<think>Hm.</think>\n{one}") or (choice == "auto" and not special)


def test_calls_name_their_ids() -> None:
    """As Mistral Small 3.2 does: the id of a result is then that of the model's own call."""
    row = format_named("mistral-ids")
    model, form = Model(row, False), AnswerForm(row, use_of())
    reader, _ = model.read(form, "[TOOL_CALLS]clock[CALL_ID]a1B2c3D4e[ARGS]{}")
    assert [(call.id, call.name, call.arguments) for call in reader.calls] == [("a1B2c3D4e", "clock", "{}")]
    for wrong in ("a1B2c3D4", "a1B2c3D4e5", "a1B2c3D4-"):
        assert not model.accepts(form, f"[TOOL_CALLS]clock[CALL_ID]{wrong}[ARGS]{{}}")


@pytest.mark.parametrize("name", ["mistral-args", "mistral-ids", "seed-oss"])
def test_reasoning_in_tags_of_a_family(name: str, sources: dict[str, tuple[Any, Text]]) -> None:
    row = format_named(name)
    model, (begin, end) = Model(row, False), row.thought
    reader, _ = model.read(AnswerForm(row, use_of(), thinks=True), f"{begin}Two < three.{end}{row.written(CALLS[:1])}")
    assert (reader.reasoning, reader.content, len(reader.calls)) == ("Two < three.", "", 1)
    for template, thinks in (("ministral3", True), ("seed_oss", True), ("mistral_small3_2", False)):
        source = sources[template][1].template_source(tools=True)
        assert recognised(source).reasons(source) is thinks


def test_content_with_a_schema_beside_tools() -> None:
    row = format_named("hermes")
    model, form = Model(row, False), AnswerForm(row, use_of())
    schema = Constraint.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert model.accepts(form, '{"a": 1}', schema) and model.accepts(form, row.written(CALLS), schema)
    assert not model.accepts(form, "Hello.", schema)


def test_reasoning_before_a_schema() -> None:
    """It is free, and what follows it is the whole content."""
    row = format_named("hermes")
    model, schema = Model(row, False), Constraint.json_object()
    form = AnswerForm(row, thinks=True)
    assert model.accepts(form, '<think>\nOne {brace.\n</think>\n\n{"a": 1}', schema)
    assert model.accepts(form, '{"a": 1}', schema) and not model.accepts(form, "<think>\nHm.\n</think>\n\nNo.", schema)
    begun = AnswerForm(row, thinks=True, thinking=True)
    assert model.accepts(begun, 'Hm.\n</think>\n\n{"a": 1}', schema) and not model.accepts(begun, '{"a": 1}', schema)


def test_schemas_of_arguments() -> None:
    """Objects have the properties that are named, descriptions do not count, and what cannot be followed is an error
    only where it was promised."""
    (tool,) = use_of([WEATHER]).tools
    assert argument_schema(tool, must_follow=True)["additionalProperties"] is False
    hard = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "b"}, "title": "A"}}}
    for strict, must in ((False, True), (True, True), (False, False)):
        use = use_of([{"type": "function", "function": {"name": "f", "strict": strict, "parameters": hard}}])
        schema = argument_schema(use.tools[0], must_follow=must)
        assert "title" not in schema["properties"]["a"] and schema["x-guidance"]["lenient"] is not must
    open_ = {"type": "object", "additionalProperties": {"type": "integer"}}
    use = use_of([{"type": "function", "function": {"name": "f", "parameters": open_}}])
    assert argument_schema(use.tools[0], must_follow=True)["additionalProperties"] == {"type": "integer"}
    (clock,) = use_of([CLOCK]).tools
    assert argument_schema(clock, must_follow=True)["properties"] == {}


@pytest.mark.parametrize(
    ("tools", "choice", "parallel", "says"),
    [
        ("f", None, None, "tools is 'f', but must be a list"),
        ([1], None, None, "tools[0] is 1, but must be an object"),
        ([{"type": "web_search"}], None, None, "tools[0].type is 'web_search', but must be 'function'"),
        ([{"type": "function", "function": {}}], None, None, "tools[0].function.name is None, but must be 1 to 64"),
        ([{"name": "a b"}], None, None, "tools[0].name is 'a b'"),
        ([{"name": "f", "parameters": []}], None, None, "tools[0].parameters is []"),
        ([{"name": "f", "strict": 1}], None, None, "tools[0].strict is 1"),
        ([CLOCK, CLOCK], None, None, "tools have the name 'clock' twice"),
        ([CLOCK], "any", None, "tool_choice is 'any', but must be one of none, auto, required"),
        ([CLOCK], {"type": "function", "function": {"name": "g"}}, None, "tool_choice names 'g'"),
        ([CLOCK], {"type": "function", "function": {"name": ["g"]}}, None, "tool_choice names ['g']"),
        ([CLOCK], {"type": "custom"}, None, "tool_choice.type is 'custom'"),
        ([CLOCK], {"type": "allowed_tools", "mode": "x"}, None, "tool_choice.allowed_tools.mode is 'x'"),
        ([CLOCK], {"type": "allowed_tools", "tools": []}, None, "tool_choice.allowed_tools.tools is empty"),
        ([], "required", None, "tool_choice asks for a call, but there are no tools"),
        ([CLOCK], None, 1, "parallel_tool_calls is 1, but must be true or false"),
    ],
)
def test_wrong_tools_are_named(tools: Any, choice: Any, parallel: Any, says: str) -> None:
    with pytest.raises(RequestError, match=re.escape(says)):
        ToolUse.of(tools, choice, parallel)


def test_which_tools_may_be_called() -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLOCK]}}
    use = use_of(choice=allowed)
    assert [tool.name for tool in use.tools] == ["weather", "clock"]
    assert [tool.name for tool in use.callable] == ["clock"] and use.required and use.parallel
    named = use_of(choice={"type": "function", "function": {"name": "clock"}})
    assert named.required and not named.parallel
    assert ToolUse.of([CLOCK], "none") is None is ToolUse.of([]) is ToolUse.of(None, "auto")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"id": "1"}, "must have a function with a name"),
        ({"function": {"name": "f", "arguments": "{"}}, "must be the JSON text of an object"),
        ({"function": {"name": "f", "arguments": [1]}}, "must be the JSON text of an object"),
    ],
)
def test_wrong_calls_in_messages(call: Any, says: str, sources: dict[str, tuple[Any, Text]]) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\].tool_calls\[0\].*{says}"):
        chat_prompt(sources["qwen3"][1], [USER, {"role": "assistant", "tool_calls": [call]}])
