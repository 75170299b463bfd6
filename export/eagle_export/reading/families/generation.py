"""How a target's texts end and how its tokens are drawn where nobody says: decided once, at export, for the manifest.

Four places name tokens that end a text: generation_config.json, config.json, tokenizer_config.json, and what the chat
template puts after an answer. One that is left out never ends. Settings of sampling stand in generation_config.json, as
transformers writes and reads it; a model for chats that states none gets those that its family is published with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint, read_json
from eagle_export.reading.families.family import Family
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import EagleError
from eagle_runtime.base.files import parse_json
from eagle_runtime.bundle.manifest import SAMPLING_RANGES, SamplingDefaults
from eagle_runtime.text.tokenizer import Text

FILE = "generation_config.json"
# Of a chat model that states nothing and whose family publishes nothing: llama.cpp's own defaults (common/common.h).
CHAT = SamplingDefaults(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
DRAWS = ("temperature", "top_k", "top_p", "min_p")  # settings without effect where tokens are not drawn
# Settings of transformers that change texts and are not known here -> the values that ask for nothing.
UNKNOWN: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
}
ANSWER = "xqzanswerzqx"  # stands for an answer while the template is asked what follows one


@dataclass(frozen=True, slots=True)
class Generation:
    """eos: ids that end a text. sampling: of what a caller does not say. notes: contradictions and how they were
    decided, a sentence each."""

    eos: tuple[int, ...]
    sampling: SamplingDefaults
    notes: tuple[str, ...]


def generation_of(target: Checkpoint, family: Family, text: Text, vocab: int) -> Generation:
    """vocab: rows of the embedding. Raises ExportError for ids that are none, and for files that are no JSON."""
    stated = _json(target, FILE)
    notes: list[str] = []
    eos = _ends(target, stated, text, vocab, notes)
    sampling = _sampling(stated, family.sampling or CHAT if text.chat else None, notes)
    return Generation(eos, sampling, tuple(f"{target.folder}: {note}" for note in notes))


def _json(target: Checkpoint, name: str) -> dict[str, Any]:
    """The content of a JSON file of a folder or made of a GGUF file; empty without one. Raises ExportError."""
    path = target.folder / name
    if target.texts is not None:
        return parse_json(target.texts.get(name, b"{}"), path, ExportError, "convert the model again")
    return read_json(path) if path.is_file() else {}


def _ends(target: Checkpoint, stated: Mapping[str, Any], text: Text, vocab: int, notes: list[str]) -> tuple[int, ...]:
    where = FILE if stated.get("eos_token_id") is not None else "config.json"
    value = (stated if where == FILE else target.config).get("eos_token_id")
    listed = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
    if not all(type(each) is int for each in listed):
        raise ExportError(
            f"{target.folder / where}: eos_token_id is {short_repr(value)}, but must be an id or a list of ids"
        )
    ids = [each for each in listed if 0 <= each < vocab]
    if beyond := [each for each in listed if each >= vocab]:
        notes.append(
            f"{where} names the end-of-sequence id {beyond[0]}, but the model has rows for 0 to {vocab - 1}; it is "
            "left out"
        )
    tokens = text.ids_of_tokens() or {}
    for token, source in (
        (_named(_json(target, "tokenizer_config.json").get("eos_token")), "tokenizer_config.json names"),
        (_after_answer(text), "the chat template ends answers with"),
    ):
        number = tokens.get(token) if token is not None else None
        if number is not None and number < vocab and number not in ids:
            if ids:
                notes.append(f"{source} {token!r}, which {where} does not name as an end; texts end there too")
            ids.append(number)
    return tuple(dict.fromkeys(ids))


def _named(token: object) -> str | None:
    """A token as tokenizer_config.json states it: its text, or an object with it."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _after_answer(text: Text) -> str | None:
    """The special token with which the chat template ends an answer; None if there is none, or no template."""
    if not text.chat:
        return None
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ANSWER}]
    try:
        rendered = text.render(messages, add_generation_prompt=False)
    except EagleError:
        return None
    rest = rendered.rpartition(ANSWER)[2].lstrip() if ANSWER in rendered else ""
    starts = (rest[:length] for length in range(min(len(rest), 64), 0, -1))
    return next((start for start in starts if text.special_id(start) is not None), None)


def _sampling(stated: Mapping[str, Any], published: SamplingDefaults | None, notes: list[str]) -> SamplingDefaults:
    """What a generation_config.json states. published: of a chat model's family, where the file states nothing."""
    known = dict(_readable(stated, notes))
    notes += [
        f"{FILE} sets {name} to {short_repr(stated[name])}, which is not supported; it is passed over"
        for name, neutral in UNKNOWN.items()
        if stated.get(name) is not None and stated[name] not in neutral
    ]
    if known.get("top_p") == 0:  # the likeliest token alone
        known |= {"temperature": 0.0, "top_p": 1.0}
    own = SamplingDefaults(temperature=1.0)
    draws = stated.get("do_sample")
    if not isinstance(draws, bool):  # transformers writes it with every setting of sampling; some authors do not
        draws = True if any(known.get(name, getattr(own, name)) != getattr(own, name) for name in DRAWS) else None
    if draws is None and published is not None:
        return replace(published, **known)
    return replace(own, **{**known, **({} if draws else {"temperature": 0.0})})


def _readable(stated: Mapping[str, Any], notes: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields the settings with values that they can have. What null, and -1 for top_k, say is that there is none."""
    for name in (field.name for field in fields(SamplingDefaults)):
        value = stated.get(name)
        if value is None:
            continue
        low, high = SAMPLING_RANGES[name]
        number = type(value) in (int, float) and math.isfinite(value)
        if name == "top_k" and number:
            number = value == int(value)
            value = max(int(value), 0) if number and value >= -1 else value
        if number and (low <= value <= high or (name == "top_p" and value == 0)):
            yield name, value if name == "top_k" else float(value)
        else:
            notes.append(f"{FILE} sets {name} to {short_repr(value)}, which it cannot be; it is passed over")
