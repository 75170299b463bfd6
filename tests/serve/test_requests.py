"""The field table: what a request may say, what is ignored, what is refused, and nothing is coerced."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from eagle_runtime.drafting.methods import METHODS
from eagle_serve.cli import main
from eagle_serve.errors import ApiError
from eagle_serve.grammar import Grammar
from eagle_serve.json_body import parse_json
from eagle_serve.options import Options
from eagle_serve.refused import Endpoint, neutral
from eagle_serve.request import Request, parse_request

USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMES_OF_METHODS = tuple(method.name for method in METHODS)
NAMES = ("pair", "other")


def parsed(endpoint: Endpoint = "chat", options: Options | None = None, **fields: Any) -> Request:
    """A request with one message, or the prompt "x", and these fields."""
    own = {"messages": USER} if endpoint == "chat" else {"prompt": "x"}
    return parse_request({**own, **fields}, endpoint, options or Options(), NAMES, own_penalty=1.1)


def one(name: str, value: object) -> dict[str, Any]:
    """One field."""
    return {name: value}


def refusal(endpoint: Endpoint = "chat", options: Options | None = None, **fields: Any) -> tuple[int, str, str | None]:
    """Status, code and param of the error."""
    with pytest.raises(ApiError) as caught:
        parsed(endpoint, options, **fields)
    assert len(caught.value.message) < 400 and "\n" not in caught.value.message
    return caught.value.status, caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_p": 0}, {"top_p": 1e-9}),
        ({"top_k": 40}, {"top_k": 40}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"random_seed": 4}, {"seed": 4}),
        ({"random_seed": 4, "seed": 5}, {"seed": 5}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": -2}, {"presence_penalty": -2.0}),
        ({"frequency_penalty": 2}, {"frequency_penalty": 2.0}),
        ({"logit_bias": {"5": -100, "7": 1.5}}, {"logit_bias": {5: -100.0, 7: 1.5}}),
        ({"seed": 3}, {"seed": 3}),
        ({"seed": -1}, {}),
        ({"seed": -2}, {"seed": 2**64 - 2}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {"stop": ()}),
        ({"stop_token_ids": [1, 2]}, {"stop_token_ids": (1, 2)}),
        ({"min_tokens": 4}, {"min_new_tokens": 4}),
        ({"min_tokens": 0}, {}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"eagle": {"method": "vanilla"}}, {"method": "vanilla"}),
        ({"eagle": {"tree": "chain", "method": "lookup"}}, {"tree": "chain", "method": "lookup"}),
        *(({"eagle": {"method": name}}, {"method": name}) for name in NAMES_OF_METHODS),
        ({"temperature": None, "stop": None, "seed": None}, {}),
    ],
)
def test_settings(fields: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for endpoint in ("chat", "completions"):
        request = parsed(endpoint, **fields)
        assert request.settings == settings
        assert request.ignored == ()


def test_what_is_not_a_setting() -> None:
    request = parsed(
        model="any", stream=True, stream_options={"include_usage": True}, max_tokens=5, max_completion_tokens=7,
        logprobs=True, top_logprobs=3, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low",
        prediction={"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        eagle={"trace": True}, n=1,
    )  # fmt: skip
    assert (request.stream, request.include_usage, request.max_tokens, request.logprobs) == (True, True, 7, 3)
    assert request.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}
    assert (request.prediction, request.trace, request.ignored, request.model) == ("a\nb", True, (), "any")
    plain = parsed()
    assert (plain.stream, plain.include_usage, plain.max_tokens, plain.logprobs) == (False, False, None, None)
    assert parsed(max_tokens=-1).max_tokens is None
    assert parsed(max_tokens=32_000).max_tokens == 32_000  # the engine takes what is left of the context
    assert parsed(n_predict=7).max_tokens == parsed(num_predict=5, max_new_tokens=7).max_tokens == 7
    assert parsed(logprobs=True).logprobs == 0
    assert parsed("completions").max_tokens == 16
    assert parsed("completions", logprobs=2, best_of=1).logprobs == 2
    assert parsed("completions", logprobs=0).logprobs == 0
    assert parsed("completions", logprobs=False).logprobs is None
    assert parsed("completions", prompt=[3, 4]).prompts == parsed("completions", prompt=[[3, 4]]).prompts == ((3, 4),)
    assert parsed("completions", prompt=["a"]).prompts == ("a",)
    assert parsed("completions", prompt=["a", [1]]).prompts == ("a", (1,)) and parsed(n=3).choices == 3
    assert parsed("completions", n=2, best_of=2).choices == 2
    for name, value in (("enable_thinking", False), ("thinking", {"type": "disabled"}), ("thinking_budget", 0)):
        assert parsed(**one(name, value)).template_kwargs == {"enable_thinking": False}
    told = {"effort": "low", "enabled": True, "exclude": False}
    assert parsed(reasoning=told).template_kwargs == {"reasoning_effort": "low", "enable_thinking": True}
    assert parsed(reasoning={"effort": "low"}, reasoning_effort="high").template_kwargs == {"reasoning_effort": "high"}


def test_answers_do_not_go_on_with_messages() -> None:
    begun = [*USER, {"role": "assistant", "content": "def f("}]
    assert refusal(messages=begun, continue_final_message=True)[1:] == (
        "unsupported_parameter",
        "continue_final_message",
    )
    assert refusal(messages=[{**begun[1], "prefix": True}])[1:] == ("unsupported_parameter", "messages[0].prefix")
    assert len(parsed(messages=[{**begun[1], "prefix": False}]).messages) == 1


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", SCHEMA)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Grammar("json_schema", SCHEMA),
        ),
        ({"eagle": {"constraint": {"regex": "a+"}}}, Grammar("regex", "a+")),
        ({"eagle": {"constraint": {"lark": "start: /a/"}}}, Grammar("lark", "start: /a/")),
        ({"eagle": {"constraint": {"choice": ["a", "b"]}}}, Grammar("choice", ("a", "b"))),
        ({"eagle": {"constraint": {"json_schema": SCHEMA}}}, Grammar("json_schema", SCHEMA)),
        ({"eagle": {"constraint": None}}, None),
    ],
)
def test_grammars(fields: dict[str, Any], grammar: Grammar | None) -> None:
    assert parsed(**fields).grammar == grammar
    assert parsed("completions", **fields).grammar == grammar


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([{"role": "developer", "content": "a"}, *USER], [{"role": "system", "content": "a"}, *USER]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        ([{"role": "user", "content": "a", "name": "n", "id": 3}], [{"role": "user", "content": "a", "name": "n"}]),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": ""}]),
        (
            [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "4"},
            ],
            [
                *USER,
                {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
                {"role": "tool", "content": "4", "tool_call_id": "1"},
            ],
        ),
    ],
)
def test_messages(messages: list[dict[str, Any]], rendered: list[dict[str, Any]]) -> None:
    assert list(parsed(messages=messages).messages) == rendered


IGNORED = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity", "draft_model", "ttl", "something_new", "cache_prompt", "id_slot",
)  # fmt: skip


@pytest.mark.parametrize("name", IGNORED)
def test_ignored(name: str) -> None:
    assert parsed(**one(name, "x")).ignored == (name,)
    assert parsed("completions", **one(name, {"a": 1})).ignored == (name,)


def test_tools_that_are_not_called_are_ignored() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert parsed(tools=[tool], tool_choice="none").ignored == ("tools",)
    assert parsed(tools=[], tool_choice="auto").ignored == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2}, {"suffix": "x"}, {"audio": {"voice": "x"}},
        {"modalities": ["text", "audio"]}, {"web_search_options": {}},
        {"moderation": True}, {"mirostat": 2}, {"mirostat_mode": 1}, {"typical_p": 0.9}, {"tfs_z": 0.9},
        {"xtc_probability": 0.5}, {"dry_multiplier": 0.8}, {"dynatemp_range": 0.5}, {"use_beam_search": True},
        {"length_penalty": 2}, {"grammar": "root ::= x"}, {"ebnf": "x"}, {"regex": "x"},
        {"guided_json": {"type": "object"}}, {"guided_regex": "[0-9]+"}, {"guided_choice": ["a"]},
        {"structured_outputs": {"choice": ["a"]}}, {"json_schema": {"type": "object"}},
        {"continue_final_message": True}, {"add_generation_prompt": False}, {"guided_grammar": "root ::= x"},
        {"structural_tag": "{}"}, {"bad_words": ["self"]}, {"allowed_token_ids": [5, 6]}, {"prompt_logprobs": 1},
        {"include_stop_str_in_output": True}, {"skip_special_tokens": False}, {"truncate_prompt_tokens": 5},
        {"chat_template": "{{ messages }}"}, {"logits_processors": ["x"]}, {"stop_regex": "a+"}, {"format": "json"},
        {"samplers": ["top_k"]}, {"top_n_sigma": 1.5}, {"repeat_last_n": 64},
        {"do_sample": False}, {"num_beams": 2}, {"no_repeat_ngram_size": 3}, {"negative_prompt": "x"},
        {"ban_eos_token": True}, {"safe_prompt": True}, {"think": True}, {"adapter_id": "x"},
        {"lora_adapter": "x"}, {"rep_pen": 1.2}, {"truncate": 20}, {"return_token_ids": True},
        {"return_logprob": True}, {"separate_reasoning": False}, {"reasoning_format": "none"},
        {"lora": [{"id": 0, "scale": 1}]}, {"min_new_tokens": 3}, {"system": "Be brief"},
        {"constraint": {"regex": "[0-9]+"}},
    ],
    ids=lambda fields: "-".join(fields),
)  # fmt: skip
def test_refused(fields: dict[str, Any]) -> None:
    assert refusal(**fields) == (400, "unsupported_parameter", next(iter(fields)))
    assert refusal("completions", **fields) == (400, "unsupported_parameter", next(iter(fields)))


def test_neutral_values_of_refused_fields_pass() -> None:
    endpoints: tuple[Endpoint, ...] = ("chat", "completions")
    for endpoint in endpoints:
        for name, values in neutral(endpoint).items():
            for value in values:
                own = {"messages": USER} if endpoint == "chat" else {"prompt": "x"}
                request = parse_request({**own, name: value}, endpoint, Options(), NAMES, own_penalty=1.1)
                assert request.ignored == (), name
    assert parsed(mirostat=0, mirostat_tau=5.0).ignored == ("mirostat_tau",)
    assert parsed(modalities=["text"]).ignored == ()
    assert refusal(mirostat=False) == (400, "unsupported_parameter", "mirostat")  # false is not a number


def test_how_penalties_count_asks_nothing_where_there_are_none() -> None:
    """A request that does not say has the model's own repetition penalty."""
    names = {"repeat_last_n": 64, "penalty_last_n": 64, "penalize_nl": True}
    for name, value in names.items():
        assert parsed(**one(name, value), repeat_penalty=1.0).ignored == ()
        assert refusal(**one(name, value))[2] == refusal(**one(name, value), frequency_penalty=0.5)[2] == name
        request = parse_request({"prompt": "x", name: value}, "completions", Options(), NAMES, own_penalty=1.0)
        assert request.ignored == ()


