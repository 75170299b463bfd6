"""A request as it was meant: the fields of its JSON that this server takes, those it ignores, those it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_runtime import ToolUse
from eagle_runtime.drafting.methods import NAMES, TREES
from eagle_serve.checks import a_list, an_object, boolean, ids, integer, number, one_of, text
from eagle_serve.errors import ApiError, unsupported, wrong_type, wrong_value
from eagle_serve.grammar import Grammar, grammar_of
from eagle_serve.messages import parse_messages, text_of
from eagle_serve.options import Options
from eagle_serve.refused import Endpoint, neutral, refuse
from eagle_serve.tools import OLD, has_functions, no_tools, tools_of

MOST_TOKENS = 2**31 - 1
MOST_LOG_PROBS, MOST_STRINGS, LONGEST_STRING = 20, 16, 256  # the runtime's limits, named by field
LEAST_TOP_P = 1e-9  # for 0, which OpenAI's API takes: the likeliest token is left
COMPLETION_TOKENS = 16  # OpenAI's default of its older endpoint
MOST_CHOICES = 128  # the limit of OpenAI's API
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template", "continue_final_message")
PAIRS = {"repeat_penalty": "repetition_penalty"}  # llama.cpp's name -> the runtime's
SAMPLING = {
    "temperature": number(0),
    "top_p": number(0, 1),
    "top_k": integer(-1, MOST_TOKENS),  # -1 keeps all, as 0 does
    "min_p": number(0, 1),
    "repetition_penalty": number(0, above=True),
    "repeat_penalty": number(0, above=True),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
}
# Names of the most tokens, and of the seed; of several that are given the last one counts.
LIMITS = ("num_predict", "n_predict", "max_new_tokens", "max_tokens", "max_completion_tokens")
SEEDS = ("random_seed", "seed")
COMMON = {
    *SAMPLING, "model", "stream", "stream_options", "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
    "logprobs", "response_format", "n", "best_of", "eagle", *LIMITS, *SEEDS,
}  # fmt: skip
OF_CHAT = {
    "messages", "top_logprobs", "chat_template_kwargs", "reasoning_effort", "enable_thinking", "prediction",
    "reasoning", "thinking",
    "tools", "tool_choice", "parallel_tool_calls", *OLD,
}  # fmt: skip
OF_COMPLETIONS = {"prompt", "echo"}


@dataclass(frozen=True, slots=True)
class Request:
    """prompts: text or ids of completions; messages: of a chat. choices: answers to each prompt. settings: of the
    runtime's `stream`, those that were given. max_tokens: None takes what is left. echo: the answer begins with the
    prompt, and may end there (max_tokens 0). logprobs: None, or how many
    runners-up are wanted with each token. prediction: text that the answer may repeat. tools: that the answer may call;
    old_calls: tell of a call as the older API does. trace: tell which tokens were drafted. ignored: fields without
    effect."""

    endpoint: Endpoint
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    choices: int = 1
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    prediction: str | None = None
    tools: ToolUse | None = None
    old_calls: bool = False
    trace: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def echoes_alone(self) -> bool:
        """Whether the answer is the prompt: an evaluation asks for the log-probabilities of a text of its own."""
        return self.max_tokens == 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request made ready to decode. ids: of the whole prompt. settings: for the runtime. Everything about it was
    checked, so that what can still fail is the engine. index: of this answer among those to the request; first: whether
    it is its prompt's first. echo: what the answer begins with."""

    request: Request
    ids: tuple[int, ...]
    settings: Mapping[str, Any]
    index: int = 0
    first: bool = True
    echo: str = ""


def parse_request(
    body: Mapping[str, Any], endpoint: Endpoint, options: Options, names: Sequence[str], own_penalty: float
) -> Request:
    """Returns what a request means; null means that a field was not given. names, own_penalty: of the model, whose
    repetition penalty counts where a request has none. Raises ApiError."""
    given = {name: value for name, value in body.items() if value is not None}
    refuse(given, endpoint, own_penalty)
    own = OF_CHAT if endpoint == "chat" else OF_COMPLETIONS
    prompts, messages, tools = [], [], None
    if endpoint == "chat":
        messages = parse_messages(given.get("messages"), options.limits.messages)
        tools = tools_of(given)
        if tools is None and given.get("tools"):
            own = own - {"tools"}
    else:
        no_tools(given)
        prompts = _prompts(given.get("prompt"))
    drafting, trace = _eagle(given)
    variables = template_kwargs(given) if endpoint == "chat" else {}
    stream_options = an_object(given.get("stream_options", {}), "stream_options")
    return Request(
        endpoint=endpoint,
        model=_model(given, names if options.strict_model else None),
        prompts=tuple(prompts),
        messages=tuple(messages),
        choices=_choices(given),
        template_kwargs=variables,
        settings={**_sampling(given), **drafting},
        max_tokens=_max_tokens(given, endpoint),
        echo=_echo(given, endpoint),
        stream=boolean(given.get("stream", False), "stream"),
        include_usage=boolean(stream_options.get("include_usage") or False, "stream_options.include_usage"),
        logprobs=_logprobs(given, endpoint),
        grammar=grammar_of(given, options),
        prediction=_prediction(given) if endpoint == "chat" else None,
        tools=tools,
        old_calls=endpoint == "chat" and has_functions(given),
        trace=trace,
        ignored=tuple(name for name in given if name not in COMMON | own | _saying_nothing(given, endpoint)),
    )


