"""Ollama's API, as far as one model that is loaded answers chats and prompts.

    POST /api/chat, /api/generate, /api/show
    GET  /api/tags, /api/ps, /api/version

What a request says is read as a chat or a completion of OpenAI's. Options of the machine, as num_ctx and num_gpu, are
the server's own and passed over. ollama_answer.py writes the answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from eagle_runtime.text.call_formats import recognised
from eagle_serve.checks import a_list, an_object, boolean, text
from eagle_serve.dialect import Body, Dialect, Read, each
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError, unsupported, wrong_type
from eagle_serve.ollama_answer import ChatAnswer, GenerateAnswer, head

VERSION = "0.12.11"  # of Ollama, whose API this is
TAG = ":latest"
# Options that say how Ollama runs the model, which here the server's command does.
OF_THE_MACHINE = {
    "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_gqa", "numa", "low_vram", "use_mmap",
    "use_mlock", "f16_kv", "vocab_only", "logits_all", "embedding_only", "mirostat_tau", "mirostat_eta",
    "rope_frequency_base", "rope_frequency_scale",
}  # fmt: skip
RENAMED = {"penalize_newline": "penalize_nl"}
OWN = {
    "messages", "prompt", "options", "format", "think", "stream", "keep_alive", "tools", "images", "system", "raw",
    "model", "suffix", "template", "context", "truncate", "shift", "width", "height", "steps",
}  # fmt: skip


def error_body(error: ApiError) -> bytes:
    """An error as Ollama's clients read it: a sentence, which names the field."""
    names = error.param is None or error.param in error.message
    return json.dumps({"error": error.message if names else f"{error.param}: {error.message}"}).encode("ascii")


def read_chat(body: Body, engine: Engine) -> Read:
    """Returns the chat that a request of /api/chat stands for. Raises ApiError."""
    fields = _common(body, engine)
    fields["messages"] = _messages(a_list(body.get("messages"), "messages"))
    if body.get("tools"):
        fields["tools"] = body["tools"]
    return Read("chat", fields)


def read_generate(body: Body, engine: Engine) -> Read:
    """Returns what a request of /api/generate stands for: a chat of one question, or with `raw`, and for a model
    without a chat template, a completion. Raises ApiError."""
    for name in ("suffix", "template", "context", "width", "height", "steps"):
        if body.get(name):
            raise unsupported(name, "is not supported; leave it out")
    _no_images(body, "images")
    prompt = text(body.get("prompt"), "prompt")
    system = text(body.get("system") or "", "system")
    if boolean(body.get("raw") or False, "raw") or not engine.model.text.chat:
        if system:
            raise unsupported("system", "needs the model's chat template, which is not used here; put it into prompt")
        fields = _common({name: value for name, value in body.items() if name != "think"}, engine)
        return Read("completions", {"max_tokens": -1, **fields, "prompt": prompt})
    asked = [{"role": "system", "content": system}] if system else []
    return Read("chat", {**_common(body, engine), "messages": [*asked, {"role": "user", "content": prompt}]})


def _common(body: Body, engine: Engine) -> dict[str, Any]:
    """The fields that both addresses have."""
    fields = {name: value for name, value in body.items() if name not in OWN}
    for name, value in an_object(body.get("options") or {}, "options").items():
        if name in ("num_predict", "max_tokens"):
            fields["max_tokens"] = -1 if value in (-1, -2) else value
        elif name not in OF_THE_MACHINE:
            fields[RENAMED.get(name, name)] = value
    fields["stream"] = boolean(body.get("stream", True), "stream")
    if body.get("model") is not None:
        fields["model"] = text(body["model"], "model").removesuffix(TAG)
    if body.get("format"):
        fields["response_format"] = _response_format(body["format"])
    return fields | _thinking(body.get("think"), engine)


def _response_format(value: object) -> dict[str, Any]:
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise wrong_type("format", value, "'json' or a JSON schema")
    return {"type": "json_schema", "json_schema": {"schema": value}}


def _thinking(value: object, engine: Engine) -> dict[str, Any]:
    """Fields that let the model think, or not; words say how much."""
    if value is None:
        return {}
    if value and "thinking" not in capabilities(engine):
        raise unsupported("think", "asks for thinking, which this model does not do; leave it out")
    if isinstance(value, bool):
        return {"enable_thinking": value} if "thinking" in capabilities(engine) else {}
    return {"enable_thinking": True, "reasoning_effort": text(value, "think")}


