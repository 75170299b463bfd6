"""llama.cpp's own addresses: the texts are those of completions, and tokens go both ways."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle_runtime import EagleModel
from raw_http import events, post, request

PATH = "/completion"
ASKED: dict[str, Any] = {"prompt": "Why?", "n_predict": 20, "temperature": 0.8, "top_k": 40, "seed": 3}


def test_a_completion(address: str) -> None:
    said = post(address, PATH, {**ASKED, "return_tokens": True}).data
    wanted = post(address, "/v1/completions", ASKED).data["choices"][0]["text"]
    assert said["content"] == wanted and len(said["tokens"]) == said["tokens_predicted"] == 20
    assert said["stop"] is True and said["stop_type"] == "limit" and said["truncated"] is False
    assert said["generation_settings"]["seed"] == 3 and said["generation_settings"]["temperature"] == 0.8
    assert "Why?" in said["prompt"]
    streamed = [
        event for event in events(post(address, PATH, {**ASKED, "stream": True}).body) if isinstance(event, dict)
    ]
    assert "".join(event["content"] for event in streamed) == wanted and len(streamed) > 3
    assert [event["stop"] for event in streamed] == [False] * (len(streamed) - 1) + [True]
    assert [token for event in streamed for token in event["tokens"]] == said["tokens"]
    stop = wanted[4:6]
    cut = post(address, PATH, {**ASKED, "stop": [stop]}).data
    assert cut["content"] == wanted[: wanted.index(stop)]
    assert (cut["stop_type"], cut["stopping_word"]) == ("word", stop)


def test_forms_and_probabilities(address: str) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    said = post(address, PATH, {"prompt": "x", "json_schema": schema, "temperature": 0}).data
    assert list(json.loads(said["content"])) == ["a"] and said["stop_type"] == "eos"
    said = post(address, PATH, {**ASKED, "n_predict": 3, "n_probs": 2}).data
    assert [len(one["top_logprobs"]) for one in said["completion_probabilities"]] == [2, 2, 2]


def test_biases_are_pairs_or_an_object(address: str) -> None:
    biases: tuple[Any, ...] = ([[65, 100]], {"65": 100}, [])
    said = [post(address, PATH, {**ASKED, "logit_bias": bias}).data["content"] for bias in biases]
    assert said[0] == said[1] == ASKED["n_predict"] * said[0][0] != said[2]


def test_addresses_without_v1(address: str) -> None:
    """llama.cpp has some; what is at none is told where it may be."""
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "temperature": 0}
    said, wanted = (post(address, f"{base}/chat/completions", chat).data["choices"] for base in ("", "/v1"))
    assert said == wanted
    assert request(address, "GET", "/models").data == request(address, "GET", "/v1/models").data
    for path, near in (("/completions", "/v1/completions"), ("/v1/chat/completions/", "/v1/chat/completions")):
        error = post(address, path, chat).data["error"]
        assert error["message"] == f"there is nothing at this address; did you mean {near}?"


def test_a_context_is_filled_by_minus_two(address: str) -> None:
    assert post(address, PATH, {**ASKED, "n_predict": -2, "stop": ["\n"]}).status == 200


def test_every_name_of_the_limit_counts(address: str) -> None:
    named = {name: value for name, value in ASKED.items() if name != "n_predict"}
    for name in ("num_predict", "max_new_tokens", "max_completion_tokens"):
        assert post(address, PATH, {**named, name: 3}).data["tokens_predicted"] == 3


def test_tokens(address: str, served_model: EagleModel) -> None:
    text = "Why is it so?"
    tokens = post(address, "/tokenize", {"content": text}).data["tokens"]
    assert tokens == served_model.text.encode_rendered(text)
    assert post(address, "/tokenize", {"content": text, "add_special": True}).data["tokens"] == served_model.encode(
        text
    )
    assert post(address, "/detokenize", {"tokens": tokens}).data["content"] == text
    pieces = post(address, "/tokenize", {"content": text, "with_pieces": True}).data["tokens"]
    assert "".join(one["piece"] for one in pieces) == text and [one["id"] for one in pieces] == tokens
    mixed = post(address, PATH, {**ASKED, "prompt": ["Wh", *served_model.text.encode_rendered("y?")]}).data
    assert mixed["content"] == post(address, PATH, ASKED).data["content"]
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    assert post(address, "/apply-template", asked).data["prompt"] == "u: x\na: "
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    assert post(address, "/apply-template", asked).data["prompt"] == "u: x\nta: "


def test_props_and_health(address: str) -> None:
    told = request(address, "GET", "/props").data
    assert told["default_generation_settings"]["n_ctx"] > 100 and told["total_slots"] >= 1
    assert "messages" in told["chat_template"] and told["modalities"] == {"vision": False, "audio": False}
    assert request(address, "GET", "/health").data == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (PATH, {"grammar": 'root ::= "a"'}, "grammar"),
        (PATH, {"response_fields": ["content"]}, "response_fields"),
        (PATH, {"prompt": ["a", "b"]}, "prompt"),
        (PATH, {"mirostat": 1}, "mirostat"),
        (PATH, {"n_probs": 30}, "n_probs"),
        (PATH, {"logit_bias": [[5, False]]}, "logit_bias[0]"),
        (PATH, {"logit_bias": [[5, 1], ["ab", 1]]}, "logit_bias[1]"),
        (PATH, {"logit_bias": [5]}, "logit_bias[0]"),
        (PATH, {"logit_bias": [[5, "1"]]}, "logit_bias.5"),
        ("/tokenize", {"content": 3}, "content"),
        ("/tokenize", {"content": "x", "parse_special": False}, "parse_special"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/infill", {}, None),
    ],
    ids=str,
)
def test_what_is_refused(address: str, path: str, fields: dict[str, Any], param: str | None) -> None:
    answer = post(address, path, {**({"prompt": "x"} if path == PATH else {}), **fields})
    assert answer.status in (400, 404) and answer.data["error"]["param"] == param, answer.body


def test_defaults_spelled_out_are_accepted(address: str) -> None:
    """What llama.cpp's page sends with every request."""
    body = {
        "cache_prompt": True, "id_slot": -1, "n_keep": 0, "return_progress": True, "timings_per_token": True,
        "dynatemp_range": 0, "dynatemp_exponent": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "typ_p": 1,
        "repeat_last_n": 64, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0,
        "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat": 0, "mirostat_tau": 5,
        "mirostat_eta": 0.1, "grammar": "", "min_keep": 0, "n_probs": 0, "top_n_sigma": -1, "json_schema": None,
        "logit_bias": [],
        "samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    }  # fmt: skip
    answer = post(address, PATH, {**ASKED, **body})
    assert answer.status == 200, answer.body