def _model(given: Mapping[str, Any], names: Sequence[str] | None) -> str | None:
    """The name that was asked for. names: those allowed; None allows all."""
    model = text(given["model"], "model") if "model" in given else None
    if names is not None and model is not None and model not in names:
        raise model_not_found(model, names)
    return model


def model_not_found(model: str, names: Sequence[str]) -> ApiError:
    """The error of a name that is none of the model's."""
    reason = f"the model {model[:80]!r} is not served here, but {', '.join(names)}"
    return ApiError(404, "model_not_found", reason, "model")


def _choices(given: Mapping[str, Any]) -> int:
    count: int = integer(1, MOST_CHOICES)(given.get("n", 1), "n")
    if integer(1)(given.get("best_of", 1), "best_of") > count:
        raise unsupported("best_of", "is more than n, but only answers are made that are returned")
    return count


def _prompts(value: object) -> list[str | tuple[int, ...]]:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > MOST_CHOICES:
            raise wrong_value("prompt", f"has {len(value)} prompts, but at most {MOST_CHOICES} are taken")
        return [_prompt(one, f"prompt[{index}]" if len(value) > 1 else "prompt") for index, one in enumerate(value)]
    return [_prompt(value, "prompt")]


def _prompt(value: object, name: str) -> str | tuple[int, ...]:
    if isinstance(value, str):
        result: str | tuple[int, ...] = text(value, name)
    elif isinstance(value, list):
        result = ids(value, name)
    else:
        raise wrong_type(name, value, "a string or a list of token ids")
    if not result:
        raise wrong_value(name, "is empty; send at least one token")
    return result


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    settings = {PAIRS.get(name, name): check(given[name], name) for name, check in SAMPLING.items() if name in given}
    if (
        "repeat_penalty" in given
        and given.get("repetition_penalty", given["repeat_penalty"]) != given["repeat_penalty"]
    ):
        raise wrong_value("repeat_penalty", "and repetition_penalty differ, but mean the same; send one of them")
    if settings.get("top_k") == -1:
        settings["top_k"] = 0
    if settings.get("top_p") == 0:
        settings["top_p"] = LEAST_TOP_P
    for name in SEEDS:
        if name in given:
            seed = integer(-(2**63), 2**64 - 1)(given[name], name)
            if seed != -1:  # -1 draws one, as if none had been given
                settings["seed"] = seed % 2**64
    if "logit_bias" in given:
        settings["logit_bias"] = _logit_bias(given["logit_bias"])
    if "stop" in given:
        settings["stop"] = _stop(given["stop"])
    if "stop_token_ids" in given:
        settings["stop_token_ids"] = ids(given["stop_token_ids"], "stop_token_ids")
    if integer(0, MOST_TOKENS)(given.get("min_tokens", 0), "min_tokens"):
        settings["min_new_tokens"] = given["min_tokens"]
    if boolean(given.get("ignore_eos", False), "ignore_eos"):
        settings["ignore_eos"] = True
    return settings


def _logit_bias(value: object) -> dict[int, float]:
    result = {}
    for token, added in an_object(value, "logit_bias").items():
        if not token.isascii() or not token.isdigit() or len(token) > 10:
            raise wrong_value("logit_bias", f"names {token[:40]!r}, but its names are token ids")
        result[int(token)] = number(-100, 100)(added, f"logit_bias.{token}")
    return result


