"""`echo`: an answer that begins with its prompt, whose tokens' log-probabilities evaluations read."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from conftest import put_listed
from eagle_runtime import EagleModel
from eagle_serve.server import serving
from raw_http import events, post
from serve.clients import COMPLETIONS

END = "~"
TEXT = "def f(x):\n    return x"
SETTINGS: dict[str, Any] = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def choice(address: str, **fields: Any) -> dict[str, Any]:
    answer = post(address, COMPLETIONS, {"prompt": TEXT, **SETTINGS, **fields})
    assert answer.status == 200, answer.body
    first: dict[str, Any] = answer.data["choices"][0]
    return first


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_answer_begins_with_the_prompt(as_ids: bool, address: str, served_model: EagleModel) -> None:
    prompt = served_model.encode(TEXT) if as_ids else TEXT
    plain, echoed = choice(address, prompt=prompt), choice(address, prompt=prompt, echo=True)
    assert echoed["text"] == TEXT + plain["text"] and echoed["logprobs"] is None


@pytest.mark.parametrize("most", [0, 1, 4])
def test_log_probabilities_are_of_prompt_and_answer(most: int, address: str, served_model: EagleModel) -> None:
    ids = served_model.encode(TEXT)
    found = choice(address, echo=True, logprobs=2, max_tokens=most)
    told = found["logprobs"]
    result = served_model.generate(ids, prompt_logprobs=2, logprobs=2, max_new_tokens=4, ignore_eos=True, temperature=0)
    expected = [token.logprob for token in result.prompt]
    assert told["token_logprobs"][: len(ids)] == expected and expected[0] is None
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == 4 * [
        len(ids) + most
    ]
    assert told["top_logprobs"][0] is None and all(1 <= len(top) <= 2 for top in told["top_logprobs"][1:])
    assert "".join(told["tokens"]) == found["text"] and told["text_offset"][:3] == [0, 1, 2]
    assert found["finish_reason"] == "length"


def test_an_end_token_after_the_prompt_counts(address: str, served_model: EagleModel) -> None:
    """lm-eval leaves the last token out, whatever it is."""
    ids = served_model.encode(TEXT)
    eos = min(served_model.manifest.target.eos_token_ids)
    found = choice(address, echo=True, logprobs=0, max_tokens=1, ignore_eos=False, logit_bias={str(eos): 100})
    assert found["finish_reason"] == "stop" and found["text"] == TEXT
    assert len(found["logprobs"]["token_logprobs"]) == len(ids) + 1


def test_the_prompt_alone_counts_no_token_of_an_answer(address: str) -> None:
    answer = post(address, COMPLETIONS, {"prompt": [TEXT, "a = 1"], "echo": True, "max_tokens": 0}).data
    assert [one["text"] for one in answer["choices"]] == [TEXT, "a = 1"]
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("most", [0, 4])
def test_a_stream_begins_with_the_prompt(most: int, address: str) -> None:
    asked = {"prompt": TEXT, **SETTINGS, "max_tokens": most, "echo": True}
    whole = post(address, COMPLETIONS, asked).data["choices"][0]["text"]
    chunks = events(post(address, COMPLETIONS, {**asked, "stream": True}).body)
    texts = [chunk["choices"][0]["text"] for chunk in chunks if isinstance(chunk, dict)]
    assert texts[0] == TEXT and "".join(texts) == whole


@pytest.mark.parametrize("as_ids", [False, True])
def test_special_tokens_are_told_as_they_are_written(as_ids: bool, served_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(served_bundle, tmp_path / "special")
    tokenizer = Tokenizer.from_file(str(bundle / "tokenizer.json"))
    tokenizer.add_special_tokens([END])
    tokenizer.post_processor = TemplateProcessing(f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))])
    put_listed(bundle, "tokenizer.json", tokenizer.to_str().encode())
    text = f"a{END}bc{END}"
    with EagleModel.load(bundle, threads=1) as model, serving(model, bundle) as address:
        ids = model.encode(text)
        assert len(ids) == 6  # one is put before the text
        found = choice(address, prompt=ids[1:] if as_ids else text, echo=True, logprobs=0)
    told = found["logprobs"]
    assert found["text"].startswith(text)
    assert told["tokens"][: 6 - as_ids] == [*([] if as_ids else [""]), "a", END, "b", "c", END]
    assert "".join(told["tokens"]) == found["text"]
    assert all(found["text"][at:].startswith(one) for one, at in zip(told["tokens"], told["text_offset"], strict=True))


@pytest.mark.parametrize("path", ["/completion", "/api/generate"])
def test_other_apis_have_no_echo(path: str, address: str) -> None:
    fields = {"echo": True} if path == "/completion" else {"raw": True, "options": {"echo": True}}
    answer = post(address, path, {"prompt": TEXT, "model": "pair", "stream": False, **fields})
    assert answer.status == 400 and b"echo" in answer.body


def test_what_is_not_honoured_is_refused_by_name(address: str) -> None:
    def refused(**fields: Any) -> tuple[int, str]:
        answer = post(address, COMPLETIONS, {"prompt": TEXT, **fields})
        return answer.status, answer.data["error"]["param"]

    assert refused(echo=True, logprobs=1, stream=True) == (400, "echo")
    assert refused(echo="yes") == (400, "echo")
    assert refused(max_tokens=0) == (400, "max_tokens")
    answer = post(address, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "echo": True})
    assert (answer.status, answer.data["error"]["param"]) == (400, "echo")
