"""The tokenizer of a GGUF file as the files of a Hugging Face folder: tokenizer.json, its config, the chat template.

A file has tokens, their kinds, and merges or scores, and names how text is cut before merging (tokenizer.ggml.pre); the
rest is code of llama.cpp (src/llama-vocab.cpp of ggml-org/llama.cpp), which this module states in the terms of the
library tokenizers. Where llama.cpp differs from the published tokenizer.json, the latter is followed: Qwen2 and OLMo
normalise text to NFC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.gguf.file import ADVICE, ORIGINAL, GgufFile, shortest
from eagle_runtime.base.arguments import short_repr

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # kinds of tokens, of llama.h
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]|\[\|[^\[\]\s]+\|\]")  # what chat templates put around messages
SAMPLING = {  # transformers' name -> the key after general.sampling.
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Pre-tokenizer that one author's models alone have, built on others' families -> what they are published with.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {"deepseek-r1-qwen": {"temperature": 0.6, "top_p": 0.95}}
SPACE = "\u2581"  # how sentencepiece writes a space
ENDINGS = frozenset(  # control tokens at which llama.cpp ends a text, whatever the metadata says
    ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>")
    + ("<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>")
)
# Of Gemma-4, whatever kinds the file gives them; its "</s>" is a piece of text.
GEMMA4_ENDINGS = frozenset(("<eos>", "<turn|>", "<|tool_response>"))
HARMONY = frozenset(("<|return|>", "<|call|>"))  # of gpt-oss, whose answers are several messages that end with <|end|>
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35 = rf"{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a byte-level tokenizer cuts text before merging. patterns: of a piece, each for what the one before left;
    none for GPT-2's. digits: whether each digit is cut off first. whole: whether a piece that is a token needs no
    merges. bos: whether texts begin with bos, if the file names one and does not say otherwise. nfc: whether text is
    normalised."""

    patterns: tuple[str, ...] = ()
    digits: bool = False
    whole: bool = False
    bos: bool = False
    nfc: bool = False


