"""Acceptance test 10: OpenAI's own client, against the model called directly."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionChunk

from conftest import put_tokenizer
from eagle_runtime import EagleModel, Token
from eagle_runtime.drafting.methods import NAMES
from eagle_serve import Options
from eagle_serve.figures import logprob
from eagle_serve.server import serving
from raw_http import events, post, request

Chat = list[Any]
MESSAGES: Chat = [{"role": "system", "content": "Say it."}, {"role": "user", "content": "What is it?"}]
SETTINGS: dict[str, Any] = {"temperature": 0.8, "seed": 11}
STREAM_USAGE: Any = {"include_usage": True}


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_chat(client: OpenAI, served_model: EagleModel) -> None:
    wanted = served_model.generate(MESSAGES, max_new_tokens=40, method="vanilla", **SETTINGS)
    answer = client.chat.completions.create(model="any", messages=MESSAGES, max_completion_tokens=40, **SETTINGS)
    (choice,) = answer.choices
    assert choice.message.content == wanted.text and choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason
    assert answer.model == "pair" and answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint is not None and f"_{served_model.backend}-" in answer.system_fingerprint
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == wanted.usage.prompt_tokens
    assert usage.completion_tokens == len(wanted.token_ids) == usage.total_tokens - usage.prompt_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens_details is None  # without `prediction`
    eagle: Any = answer.model_extra and answer.model_extra["eagle"]
    assert eagle["seed"] == 11 and eagle["method"] == "eagle+lookup" and eagle["tau"] >= 1


def test_chat_stream(client: OpenAI, served_model: EagleModel) -> None:
    wanted = served_model.generate(MESSAGES, max_new_tokens=40, method="vanilla", **SETTINGS)
    chunks = list(
        client.chat.completions.create(
            model="any", messages=MESSAGES, max_tokens=40, stream=True, stream_options=STREAM_USAGE, **SETTINGS
        )
    )
    assert text_of(chunks) == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *content, last, usage = chunks
    assert [choice.finish_reason for chunk in content for choice in chunk.choices] == [None] * len(content)
    assert last.choices[0].finish_reason == wanted.finish_reason
    assert usage.choices == [] and usage.usage is not None
    assert usage.usage.completion_tokens == len(wanted.token_ids)
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completions(client: OpenAI, served_model: EagleModel) -> None:
    wanted = served_model.generate("def f(", max_new_tokens=16, temperature=0)
    answer = client.completions.create(model="any", prompt="def f(", temperature=0)
    assert answer.choices[0].text == wanted.text and answer.choices[0].finish_reason == "length"
    of_ids = client.completions.create(model="any", prompt=served_model.text.encode("def f("), temperature=0)
    assert of_ids.choices[0].text == wanted.text
    stream = client.completions.create(model="any", prompt="def f(", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted.text


def test_sampling_is_the_models_own_where_a_request_does_not_say(client: OpenAI, served_model: EagleModel) -> None:
    wanted = served_model.generate(MESSAGES, max_new_tokens=30, seed=5)
    answer = client.chat.completions.create(model="any", messages=MESSAGES, max_tokens=30, seed=5)
    assert answer.choices[0].message.content == wanted.text


def test_logprobs(client: OpenAI, served_model: EagleModel) -> None:
    wanted = list(served_model.stream(MESSAGES, max_new_tokens=12, temperature=0, logprobs=3, ignore_eos=True))
    tokens = [token for piece in wanted for token in piece.tokens]
    more: Any = {"ignore_eos": True}
    answer = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3, extra_body=more
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == [token.text for token in tokens]
    assert [entry.logprob for entry in logprobs.content] == [token.logprob for token in tokens]
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry, token in zip(logprobs.content, tokens, strict=True):
        assert [other.logprob for other in entry.top_logprobs] == [logprob for _, logprob in token.top]
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.bytes == list(entry.token.encode()) and math.exp(entry.logprob) <= 1
    stream = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, stream=True, extra_body=more
    )
    said = [c.logprobs.content for chunk in stream for c in chunk.choices if c.logprobs and c.logprobs.content]
    assert [entry.logprob for part in said for entry in part] == [token.logprob for token in tokens]
    assert all(entry.top_logprobs == [] for part in said for entry in part)
    older = client.completions.create(model="any", prompt="def f(", logprobs=2, max_tokens=8, temperature=0)
    assert older.choices[0].logprobs is not None and older.choices[0].logprobs.tokens is not None
    assert "".join(older.choices[0].logprobs.tokens) == older.choices[0].text
    offsets = older.choices[0].logprobs.text_offset
    assert offsets is not None and offsets[0] == 0 and offsets == sorted(offsets)


def test_part_of_a_character_has_no_bytes_of_another() -> None:
    """A runner-up that is a part of one is shown as U+FFFD, which is not what the model would have written."""
    texts = {1: "\ufffd", 2: " \ufffd", 3: "é"}
    engine: Any = SimpleNamespace(token_text=texts.get)
    told = logprob(engine, Token(3, "é", drafted=False, logprob=-0.5, top=((3, -0.5), (1, -1.0), (2, -2.0))))
    assert told["bytes"] == [0xC3, 0xA9]
    assert [one["bytes"] for one in told["top_logprobs"]] == [[0xC3, 0xA9], [], []]


def test_stop_strings_end_the_text(client: OpenAI) -> None:
    whole = client.completions.create(model="any", prompt="def f(", temperature=0, max_tokens=30).choices[0].text
    stop = whole[7:9]
    wanted = whole[: whole.index(stop)]
    answer = client.completions.create(model="any", prompt="def f(", temperature=0, max_tokens=30, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop")
    stream = client.completions.create(
        model="any", prompt="def f(", temperature=0, max_tokens=30, stop=[stop], stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == wanted


def test_traced_tokens_say_which_were_drafted(client: OpenAI) -> None:
    more: Any = {"eagle": {"trace": True, "method": "eagle", "tree": "dynamic"}}
    answer = client.completions.create(
        model="any", prompt="def f(", temperature=0, max_tokens=30, extra_body=more
    ).model_dump()
    tokens = answer["eagle"]["tokens"]
    assert "".join(token["text"] for token in tokens) == answer["choices"][0]["text"]
    drafted = sum(token["drafted"] for token in tokens)
    assert 0 < drafted <= answer["timings"]["draft_n_accepted"] <= answer["timings"]["draft_n"]
    plain = client.completions.create(
        model="any", prompt="def f(", temperature=0, max_tokens=30, extra_body={"eagle": {"method": "vanilla"}}
    ).model_dump()
    assert plain["choices"] == answer["choices"] and "tokens" not in plain["eagle"]
    assert plain["timings"]["draft_n"] == 0 and plain["eagle"]["tau"] == 1


def test_models(client: OpenAI, served_model: EagleModel) -> None:
    (model,) = client.models.list().data
    assert model.id == "pair" and client.models.retrieve("pair").id == "pair"
    meta: Any = model.model_extra and model.model_extra["meta"]
    assert meta["context"] == served_model.context and meta["backend"] == served_model.backend and meta["chat"] is True
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


def test_count_tokens(address: str, served_model: EagleModel) -> None:
    counted = post(address, "/v1/count_tokens", {"messages": MESSAGES, "max_tokens": 3}).data
    ids = served_model.text.encode(MESSAGES)
    assert (counted["count"], counted["ids"], counted["context"]) == (len(ids), ids, served_model.context)
    assert post(address, "/v1/count_tokens", {"prompt": "ab"}).data["count"] == served_model.count_tokens("ab")


WRONG: list[tuple[dict[str, Any], type[openai.APIStatusError], str, str | None]] = [
    ({"temperature": -1}, openai.BadRequestError, "invalid_value", "temperature"),
    ({"n": 129}, openai.BadRequestError, "invalid_value", "n"),
    ({"extra_body": {"best_of": 2}}, openai.BadRequestError, "unsupported_parameter", "best_of"),
    ({"stop": [""]}, openai.BadRequestError, "invalid_value", "stop[0]"),
    ({"extra_body": {"stream": "yes"}}, openai.BadRequestError, "invalid_type", "stream"),
    ({"messages": [{"role": "user", "content": "a" * 3000}]}, openai.BadRequestError, "context_length_exceeded",
     "messages"),
    ({"messages": [{"role": "user", "content": "refuse this"}]}, openai.BadRequestError, "template_error", "messages"),
    ({"logit_bias": {"999": 1}}, openai.BadRequestError, "invalid_value", "logit_bias"),
    ({"extra_body": {"min_tokens": 9}, "max_tokens": 3}, openai.BadRequestError, "invalid_value", "min_tokens"),
    ({"extra_body": {"stop_token_ids": [2**31]}}, openai.BadRequestError, "invalid_value", "stop_token_ids[0]"),
    ({"extra_body": {"eagle": {"method": "lookup", "tree": "dynamic"}}}, openai.BadRequestError, "invalid_value",
     "eagle.method"),
    ({"extra_body": {"eagle": {"method": "draft-model"}}}, openai.BadRequestError, "invalid_value", "eagle.method"),
    ({"extra_body": {"eagle": {"method": "medusa"}}}, openai.BadRequestError, "invalid_value", "eagle.method"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "error", "code", "param"), WRONG, ids=lambda part: str(part)[:40])
def test_errors_have_their_class(
    client: OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], code: str, param: str | None
) -> None:
    for streamed in (False, True):
        with pytest.raises(error) as caught:
            client.chat.completions.create(**{"model": "any", "messages": MESSAGES, "stream": streamed, **fields})
        assert isinstance(caught.value.body, dict)
        assert (caught.value.body["code"], caught.value.body["param"]) == (code, param)
        assert "_new_tokens" not in caught.value.body["message"]  # the runtime's own names


def test_every_method_is_served_by_its_name(
    served_bundle: Path, bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    second = shutil.copytree(bundle_of("eagle1"), tmp_path / "second")
    put_tokenizer(second)
    with (
        EagleModel.load(served_bundle, draft_bundle=[served_bundle, second], threads=1) as model,
        serving(model, served_bundle) as where,
        OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=0) as client,
    ):
        wanted = model.generate(MESSAGES, max_new_tokens=16, method="vanilla", **SETTINGS)
        page = request(where, "GET", "/").body.decode()
        for name in (None, *NAMES):
            assert f"<option>{name}</option>" in page or name is None
            body = {} if name is None else {"eagle": {"method": name}}
            answer = client.chat.completions.create(
                model="any", messages=MESSAGES, max_completion_tokens=16, extra_body=body, **SETTINGS
            )
            eagle: Any = answer.model_extra and answer.model_extra["eagle"]
            assert answer.choices[0].message.content == wanted.text
            assert eagle["method"] == (name or "specinfer")


def test_errors_of_keys_models_and_hosts(served_model: EagleModel, served_bundle: Path) -> None:
    key = "a" * 20
    options = Options(api_key=key, strict_model=True, aliases=("gpt-4o",))
    with serving(served_model, served_bundle, options) as where:
        ask: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 1}
        with OpenAI(base_url=f"{where}/v1", api_key=key, max_retries=0) as client:
            assert client.chat.completions.create(model="gpt-4o", **ask).model == "pair"
            assert [model.id for model in client.models.list().data] == ["pair", "gpt-4o"]
            with pytest.raises(openai.NotFoundError) as missing:
                client.chat.completions.create(model="gpt-5", **ask)
            assert missing.value.code == "model_not_found"
            with pytest.raises(openai.PermissionDeniedError) as host:
                client.chat.completions.create(model="gpt-4o", extra_headers={"Host": "evil.example"}, **ask)
            assert host.value.code == "forbidden_host"
            with pytest.raises(openai.APIStatusError) as kind:
                client.chat.completions.create(model="gpt-4o", extra_headers={"Content-Type": "text/plain"}, **ask)
            assert kind.value.status_code == 415
        with OpenAI(base_url=f"{where}/v1", api_key="b" * 20, max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError) as wrong:
                stranger.models.list()
            assert wrong.value.code == "invalid_api_key"


def test_a_budget_that_is_too_small_is_no_reason_to_retry(served_bundle: Path) -> None:
    with (
        EagleModel.load(served_bundle, threads=1, kv_budget=100_000) as model,
        serving(model, served_bundle) as where,
        OpenAI(base_url=f"{where}/v1", api_key="none", max_retries=5) as client,
    ):
        assert client.completions.create(model="any", prompt="a", max_tokens=2).usage is not None
        for streamed in (False, True):
            with pytest.raises(openai.InternalServerError) as full:
                client.completions.create(model="any", prompt="a" * 1500, max_tokens=2, stream=streamed)
            assert (full.value.status_code, full.value.code) == (503, "memory_limit")
        assert 'status="503"} 2' in request(where, "GET", "/metrics").body.decode()  # and no retries


def test_a_body_that_is_too_large(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model="any", prompt="a" * (5 << 20))
    assert (large.value.status_code, large.value.code) == (413, "request_too_large")


def test_ignored_fields_are_listed(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="any", messages=MESSAGES, max_tokens=1, user="me", store=False, extra_body={"ttl": 300}
    )
    assert set(raw.headers["x-eagle-ignored"].split(", ")) == {"user", "store", "ttl"}
    assert "x-eagle-ignored" not in client.models.with_raw_response.list().headers


def test_a_stream_ends_with_done(address: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "temperature": 0}
    answer = post(address, "/v1/chat/completions", body)
    said = [event for event in events(answer.body) if not str(event).startswith(":")]
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8" and said[-1] == "[DONE]"
    assert said[-2]["choices"][0]["finish_reason"] in ("stop", "length") and "timings" in said[-2]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}


def test_json_schema(client: OpenAI) -> None:
    for streamed in (False, True):
        ask: dict[str, Any] = {
            "model": "any",
            "messages": MESSAGES,
            "seed": 3,
            "max_tokens": 200,
            "response_format": NAMED,
        }
        if streamed:
            text = text_of(list(client.chat.completions.create(stream=True, **ask)))
        else:
            choice = client.chat.completions.create(**ask).choices[0]
            assert choice.finish_reason == "stop"
            text = choice.message.content or ""
        person = json.loads(text)
        assert set(person) == {"name", "age"} and isinstance(person["age"], int) and len(person["name"]) <= 12


def test_other_forms_of_an_answer(client: OpenAI) -> None:
    def answered(**more: Any) -> str:
        answer = client.completions.create(model="any", prompt="x", max_tokens=60, seed=4, **more)
        return str(answer.choices[0].text)

    assert answered(extra_body={"eagle": {"constraint": {"choice": ["red", "green"]}}}) in ("red", "green")
    assert re.fullmatch("[ab]{3}c", answered(extra_body={"eagle": {"constraint": {"regex": "[ab]{3}c"}}}))
    assert answered(extra_body={"eagle": {"constraint": {"lark": 'start: "x" "y"+ "z"\n'}}}).startswith("xy")
    chosen = client.chat.completions.create(
        model="any", messages=MESSAGES, max_tokens=300, seed=9, response_format={"type": "json_object"}
    )
    if chosen.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(chosen.choices[0].message.content or ""), dict)


def test_wrong_schemas(client: OpenAI) -> None:
    for grammar, param in (
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
         "response_format.json_schema.schema"),
        ({"eagle": {"constraint": {"regex": "(("}}}, "eagle.constraint.regex"),
        ({"eagle": {"constraint": {"choice": []}}}, "eagle.constraint.choice"),
    ):  # fmt: skip
        for streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as wrong:
                client.chat.completions.create(model="any", messages=MESSAGES, stream=streamed, extra_body=grammar)
            assert (wrong.value.code, wrong.value.param) == ("invalid_schema", param)
    with pytest.raises(openai.BadRequestError) as both:
        client.chat.completions.create(
            model="any", messages=MESSAGES, response_format=NAMED, extra_body={"ignore_eos": True}
        )
    assert (both.value.code, both.value.param) == ("invalid_value", "ignore_eos")


def test_prediction(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 120, "temperature": 0}
    ask["extra_body"] = {"ignore_eos": True, "eagle": {"method": "lookup"}}
    plain = client.chat.completions.create(**ask)
    text = plain.choices[0].message.content or ""
    helped = client.chat.completions.create(prediction={"type": "content", "content": text[:100] + "?!?!"}, **ask)
    assert helped.choices[0].message.content == text
    assert helped.usage is not None and helped.usage.completion_tokens_details is not None
    details = helped.usage.completion_tokens_details
    accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert accepted is not None and rejected is not None
    assert accepted + rejected == 104 and 90 < accepted <= 100
    before: Any = plain.model_extra and plain.model_extra["eagle"]
    after: Any = helped.model_extra and helped.model_extra["eagle"]
    assert after["target_passes"] < 0.8 * before["target_passes"]
