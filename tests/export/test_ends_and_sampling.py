"""Ends of texts and settings of sampling, read of all files that state them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_export.base.errors import ExportError
from eagle_export.reading.families import llama
from eagle_export.reading.families.generation import CHAT, Generation, generation_of
from eagle_export.reading.families.target import open_target
from eagle_export.reading.gguf.file import GgufFile
from eagle_export.reading.gguf.tokenizer import special_ids, texts_of
from eagle_export.reading.texts import read_texts, text_of
from eagle_runtime.bundle.manifest import SamplingDefaults as Defaults
from export_workplace import configure, make_target

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDING, ADDED = 12, ("<|im_start|>", "<|im_end|>")  # id of the second; control characters' ids of the byte tokenizer


def target_of(
    folder: Path,
    generation: dict[str, Any] | None,
    *,
    config_eos: Any = 1,
    named: Any = None,
    template: str | None = None,
) -> Path:
    """A target whose files state these things."""
    target = make_target(folder)
    configure(target, eos_token_id=config_eos)
    content = json.loads((target / "tokenizer.json").read_text(encoding="utf-8"))
    for number, token in enumerate(ADDED, ENDING - 1):
        old = next(text for text, each in content["model"]["vocab"].items() if each == number)
        del content["model"]["vocab"][old]
        content["model"]["vocab"][token] = number
        one = {"id": number, "content": token, "special": True, "normalized": False}
        content["added_tokens"].append({**one, "single_word": False, "lstrip": False, "rstrip": False})
    (target / "tokenizer.json").write_text(json.dumps(content))
    (target / "tokenizer_config.json").write_text(json.dumps({"eos_token": named, "chat_template": template}))
    if generation is not None:
        (target / "generation_config.json").write_text(json.dumps(generation))
    return target


def read(target: Path, family: Any = llama.LLAMA) -> Generation:
    checkpoint = open_target(target)
    return generation_of(checkpoint, family, text_of(checkpoint, read_texts(checkpoint)), 256)


@pytest.mark.parametrize(
    ("generation", "more", "eos", "noted"),
    [
        ({"eos_token_id": [1, 7]}, {}, (1, 7), ()),
        ({"eos_token_id": 7}, {"config_eos": 5}, (7,), ()),
        ({"eos_token_id": None}, {"config_eos": [5, None]}, (5,), ()),
        (None, {"config_eos": 5}, (5,), ()),
        ({"eos_token_id": -1}, {}, (), ()),
        ({"eos_token_id": [1, 256]}, {}, (1,), ("generation_config.json names the end-of-sequence id 256",)),
        (None, {"config_eos": 32000}, (), ("config.json names the end-of-sequence id 32000",)),
        ({"eos_token_id": 1}, {"named": "<|im_end|>"}, (1, ENDING), ("tokenizer_config.json names '<|im_end|>'",)),
        ({"eos_token_id": 1}, {"named": {"content": "<|im_end|>"}}, (1, ENDING), ("tokenizer_config.json names",)),
        ({"eos_token_id": [ENDING]}, {"named": "<|im_end|>"}, (ENDING,), ()),
        ({"eos_token_id": 1}, {"named": "<nothing>"}, (1,), ()),
        ({}, {"config_eos": None, "named": "<|im_end|>"}, (ENDING,), ()),
        ({"eos_token_id": 1}, {"template": TEMPLATE}, (1, ENDING), ("the chat template ends answers with",)),
        ({"eos_token_id": 1}, {"template": TEMPLATE, "named": "<|im_end|>"}, (1, ENDING), ("tokenizer_config",)),
        ({"eos_token_id": 1}, {"template": "{{ messages[-1].content }} and"}, (1,), ()),
        ({"eos_token_id": 1}, {"template": "{{ raise_exception('no') }}"}, (1,), ()),
    ],
    ids=str,
)
def test_ends(
    tmp_path: Path,
    generation: dict[str, Any] | None,
    more: dict[str, Any],
    eos: tuple[int, ...],
    noted: tuple[str, ...],
) -> None:
    reading = read(target_of(tmp_path / "t", generation, **more))
    assert reading.eos == eos
    assert len(reading.notes) == len(noted) and all(a in b for a, b in zip(noted, reading.notes, strict=True))


def test_ids_that_are_none(tmp_path: Path) -> None:
    for number, wrong in enumerate(("x", [1, "x"], True, 1.5)):
        with pytest.raises(ExportError, match=r"generation_config\.json: eos_token_id is"):
            read(target_of(tmp_path / str(number), {"eos_token_id": wrong}))


FULL = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("stated", "sampling", "noted"),
    [
        (FULL, Defaults(0.7, 20, 0.8, 0.1, 1.05), ""),
        ({"do_sample": True}, Defaults(1.0), ""),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": None}, Defaults(0.6, top_p=0.9), ""),
        ({"temperature": 0.6}, Defaults(0.6), ""),  # written by hand: transformers saves do_sample with it
        ({**FULL, "do_sample": False}, Defaults(0.0, 20, 0.8, 0.1, 1.05), ""),
        ({"do_sample": True, "temperature": 0}, Defaults(), ""),
        ({"do_sample": True, "top_k": -1}, Defaults(1.0), ""),
        ({"do_sample": True, "top_k": 50.0}, Defaults(1.0, 50), ""),
        ({"do_sample": True, "top_k": 50.5}, Defaults(1.0), "sets top_k to 50.5"),
        ({"do_sample": True, "top_p": 0}, Defaults(), ""),
        ({"do_sample": True, "top_p": 1.5}, Defaults(1.0), "sets top_p to 1.5"),
        ({"do_sample": True, "temperature": "0.7"}, Defaults(1.0), "sets temperature to '0.7'"),
        ({"do_sample": True, "min_p": -1}, Defaults(1.0), "sets min_p to -1"),
        ({"do_sample": True, "repetition_penalty": True}, Defaults(1.0), "sets repetition_penalty to True"),
        ({"do_sample": True, "num_beams": 4}, Defaults(1.0), "sets num_beams to 4, which is not supported"),
        ({"repetition_penalty": 1.2}, Defaults(repetition_penalty=1.2), ""),
        ({"temperature": 1.0, "top_p": 1.0, "num_beams": 1}, Defaults(), ""),
        ({}, Defaults(), ""),
        (None, Defaults(), ""),
    ],
    ids=str,
)
def test_sampling_of_a_model_without_a_template(
    tmp_path: Path, stated: dict[str, Any] | None, sampling: Defaults, noted: str
) -> None:
    reading = read(target_of(tmp_path / "t", stated))
    assert reading.sampling == sampling
    assert noted in "".join(reading.notes) and bool(noted) == bool(reading.notes)


@pytest.mark.parametrize("stated", [None, {}, {"eos_token_id": ENDING}, {"do_sample": None, "temperature": 1.0}])
def test_a_chat_model_that_states_nothing(tmp_path: Path, stated: dict[str, Any] | None) -> None:
    target = target_of(tmp_path / "t", stated, named="<|im_end|>", template=TEMPLATE)
    own: dict[str, Any] = {"temperature": 1.0} if stated and "temperature" in stated else {}
    assert read(target).sampling == replace(llama.SAMPLING, **own)
    assert read(target, replace(llama.LLAMA, sampling=None)).sampling == replace(CHAT, **own)


def test_a_chat_model_that_says_greedy_is_greedy(tmp_path: Path) -> None:
    assert read(target_of(tmp_path / "t", {"do_sample": False}, template=TEMPLATE)).sampling == Defaults()
    own = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
    assert read(target_of(tmp_path / "u", own, template=TEMPLATE)).sampling == Defaults(0.2, top_p=0.9)


TOKENS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}


def test_gguf_ids_that_say_that_there_is_none() -> None:
    """-1 is stored without its sign."""
    file = GgufFile(Path("x.gguf"), {**TOKENS, "tokenizer.ggml.padding_token_id": 2**32 - 1}, {})
    assert special_ids(file) == {"bos_token_id": None, "eos_token_id": [3]}
    settings = json.loads(texts_of(file)["tokenizer_config.json"])
    assert settings["eos_token"] == "<|im_end|>" and "pad_token" not in settings
    assert "generation_config.json" not in texts_of(file)
    beyond = GgufFile(Path("x.gguf"), {**TOKENS, "tokenizer.ggml.bos_token_id": 4}, {})
    assert special_ids(beyond)["bos_token_id"] is None


def test_gguf_sampling() -> None:
    stated = {"general.sampling.temp": 0.20000000298023224, "general.sampling.top_k": 40}
    texts = texts_of(GgufFile(Path("x.gguf"), {**TOKENS, **stated}, {}))
    assert json.loads(texts["generation_config.json"]) == {"do_sample": True, "temperature": 0.2, "top_k": 40}


def test_a_model_built_on_another_familys_keeps_its_own_sampling() -> None:
    """DeepSeek-R1-Distill-Qwen does not get Qwen2.5's penalty of repetitions."""
    distilled = {**TOKENS, "tokenizer.ggml.pre": "deepseek-r1-qwen"}
    texts = texts_of(GgufFile(Path("x.gguf"), distilled, {}))
    assert json.loads(texts["generation_config.json"]) == {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    texts = texts_of(GgufFile(Path("x.gguf"), {**distilled, "general.sampling.temp": 0.5}, {}))
    assert json.loads(texts["generation_config.json"]) == {"do_sample": True, "temperature": 0.5}