CUTS = {
    "llama3 llama-v3 llama-bpe falcon3 pixtral midm-2.0 lfm2": Cut((_LLAMA3,), whole=True, bos=True),
    "glm4 chatglm-bpe": Cut((_LLAMA3,), whole=True),
    "dbrx smaug-bpe": Cut((_LLAMA3,)),
    "minicpm5": Cut((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), whole=True),
    "qwen2 deepseek-r1-qwen kormo megrez": Cut((_LLAMA3.replace("{1,3}", ""),), nfc=True),
    "qwen35": Cut((_QWEN35,), nfc=True),
    "stablelm2": Cut((_LLAMA3.replace("{1,3}", ""),)),
    "seed-coder": Cut((_LLAMA3.replace("{1,3}", "").replace(r"[\r\n]*", ""),), nfc=True),
    "hunyuan-dense": Cut(_DEEPSEEK3),
    "tekken": Cut((rf"{_WORD % ('', '')}|\p{{N}}|{_REST}",), whole=True, bos=True),
    "gpt-4o": Cut((rf"{_WORD % (f'{_ENDING}?', f'{_ENDING}?')}|\p{{N}}{{1,3}}|{_REST}",)),
    "smollm starcoder refact": Cut(digits=True),
    "deepseek-coder": Cut(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "gpt-2": Cut(),
    "olmo": Cut(nfc=True),
}
TEMPLATES = {  # key of the metadata -> file of a bundle
    "tokenizer.chat_template": "chat_template.jinja",
    "tokenizer.chat_template.tool_use": "chat_template.tool_use.jinja",
}


def texts_of(file: GgufFile) -> dict[str, bytes]:
    """Returns name -> content of the tokenizer's files; none if the file states that it has no tokenizer. Raises
    ExportError for a tokenizer that is not known."""
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return {}
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ExportError(
            f"{file.path}: a tokenizer of kind {kind!r} is not supported, only 'gpt2', 'llama' and 'gemma4'"
        )
    tokens = _listed(file, "tokens")
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(set(tokens)) < len(tokens) or len(kinds) != len(tokens):
        raise ExportError(f"{file.path}: its tokens are not distinct, or their kinds are not as many; {ADVICE}")
    marks, ends = mistyped(file), _endings(file)
    kinds = [
        CONTROL if number in marks or token in ends else kind
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
    ]
    if _is_gemma4(file):  # as sentencepiece's, with the merges that the file has
        unknown = _token_id(file, "unknown", len(tokens))
        content = _pieces(_stated_merges(file), None if unknown is None else tokens[unknown], prefix=False)
    else:
        content = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, kinds)
        if kind == "llama" and file.architecture.startswith("gemma"):
            tokens = _with_spaces(tokens)
    phi3 = kind == "llama" and file.architecture == "phi3"
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": phi3 and token not in ("<unk>", "<s>", "<|endoftext|>"),
            "normalized": False,
            "special": kinds[number] != USER_DEFINED,
        }
        for number, token in enumerate(tokens)
        if kinds[number] in (CONTROL, USER_DEFINED) or (kinds[number] == UNKNOWN and kind != "gpt2")
    ]
    content["model"]["vocab"] = {
        token: number
        for number, token in enumerate(tokens)
        if not (kinds[number] == UNUSED and re.fullmatch(r"\[PAD\d+\]", token))  # rows without a token
    }
    special = {
        f"{name}_token": tokens[number]
        for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if (number := _token_id(file, key, len(tokens))) is not None
    }
    add = {name: file.metadata.get(f"tokenizer.ggml.add_{name}_token", content.pop(name)) for name in ("bos", "eos")}
    add["bos"] |= _is_gemma4(file)  # as in llama.cpp, though older files deny it
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **content}
    content["post_processor"] = _template(file, special, add)
    settings = {**special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    texts = {"tokenizer.json": content, "tokenizer_config.json": settings}
    files = {name: json.dumps(each, ensure_ascii=False).encode() for name, each in texts.items()}
    if (sampling := _sampling(file)) is not None:
        files["generation_config.json"] = json.dumps(sampling).encode()
    for key, name in TEMPLATES.items():
        if isinstance(template := file.metadata.get(key), str):
            files[name] = template.encode()
    return files


def _sampling(file: GgufFile) -> dict[str, Any] | None:
    """The settings of sampling in the metadata, by transformers' names, or those that its tokenizer's models are
    published with; None if there are none."""
    stated = {name: file.metadata.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    settings = {
        name: shortest(value) if isinstance(value, float) else value
        for name, value in stated.items()
        if value is not None
    }
    settings = settings or dict(PUBLISHED.get(str(file.metadata.get("tokenizer.ggml.pre")), {}))
    return {"do_sample": True, **settings} if settings else None


def mistyped(file: GgufFile) -> dict[int, str]:
    """Returns id -> token of what a chat template puts around messages and the file lists as a piece of text. Tokens
    that it calls the user's, such as <think>, are whole in any text and part of an answer, so of these an answer's end
    alone counts."""
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    templates = [template for key in TEMPLATES if isinstance(template := file.metadata.get(key), str)]
    marks = {mark for template in templates for mark in MARKER.findall(template)}
    return {
        number: token
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in marks and (kind == NORMAL or (kind == USER_DEFINED and token in ENDINGS))
    }


def notes_of(file: GgufFile) -> tuple[str, ...]:
    """Returns what was decided where a file's tokenizer contradicts its chat template or leaves something open, a
    sentence each."""
    notes = []
    if marks := list(mistyped(file).values()):
        notes.append(
            f"{file.path}: the chat template writes {', '.join(map(short_repr, marks[:8]))}, which the file does not "
            "list as control tokens; they are read as such"
        )
    if _unscored(file):
        notes.append(
            f"{file.path}: all pieces of its tokenizer have the same score, so they are merged in the order of their "
            "ids, as in Llama-2's; if this model's tokenizer is another, " + ORIGINAL
        )
    return tuple(notes)


def special_ids(file: GgufFile) -> dict[str, Any]:
    """Returns bos_token_id and eos_token_id of a config: all ids at which a text ends, those of the metadata first."""
    tokens = file.metadata.get("tokenizer.ggml.tokens") or []
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [CONTROL] * len(tokens)
    ends = [_token_id(file, name, len(tokens)) for name in ("eos", "eot", "eom")]
    ends += [end for end in file.metadata.get("tokenizer.ggml.eos_token_ids") or [] if 0 <= end < len(tokens)]  # Ollama
    marks, certain = mistyped(file), _endings(file)
    known = {
        token: number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in certain or (token in ENDINGS and (kind == CONTROL or number in marks))
    }
    if known.keys() >= HARMONY:
        known.pop("<|end|>", None)
    ends += known.values()
    stated = list(dict.fromkeys(end for end in ends if end is not None))
    return {"bos_token_id": _token_id(file, "bos", len(tokens)), "eos_token_id": stated or None}


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> dict[str, Any]:
    name = file.metadata.get("tokenizer.ggml.pre")
    cut = next((cut for names, cut in CUTS.items() if name in names.split()), None)
    if cut is None:
        what, advice = f"cuts text as {name!r}", ORIGINAL
        if name in (None, "default"):
            what, advice = "does not say how its tokenizer cuts text", ADVICE
        known = ", ".join(sorted(each for names in CUTS for each in names.split()))
        raise ExportError(f"{file.path} {what} (tokenizer.ggml.pre), and only {known} are supported; {advice}")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not cut.patterns}
    steps: list[dict[str, Any]] = [{"type": "Digits", "individual_digits": True}] if cut.digits else []
    steps += [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if cut.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]},
        "decoder": {**level, "use_regex": True},
        "model": _bpe(_stated_merges(file), whole=cut.whole),
        "bos": cut.bos and _token_id(file, "bos", len(tokens)) is not None,
        "eos": False,
    }