def _messages(values: list[Any]) -> list[dict[str, Any]]:
    """Messages as OpenAI has them: arguments are JSON text, and a result names its call by an id. Results without one
    belong to the calls before them, by the tool's name or in order."""
    messages: list[dict[str, Any]] = []
    pending: list[tuple[str, str]] = []  # name and id of calls without a result
    for index, value in enumerate(values):
        where = f"messages[{index}]"
        given = an_object(value, where)
        _no_images(given, f"{where}.images")
        message = {name: given[name] for name in ("role", "content", "tool_call_id") if given.get(name) is not None}
        if given.get("thinking"):
            message["reasoning_content"] = given["thinking"]
        if given.get("tool_calls"):
            calls = a_list(given["tool_calls"], f"{where}.tool_calls")
            message["tool_calls"] = [
                _call(call, f"{where}.tool_calls[{n}]", f"call{index:04}x{n:04}") for n, call in enumerate(calls)
            ]
            pending = [(call["function"]["name"], call["id"]) for call in message["tool_calls"]]
        if message.get("role") == "tool":
            name = given.get("tool_name") or given.get("name")
            if name is not None:
                message["name"] = name
            if "tool_call_id" not in message and pending:
                own = next((call for call in pending if call[0] == name), pending[0])
                message["tool_call_id"] = own[1]
            pending = [call for call in pending if call[1] != message.get("tool_call_id")]
        elif "tool_calls" not in message:
            message.setdefault("content", "")
        messages.append(message)
    return messages


def _call(value: object, where: str, call_id: str) -> dict[str, Any]:
    call = an_object(value, where)
    function = an_object(call.get("function"), f"{where}.function")
    arguments = an_object(function.get("arguments") or {}, f"{where}.function.arguments")
    said = {"name": text(function.get("name"), f"{where}.function.name"), "arguments": json.dumps(arguments)}
    return {"id": call.get("id") or call_id, "type": "function", "function": said}


def _no_images(given: Mapping[str, Any], name: str) -> None:
    if given.get("images"):
        raise unsupported(name, "is not supported, since this model reads text alone")


def _only_load(name: str) -> Any:
    """A request without messages or a prompt asks for nothing but that the model is loaded, which it is."""

    def answer(body: Body, engine: Engine) -> dict[str, Any] | None:
        if body.get(name):
            return None
        content = {"message": {"role": "assistant", "content": ""}} if name == "messages" else {"response": ""}
        reason = "unload" if body.get("keep_alive") in (0, "0") else "load"
        return {**head(engine, body), **content, "done": True, "done_reason": reason}

    return answer


NAMES = {
    "response_format.json_schema.schema": "format",
    "response_format": "format",
    "max_tokens": "options.num_predict",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}
CHAT = Dialect("/api/chat", read_chat, each(ChatAnswer), NAMES, _only_load("messages"))
GENERATE = Dialect(
    "/api/generate", read_generate, each(GenerateAnswer), {**NAMES, "messages": "prompt"}, _only_load("prompt")
)


def capabilities(engine: Engine) -> list[str]:
    """What the model can do, in Ollama's words."""
    found = ["completion"]
    if engine.model.text.chat:
        source = engine.model.text.template_source(tools=False)
        found += ["tools"] + ["thinking"] * recognised(source).reasons(source)
    return found


def tags(engine: Engine) -> dict[str, Any]:
    """The answer of /api/tags: the model under each of its names."""
    return {"models": [_listed(engine, name) for name in engine.names]}


def running(engine: Engine) -> dict[str, Any]:
    """The answer of /api/ps: the model, which stays loaded."""
    never = "9999-12-31T00:00:00Z"
    more = {"expires_at": never, "size_vram": 0, "context_length": engine.model.context}
    return {"models": [{**_listed(engine, name), **more} for name in engine.names[:1]]}


def show(body: Body, engine: Engine) -> dict[str, Any]:
    """The answer of /api/show."""
    model = engine.model
    sampling = model.manifest.sampling
    settings = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    family = _details(engine)["family"]
    return {
        "modelfile": "",
        "license": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in settings.items()),
        "template": model.text.template_source(tools=False) if model.text.chat else "",
        "details": _details(engine),
        "model_info": {"general.architecture": family, f"{family}.context_length": model.context},
        "capabilities": capabilities(engine),
        "modified_at": _time(engine),
    }


def _listed(engine: Engine, name: str) -> dict[str, Any]:
    return {
        "name": f"{name}{TAG}",
        "model": f"{name}{TAG}",
        "modified_at": _time(engine),
        "size": engine.model.memory().weights,
        "digest": engine.digest,
        "details": _details(engine),
    }


def _details(engine: Engine) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "eagle",
        "family": "eagle",
        "families": ["eagle"],
        "parameter_size": "",
        "quantization_level": "-".join(dict.fromkeys(engine.model.manifest.precision.values())).upper(),
    }


def _time(engine: Engine) -> str:
    return datetime.fromtimestamp(engine.created, UTC).isoformat().replace("+00:00", "Z")