def test_parts_of_thinking_are_taken_or_refused() -> None:
    for name, part, value in (
        ("thinking", "budget_tokens", 100),
        ("reasoning", "max_tokens", 9),
        ("reasoning", "exclude", True),
    ):
        asked = one(name, {"type": "enabled", part: value} if name == "thinking" else {part: value})
        assert refusal(**asked) == (400, "unsupported_parameter", f"{name}.{part}")
        assert refusal("completions", **asked) == (400, "unsupported_parameter", name)
    assert refusal(thinking={"type": "auto"})[2] == "thinking.type"
    assert refusal(thinking_budget=100) == (400, "unsupported_parameter", "thinking_budget")


def test_refused_parts_of_messages() -> None:
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}, {"type": "file"}):
        where = "messages[1].content[0]"
        messages = [*USER, {"role": "user", "content": [part]}]
        assert refusal(messages=messages) == (400, "unsupported_parameter", where)
    messages = [{"role": "assistant", "content": "x", "audio": {"id": "1"}}]
    assert refusal(messages=messages) == (400, "unsupported_parameter", "messages[0].audio")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "1"}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": [1]}, "top_p"),
        ({"top_k": 1.0}, "top_k"), ({"top_k": "1"}, "top_k"), ({"min_p": {}}, "min_p"), ({"seed": 1.5}, "seed"),
        ({"seed": "1"}, "seed"), ({"stop": 1}, "stop"), ({"stop": [1]}, "stop[0]"), ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": "1"}, "stop_token_ids"), ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"max_tokens": 5.0}, "max_tokens"), ({"max_tokens": True}, "max_tokens"), ({"n": "1"}, "n"),
        ({"stream": 1}, "stream"), ({"stream": "true"}, "stream"), ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"ignore_eos": 0}, "ignore_eos"), ({"min_tokens": 1.0}, "min_tokens"), ({"logit_bias": []}, "logit_bias"),
        ({"logit_bias": {"3": "1"}}, "logit_bias.3"), ({"model": 3}, "model"), ({"eagle": []}, "eagle"),
        ({"eagle": {"trace": 1}}, "eagle.trace"), ({"eagle": {"constraint": "x"}}, "eagle.constraint"),
        ({"response_format": "json"}, "response_format"), ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
         "response_format.json_schema.schema"),
        ({"eagle": {"constraint": {"regex": 3}}}, "eagle.constraint.regex"),
        ({"eagle": {"constraint": {"choice": "ab"}}}, "eagle.constraint.choice"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields) == (400, "invalid_type", param)
    assert refusal("completions", **fields) == (400, "invalid_type", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"), ({"messages": ["hi"]}, "messages[0]"), ({"messages": None}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"logprobs": 1}, "logprobs"), ({"top_logprobs": "2", "logprobs": True}, "top_logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"), ({"reasoning_effort": 1}, "reasoning_effort"),
        ({"prediction": "x"}, "prediction"), ({"prediction": {"type": "content"}}, "prediction.content"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_types_of_chats(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields) == (400, "invalid_type", param)


@pytest.mark.parametrize(
    "fields",
    [{"prompt": None}, {"prompt": 3}, {"prompt": {"a": 1}}],
    ids=str,
)
def test_wrong_prompts(fields: dict[str, Any]) -> None:
    assert refusal("completions", **fields) == (400, "invalid_type", "prompt")
    wrong: list[tuple[list[Any], str, str]] = [
        (["a", 3], "invalid_type", "prompt[1]"), ([[1], [2, "b"]], "invalid_type", "prompt[1][1]"),
        ([["a"]], "invalid_type", "prompt[0]"), ([3, "a"], "invalid_type", "prompt[1]"),
        (["a", ""], "invalid_value", "prompt[1]"), ([[1], []], "invalid_value", "prompt[1]"),
        (["a"] * 129, "invalid_value", "prompt"), ([], "invalid_value", "prompt"),
    ]  # fmt: skip
    for prompts, code, param in wrong:
        assert refusal("completions", prompt=prompts) == (400, code, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": 10**400}, "temperature"), ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"), ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"), ({"seed": 2**64}, "seed"), ({"seed": -(2**63) - 1}, "seed"),
        ({"repeat_penalty": 1.2, "repetition_penalty": 1.1}, "repeat_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"), ({"stop": ["a"] * 17}, "stop"), ({"stop": ""}, "stop[0]"),
        ({"stop": "a" * 257}, "stop[0]"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": -1}, "min_tokens"), ({"n": 0}, "n"),
        ({"response_format": {"type": "x"}}, "response_format.type"),
        ({"eagle": {"method": "x"}}, "eagle.method"), ({"eagle": {"tree": "x"}}, "eagle.tree"),
        ({"eagle": {"x": 1}}, "eagle"), ({"eagle": {"constraint": {}}}, "eagle.constraint"),
        ({"eagle": {"constraint": {"regex": "a", "lark": "b"}}}, "eagle.constraint"),
        ({"eagle": {"constraint": {"regex": "a"}}, "response_format": {"type": "json_object"}}, "eagle.constraint"),
        ({"stop": ["\ud800"]}, "stop[0]"), ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields) == (400, "invalid_value", param)
    assert refusal("completions", **fields) == (400, "invalid_value", param)


def test_limits_are_told_to_the_last_digit() -> None:
    with pytest.raises(ApiError, match=rf"from -{2**63} to {2**64 - 1}$"):
        parsed(seed=2**64)


def test_wrong_values_of_one_endpoint() -> None:
    assert refusal(messages=[]) == (400, "invalid_value", "messages")
    assert refusal(messages=USER * 1025) == (400, "invalid_value", "messages")
    assert len(parsed(messages=USER * 1024).messages) == 1024
    assert refusal(messages=[{"role": "critic", "content": "x"}]) == (400, "invalid_value", "messages[0].role")
    assert refusal(messages=[{"role": "user", "content": "\udc00"}]) == (400, "invalid_value", "messages[0].content")
    assert refusal(top_logprobs=2) == (400, "invalid_value", "top_logprobs")
    assert refusal(logprobs=True, top_logprobs=21) == (400, "invalid_value", "top_logprobs")
    assert refusal(chat_template_kwargs={"messages": 1}) == (400, "invalid_value", "chat_template_kwargs.messages")
    assert refusal(chat_template_kwargs={"chat_template": ""})[2] == "chat_template_kwargs.chat_template"
    assert refusal(prediction={"type": "x", "content": "a"}) == (400, "invalid_value", "prediction.type")
    assert refusal("completions", prompt="") == (400, "invalid_value", "prompt")
    assert refusal("completions", prompt=[]) == (400, "invalid_value", "prompt")
    assert refusal("completions", prompt=[-1]) == (400, "invalid_value", "prompt[0]")
    assert refusal("completions", logprobs=21) == (400, "invalid_value", "logprobs")


def test_schemas_have_a_size() -> None:
    large = {"enum": ["x" * (1 << 16)]}
    wanted = {"type": "json_schema", "json_schema": {"schema": large}}
    assert refusal(response_format=wanted) == (400, "invalid_schema", "response_format.json_schema.schema")
    assert refusal(eagle={"constraint": {"regex": "x" * 70_000}}) == (400, "invalid_schema", "eagle.constraint.regex")


def test_models() -> None:
    strict = Options(strict_model=True)
    assert parsed(model="anything").model == "anything"
    assert parsed(options=strict, model="other").model == "other"
    assert refusal(options=strict, model="gpt-4o") == (404, "model_not_found", "model")
    assert parsed(options=strict).model is None


def test_bodies() -> None:
    assert parse_json(b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}', 64) == {"a": [1, 2.5, None, True, "é"]}
    nested = b'{"a":' + b"[" * 62 + b"1" + b"]" * 62 + b"}"
    assert parse_json(nested, 64)
    deep = b'{"a":' + b"[" * 64 + b"]" * 64 + b"}"
    wrong = [
        b"", b"{", b"[]", b"3", b'"x"', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1, "a": 2}', b"{'a': 1}",
        b'{"a": 1}}', b'\xff{"a": 1}', b"\xef\xbb\xbf{}", b'{"a": 1' + b"0" * 5000 + b"}", deep, b"[" * 100_000,
        b'{"a": "\x01"}', b'{"a": 01}',
    ]  # fmt: skip
    for body in wrong:
        with pytest.raises(ApiError) as caught:
            parse_json(body, 64)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json"), body[:20]
        assert json.loads(caught.value.body)["error"]["type"] == "invalid_request_error"


def test_errors_are_json_whatever_they_quote() -> None:
    error = ApiError(400, "invalid_value", "half \ud800 of it", "stop")
    assert json.loads(error.body)["error"] == {
        "message": "half \ud800 of it",
        "type": "invalid_request_error",
        "param": "stop",
        "code": "invalid_value",
    }


def test_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert 24 <= len(said.splitlines()) <= 40 and "--allowed-origins" in said