def _is_gemma4(file: GgufFile) -> bool:
    """Whether its tokenizer is Gemma-4's; Ollama's converter calls it one of kind 'llama'."""
    kind = file.metadata.get("tokenizer.ggml.model")
    return kind == "gemma4" or (kind == "llama" and file.architecture == "gemma4")


def _endings(file: GgufFile) -> frozenset[str]:
    """Tokens at which a text ends, of whatever kind they are."""
    return GEMMA4_ENDINGS if _is_gemma4(file) else frozenset()


def _sentencepiece(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """A space is put before the text unless the file says otherwise, or is a Gemma."""
    scores = file.metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    if len(scores) != len(tokens):
        raise ExportError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} numbers for {len(tokens)} tokens; {ADVICE}"
        )
    gemma = file.architecture.startswith("gemma")
    prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    if gemma:  # merges are in the order of their tokens, not of their scores, but runs of spaces come first, long ones
        tokens = _with_spaces(tokens)
        scores = [1.0 if set(token) <= set(f"{SPACE}\n\t") else -float(number) for number, token in enumerate(tokens)]
    elif _unscored(file):  # in that order, but for runs of spaces, which Llama-2's vocabulary merges last
        scores = [-float(number) - len(tokens) * (set(token) == {SPACE}) for number, token in enumerate(tokens)]
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    return _pieces(implied_merges(tokens, scores), unknown, prefix)


def _pieces(merges: list[list[str]], unknown: str | None, prefix: bool) -> dict[str, Any]:
    """A space is a letter of its own; prefix: whether one is put before the text."""
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    start = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    ends = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    joined = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *ends]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*start, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": joined},
        "model": {
            **_bpe(merges),
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
        "bos": True,
        "eos": False,
    }


def _unscored(file: GgufFile) -> bool:
    """Whether a tokenizer of sentencepiece's kind has no scores that order its pieces: llama.cpp's converter gives all
    the same where there is no tokenizer.model, and llama.cpp then merges from left to right."""
    if file.metadata.get("tokenizer.ggml.model") != "llama" or file.architecture.startswith("gemma"):
        return False
    scores = file.metadata.get("tokenizer.ggml.scores") or []
    kinds = file.metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(scores)
    return len({score for score, kind in zip(scores, kinds, strict=False) if kind == NORMAL}) < 2


def _stated_merges(file: GgufFile) -> list[list[str]]:
    merges = [merge.split(" ") for merge in _listed(file, "merges")]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise ExportError(f"{file.path}: merge {' '.join(wrong[0])[:60]!r} has not two parts; {ADVICE}")
    return merges


def implied_merges(tokens: Sequence[str], scores: Sequence[float]) -> list[list[str]]:
    """Returns the merges of a sentencepiece vocabulary, best first: all cuts of a token into two, by its score, as
    transformers' convert_slow_tokenizer.py orders them."""
    ids = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = sorted(((ids[left], ids[right]), left, right) for left, right in cuts if left in ids and right in ids)
        merges += [(score, left, right) for _, left, right in known]
    merges.sort(key=lambda each: (each[0], len(each[1]), len(each[2])), reverse=True)
    return [[left, right] for _, left, right in merges]


def _bpe(merges: list[list[str]], *, whole: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": whole,
        "vocab": {},
        "merges": merges,
    }


def _template(file: GgufFile, special: Mapping[str, str], add: Mapping[str, bool]) -> dict[str, Any] | None:
    """What is put around a text."""
    names = {name: special.get(f"{name}_token") for name, wanted in add.items() if wanted}
    if not names:
        return None
    if missing := [name for name, token in names.items() if token is None]:
        raise ExportError(f"{file.path}: texts get a {missing[0]} token, but the file does not say which; {ADVICE}")

    def around(letter: str, kind: int) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": letter, "type_id": kind}}
        put = {name: {"SpecialToken": {"id": token, "type_id": kind}} for name, token in names.items()}
        return [*([put["bos"]] if "bos" in put else []), text, *([put["eos"]] if "eos" in put else [])]

    tokens = file.metadata["tokenizer.ggml.tokens"]
    ids = {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]} for token in names.values()}
    pair = [*around("A", 0), *around("B", 1)]
    return {"type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": ids}


def _with_spaces(tokens: Sequence[str]) -> list[str]:
    """Gemma's tokens of several spaces as its vocabulary spells them; the converter writes plain spaces."""
    return [SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]


def _listed(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise ExportError(f"{file.path}: metadata tokenizer.ggml.{key} is missing or no list of texts; {ADVICE}")
    return value


def _token_id(file: GgufFile, name: str, count: int) -> int | None:
    """An id of the metadata; None for one that says that there is none: -1, which is stored without its sign, and for
    one beyond the tokens, which no text can hold."""
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and type(value) is not int:
        raise ExportError(f"{file.path}: {name}_token_id is {value!r}, but must be a whole number; {ADVICE}")
    return value if value is not None and 0 <= value < (count or 1 << 31) else None
