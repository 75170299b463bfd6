"""What llama.cpp's server has besides OpenAI's API.

    POST /completion, /tokenize, /detokenize, /apply-template
    GET  /props

Settings have the names that completions take anyway (request.py); grammars in its own notation are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle_runtime import Piece, Result, Token
from eagle_serve.checks import a_list, boolean, ids, integer, text
from eagle_serve.dialect import Body, Dialect, Read, Writer, each
from eagle_serve.engine import Engine
from eagle_serve.errors import unsupported
from eagle_serve.figures import figures, logprob, shown, text_of
from eagle_serve.frames import event
from eagle_serve.jobs import Job
from eagle_serve.messages import parse_messages
from eagle_serve.request import LIMITS, template_kwargs

# How llama.cpp keeps caches and slots, and what its answers tell besides; nothing of the text depends on it.
OWN = {
    "cache_prompt", "id_slot", "slot_id", "n_keep", "n_cache_reuse", "return_tokens", "timings_per_token",
    "return_progress", "n_probs", "json_schema", "prompt",
}  # fmt: skip


def read(body: Body, engine: Engine) -> Read:
    """Returns the completion that a request of /completion stands for. Raises ApiError."""
    fields = {name: value for name, value in body.items() if name not in OWN and value is not None}
    fields["prompt"] = _prompt(body.get("prompt"), engine)
    if not any(name in fields for name in LIMITS) or fields.get("n_predict") == -2:
        fields["n_predict"] = -1  # -2 fills the context, as -1 does here
    if body.get("json_schema"):
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": body["json_schema"]}}
    if isinstance(pairs := body.get("logit_bias"), list):
        fields["logit_bias"] = _biases(pairs)
    if body.get("response_fields"):
        raise unsupported("response_fields", "is not supported; pick the fields yourself")
    if integer(0)(body.get("n_probs") or 0, "n_probs"):
        fields["logprobs"] = body["n_probs"]
    return Read("completions", fields)


def _biases(pairs: list[Any]) -> dict[str, Any]:
    """The object that stands for pairs of an id and a number."""
    found = {}
    for index, pair in enumerate(pairs):
        name = f"logit_bias[{index}]"
        token, *added = a_list(pair, name) or [None]
        if len(added) != 1 or added[0] is False or isinstance(token, str):
            raise unsupported(name, "is not a pair of a token id and a number; send such pairs alone")
        found[str(integer(0)(token, f"{name}[0]"))] = added[0]
    return found


def _prompt(value: object, engine: Engine) -> object:
    """A prompt; one that mixes texts and ids becomes ids."""
    if not isinstance(value, list) or not any(isinstance(item, str) for item in value) or len(value) == 1:
        return value
    if all(isinstance(item, str) for item in value):
        return value  # several prompts, which are refused
    found: list[int] = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            said = text(item, f"prompt[{index}]")
            found += engine.model.encode(said) if index == 0 else engine.model.text.encode_rendered(said)
        else:
            found += ids([item], f"prompt[{index}]")
    return found


class CompletionAnswer(Writer):
    """Writes an answer of /completion."""

    def __init__(self, engine: Engine, job: Job, body: Body) -> None:
        super().__init__(engine, job)
        self._body = body
        self._text = ""

    def whole(self, pieces: Sequence[Piece], result: Result) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in shown(piece)]
        self._text = text_of(pieces)
        told = [token.id for token in tokens] if self._body.get("return_tokens") else []
        return {**self._last(result), "content": self._text, "tokens": told, **self._probabilities(tokens)}

    def add(self, piece: Piece) -> bytes:
        tokens = shown(piece)
        if not tokens and not piece.text:
            return b""
        self._text += piece.text
        data = {"index": 0, "content": piece.text, "tokens": [token.id for token in tokens], "stop": False}
        counts = {"id_slot": 0, "tokens_evaluated": len(self._job.prepared.ids)}
        return event({**data, **counts, **self._probabilities(tokens)})

    def end(self, result: Result) -> bytes:
        """The event with the counts."""
        return event(self._last(result))

    def _probabilities(self, tokens: Sequence[Token]) -> dict[str, Any]:
        if self._job.prepared.request.logprobs is None:
            return {}

        listed = []
        for token in tokens:
            entry = logprob(self._engine, token)
            others = [other for other, _ in token.top]
            top = [{"id": other, **told} for other, told in zip(others, entry["top_logprobs"], strict=True)]
            listed.append({"id": token.id, **entry, "top_logprobs": top})
        return {"completion_probabilities": listed}

    def _last(self, result: Result) -> dict[str, Any]:
        usage, stop, model = result.usage, result.stop, self._engine.model
        return {
            "index": 0,
            "content": "",
            "tokens": [],
            "id_slot": 0,
            "stop": True,
            "model": self._engine.names[0],
            "tokens_predicted": usage.new_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "generation_settings": {"n_ctx": model.context, **self._set(), "seed": result.seed},
            "prompt": model.decode(self._job.prepared.ids, skip_special_tokens=False),
            "has_new_line": "\n" in self._text,
            "truncated": False,
            "stop_type": "limit"
            if result.finish_reason == "length"
            else "word"
            if isinstance(stop.value, str)
            else "eos",
            "stopping_word": stop.value if isinstance(stop.value, str) else "",
            **figures(result, self._job),
        }

    def _set(self) -> dict[str, Any]:
        settings = self._job.prepared.settings
        own = self._engine.model.manifest.sampling
        names = ("temperature", "top_k", "top_p", "min_p")
        return {name: settings.get(name, getattr(own, name)) for name in names} | {
            "n_predict": settings["max_new_tokens"],
            "stop": list(settings.get("stop", ())),
        }


COMPLETION = Dialect(
    "/completion", read, each(CompletionAnswer), {"logprobs": "n_probs", "response_format": "json_schema"}
)


def props(engine: Engine) -> dict[str, Any]:
    """The answer of /props."""
    model = engine.model
    own = model.manifest.sampling
    params = {"temperature": own.temperature, "top_k": own.top_k, "top_p": own.top_p, "min_p": own.min_p}
    return {
        "default_generation_settings": {"id": 0, "n_ctx": model.context, "params": {**params, "n_predict": -1}},
        "total_slots": engine.parallel,
        "model_alias": engine.names[0],
        "model_path": engine.names[0],
        "chat_template": model.text.template_source(tools=False) if model.text.chat else "",
        "modalities": {"vision": False, "audio": False},
        "build_info": engine.fingerprint,
        "is_sleeping": False,
    }


def tokenize(body: Body, engine: Engine) -> dict[str, Any]:
    """The answer of /tokenize. Raises ApiError."""
    content = text(body.get("content"), "content")
    if not boolean(body.get("parse_special", True), "parse_special"):
        raise unsupported("parse_special", "may be true alone: special tokens are read as such")
    whole = boolean(body.get("add_special", False), "add_special")
    model = engine.model
    found = model.encode(content) if whole else model.text.encode_rendered(content)
    if not boolean(body.get("with_pieces", False), "with_pieces"):
        return {"tokens": found}
    return {"tokens": [{"id": token, "piece": engine.token_text(token)} for token in found]}


def detokenize(body: Body, engine: Engine) -> dict[str, Any]:
    """The answer of /detokenize. Raises ApiError."""
    return {"content": engine.model.decode(ids(body.get("tokens"), "tokens"), skip_special_tokens=False)}


def apply_template(body: Body, engine: Engine) -> dict[str, Any]:
    """The answer of /apply-template: the prompt of a chat. Raises ApiError."""
    most = len(a_list(body.get("messages"), "messages"))
    if body.get("tools"):
        raise unsupported("tools", "is not supported here; /v1/count_tokens reads whole requests")
    given = {name: value for name, value in body.items() if value is not None}
    messages = parse_messages(given["messages"], most)
    return {"prompt": engine.model.chat_prompt(messages, template_kwargs=template_kwargs(given)).text}