def _stop(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else a_list(value, "stop")
    stops = tuple(text(item, f"stop[{index}]") for index, item in enumerate(items))
    if len(stops) > MOST_STRINGS:
        raise wrong_value("stop", f"has {len(stops)} strings, but at most {MOST_STRINGS} are looked for")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= LONGEST_STRING:
            raise wrong_value(f"stop[{index}]", f"has {len(stop)} characters, but must have 1 to {LONGEST_STRING}")
    return stops


def _max_tokens(given: Mapping[str, Any], endpoint: Endpoint) -> int | None:
    """The most tokens; of several names the last in LIMITS counts. -1 means what is left, as in LM Studio, and so
    does more than that: many clients send 8192 or 32000 with every request."""
    result: int | None = None if endpoint == "chat" else COMPLETION_TOKENS
    for name in LIMITS:
        if name in given:
            most: int = integer(-1, MOST_TOKENS)(given[name], name)
            if most == 0 and not _echo(given, endpoint):
                raise wrong_value(name, "is 0, but must be 1 or more, or -1 for what is left of the context")
            result = None if most == -1 else most
    return result


def _echo(given: Mapping[str, Any], endpoint: Endpoint) -> bool:
    echo: bool = endpoint == "completions" and boolean(given.get("echo", False), "echo")
    if echo and given.get("stream") and _logprobs(given, endpoint) is not None:
        raise unsupported("echo", "with logprobs is not streamed; leave out stream")
    return echo


def _logprobs(given: Mapping[str, Any], endpoint: Endpoint) -> int | None:
    most = integer(0, MOST_LOG_PROBS)
    if endpoint == "completions":
        if given.get("logprobs") is False:  # as clients send that know the other endpoint alone
            return None
        return int(most(given["logprobs"], "logprobs")) if "logprobs" in given else None
    wanted = boolean(given.get("logprobs", False), "logprobs")
    runners_up = int(most(given.get("top_logprobs", 0), "top_logprobs"))
    if runners_up and not wanted:
        raise wrong_value("top_logprobs", "needs logprobs: true")
    return runners_up if wanted else None


def template_kwargs(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of the chat template that a request sets. Raises ApiError."""
    kwargs = an_object(given.get("chat_template_kwargs", {}), "chat_template_kwargs")
    for name in kwargs:
        if name in RESERVED:
            raise wrong_value(f"chat_template_kwargs.{name}", "cannot be set by a request")
    said: dict[str, Any] = {}
    if "thinking" in given:
        thinking = an_object(given["thinking"], "thinking")
        said["enable_thinking"] = one_of(("enabled", "disabled"))(thinking.get("type"), "thinking.type") == "enabled"
        _nothing_else(thinking, ("type",), "thinking")
    if "reasoning" in given:
        reasoning = an_object(given["reasoning"], "reasoning")
        if reasoning.get("effort") is not None:
            said["reasoning_effort"] = text(reasoning["effort"], "reasoning.effort")
        if reasoning.get("enabled") is not None:
            said["enable_thinking"] = boolean(reasoning["enabled"], "reasoning.enabled")
        _nothing_else(reasoning, ("effort", "enabled"), "reasoning")
    if given.get("thinking_budget") == 0:
        said["enable_thinking"] = False
    if "reasoning_effort" in given:
        said["reasoning_effort"] = text(given["reasoning_effort"], "reasoning_effort")
    if "enable_thinking" in given:
        said["enable_thinking"] = boolean(given["enable_thinking"], "enable_thinking")
    return {**said, **kwargs}


def _nothing_else(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raises ApiError for a part of a field that would change the answer, beside the known ones."""
    for name, value in given.items():
        if name not in names and value not in (None, False):
            raise unsupported(f"{where}.{name}", "is not supported; leave it out")


def _prediction(given: Mapping[str, Any]) -> str | None:
    if "prediction" not in given:
        return None
    prediction = an_object(given["prediction"], "prediction")
    one_of(("content",))(prediction.get("type"), "prediction.type")
    return text_of(prediction.get("content"), "prediction.content")


def _saying_nothing(given: Mapping[str, Any], endpoint: Endpoint) -> set[str]:
    """Fields of the refused ones that passed, since they ask for nothing: no need to report them."""
    other = {"continue_final_message", "add_generation_prompt"} if endpoint == "completions" else set()
    return {*neutral(endpoint), "modalities", "tool_choice", *other} | (
        {"tools"} if given.get("tools") == [] else set()
    )


def _eagle(given: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Settings of drafts, and whether to tell which tokens were drafted."""
    eagle = an_object(given.get("eagle", {}), "eagle")
    settings: dict[str, Any] = {}
    trace = False
    for name, value in eagle.items():
        where = f"eagle.{name}"
        if value is None:
            continue
        if name == "method":
            settings["method"] = one_of(NAMES)(value, where)
        elif name == "tree":
            settings["tree"] = one_of(TREES)(value, where)
        elif name == "trace":
            trace = boolean(value, where)
        elif name != "constraint":  # which grammar_of reads
            raise wrong_value("eagle", f"has no {name[:40]!r}; it takes method, tree, trace and constraint")
    return settings, trace
