"""How a family of models is told of tools, and how it writes calls of them in its answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.text.channels import Channels
from eagle_runtime.text.keyword_values import arguments_written
from eagle_runtime.text.quoted_values import members_written
from eagle_runtime.text.tagged_values import TaggedValues


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of an answer with calls is `begin`, the calls with `between` among them, and `end`. From it follow the
    grammar of such answers, their parser, and what stands in a prompt for earlier calls that its template leaves out.

    marks: texts that chat templates of the family hold, all of them. writes: a pattern that their text then matches,
    where marks alone would take in other families; line ends and quotes count as if they were not escaped. call: what
    stands before a call's name, between name and arguments (a JSON object), and after those. between: None for one call
    per answer. trigger: the beginning of `begin` from which on an answer is one of calls; where it is empty, an answer
    that begins as a call is one. also: other texts that may stand in place of `begin`. tools_as: the template's
    variable for the tools; "message" puts them as JSON into the system message's field `tools`, and "text" writes
    `description` into its content. functions_alone: whether tools are given without {"type": "function"} around.
    results: what stands before and after the result of a call in a message of the user; None where the template
    knows messages of role tool. calls_as_text: whether earlier calls are written into the content of their message,
    as for all templates without `tool_calls`; joint: what stands before them there, after text. id_length: of the
    ids of calls, where the template counts characters; id_mark: what stands before such an id, which follows a call's
    name where answers have ids. thought: what stands before and after reasoning, in templates that speak of it;
    led: white space that may stand before that.
    channels: of answers that are messages with heads, in which reasoning, text and calls stand; the other fields then
    say how prompts write calls. tagged: of arguments that are not a JSON object but values between tags. quote: what
    stands before and after a string, of arguments with bare names in order (quoted_values.py). keywords: whether
    arguments are written as Python's keywords are (keyword_values.py)."""

    name: str
    marks: tuple[str, ...]
    begin: str
    call: tuple[str, str, str]
    writes: str = ""
    end: str = ""
    between: str | None = None
    trigger: str = ""
    also: tuple[str, ...] = ()
    tools_as: Literal["tools", "xml_tools", "message", "text"] = "tools"
    functions_alone: bool = False
    description: str = "{tools}"
    results: tuple[str, str] | None = None
    calls_as_text: bool = False
    joint: str = "\n"
    id_length: int | None = None
    id_mark: str = ""
    thought: tuple[str, str] = ("<think>", "</think>")
    led: str = ""
    channels: Channels | None = None
    tagged: TaggedValues | None = None
    quote: str = ""
    keywords: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        """All that may stand before the first call."""
        return (self.begin, *self.also)

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of an answer that may hold special tokens."""
        if self.channels is not None:
            return self.channels.markers
        tags = self.tagged
        inner = () if tags is None else (tags.before, tags.middle, tags.close, tags.gap)
        return (*self.begins, *self.call, self.id_mark, self.between or "", self.end, *self.thought, self.quote, *inner)

    def speaks_in(self, template: str) -> bool:
        """Whether a chat template's source is of the family."""
        if not all(mark in template for mark in self.marks):
            return False
        plain = template.replace("\\n", "\n").replace('\\"', '"').replace("\\'", "'")
        return not self.writes or re.search(self.writes, plain) is not None

    def reasons(self, template: str) -> bool:
        """Whether the answers of a model may begin with reasoning. template: its chat template's source."""
        return self.channels is not None or self.thought[1] in template

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Returns the text of calls, each a name and its arguments."""
        before, middle, after = self.call
        ids = [f"{self.id_mark}{number:0{self.id_length}}" if self.id_mark else "" for number in range(len(calls))]
        texts = [
            f"{before}{name}{own}{middle}{self._arguments(args)}{after}"
            for own, (name, args) in zip(ids, calls, strict=True)
        ]
        return f"{self.begin}{(self.between or '').join(texts)}{self.end}"

    def _arguments(self, arguments: Any) -> str:
        if self.keywords:
            return arguments_written(arguments)
        if self.quote:
            return members_written(arguments, self.quote)
        return json.dumps(arguments, ensure_ascii=False) if self.tagged is None else self.tagged.written(arguments)


# What follows <tool_call> where it opens a JSON object: its beginning, perhaps in a text of the template's own, or what
# the template makes JSON of.
JSON_CALL = (
    r"""<tool_call>\s*(["']\s*(\}\}\s*\{\{-?\s*|[~+]\s*)["']?)?\s*"""
    r"""(\{+\s*["']?name|["']\s*[~+]\s*\(?[\w.]+\s*\|\s*tojson)"""
)
# Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4: JSON within <tool_call>.
HERMES = CallFormat(
    name="hermes",
    marks=("<tool_call>", "tool_calls", "arguments"),
    writes=JSON_CALL,
    trigger="<tool_call>",
    begin="<tool_call>\n",
    call=('{"name": "', '", "arguments": ', "}"),
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
# EXAONE 4: the same in one line, in templates that write it in no other way.
EXAONE4 = replace(
    HERMES,
    name="exaone4",
    writes=rf"(?s)\A(?!.*<tool_call>\n).*{JSON_CALL}",
    begin="<tool_call>",
    between="</tool_call>\n<tool_call>",
    end="</tool_call>",
)
# Templates that know no tools: the form of Hermes, described in the system message.
GENERIC = replace(
    HERMES,
    name="generic",
    marks=(),
    writes="",
    calls_as_text=True,
    tools_as="text",
    description=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\nFor each function call, "
        "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    results=("<tool_response>\n", "\n</tool_response>"),
)
# SmolLM3: the form of Hermes; its template has a variable of its own for such tools, and leaves out earlier calls.
SMOLLM3 = replace(
    HERMES, name="smollm3", marks=("xml_tools", "python_tools"), writes="", tools_as="xml_tools", functions_alone=True
)
# DeepSeek V3 and R1: a block of JSON for each call; the template describes no tools, and leaves calls open.
DEEPSEEK = CallFormat(
    name="deepseek",
    marks=("<｜tool▁calls▁begin｜>", "```json"),
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    call=("function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"),
    between="\n<｜tool▁call▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    tools_as="text",
    description=(
        "## Tools\n\nYou have access to these functions, each described by a JSON object:\n{tools}\n\nCall one with "
        "JSON arguments that follow its parameters."
    ),
    calls_as_text=True,
)
# DeepSeek V3.1: names and arguments between tags alone. The template writes earlier calls, but some versions of it take
# their arguments as text and others as an object, so they stand in the content, from which it makes the same prompt.
DEEPSEEK_V3_1 = CallFormat(
    name="deepseek-v3.1",
    marks=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>"),
    trigger="<｜tool▁calls▁begin｜>",
    begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    call=("", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    between="<｜tool▁call▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    tools_as="text",
    description=(
        "## Tools\n\nYou have access to these functions, each described by a JSON object:\n{tools}\n\nA call is "
        "written as <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>, where NAME is that of a function and ARGUMENTS is a JSON object that follows its "
        "parameters; further calls follow the first one without a space."
    ),
    calls_as_text=True,
    joint="",
)
# Qwen3-Coder, Qwen3.5 and Nemotron 3: each value after a tag with its name.
QWEN3_CODER = CallFormat(
    name="qwen3-coder",
    marks=("<tool_call>", "<function=", "<parameter="),
    trigger="<tool_call>",
    begin="<tool_call>\n",
    call=("<function=", ">\n", "</function>"),
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
    tagged=TaggedValues("<parameter=", ">\n", "\n</parameter>", "\n"),
)
# Seed-OSS: the same in tags of its own, each value in one line with its name.
SEED_OSS = replace(
    QWEN3_CODER,
    name="seed-oss",
    marks=("<seed:tool_call>", "<function=", "<parameter="),
    trigger="<seed:tool_call>",
    begin="<seed:tool_call>\n",
    between="\n</seed:tool_call>\n<seed:tool_call>\n",
    end="\n</seed:tool_call>",
    thought=("<seed:think>", "</seed:think>"),
    tagged=TaggedValues("<parameter=", ">", "</parameter>", "\n"),
)
# GLM-4.5 and 4.6: names and values in tags of their own, one a line.
GLM4_5 = CallFormat(
    name="glm4_5",
    marks=("<tool_call>", "<arg_key>", "<arg_value>"),
    writes=r"</arg_key>\n<arg_value>",
    trigger="<tool_call>",
    begin="<tool_call>",
    also=("\n<tool_call>",),
    led="\n",
    call=("", "\n", ""),
    between="</tool_call>\n<tool_call>",
    end="</tool_call>",
    tagged=TaggedValues("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"),
)
GLM4_7 = replace(  # in one line
    GLM4_5,
    name="glm4_7",
    writes="</arg_key><arg_value>",
    also=(),
    led="",
    call=("", "", ""),
    between="</tool_call><tool_call>",
    tagged=TaggedValues("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
)
# Mistral: a list of JSON objects after [TOOL_CALLS]; names, ids and arguments in templates of version 11, such as that
# of Mistral Small 3.2; later ones have no ids.
MISTRAL = CallFormat(
    name="mistral",
    marks=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    end="]",
    id_length=9,
    thought=("[THINK]", "[/THINK]"),
)
MISTRAL_ARGS = CallFormat(
    name="mistral-args",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS]",
    call=("", "[ARGS]", ""),
    between="[TOOL_CALLS]",
    id_length=9,
    thought=("[THINK]", "[/THINK]"),
)
MISTRAL_IDS = replace(MISTRAL_ARGS, name="mistral-ids", marks=(*MISTRAL_ARGS.marks, "[CALL_ID]"), id_mark="[CALL_ID]")
# Phi-4-mini: tools are a field of the system message, calls a list of JSON objects between two tags.
PHI4_MINI = CallFormat(
    name="phi4-mini",
    marks=("<|tool|>", "<|/tool|>", "message['tools']"),
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    end="]<|/tool_call|>",
    tools_as="message",
    functions_alone=True,
)
# Granite 3: a list of JSON objects after <|tool_call|>; the template leaves out earlier calls.
GRANITE = CallFormat(
    name="granite",
    marks=("<|start_of_role|>", "available_tools"),
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    end="]",
)
# Llama 3.1 and 3.2: a JSON object in place of an answer, or after the tag of Python; one call per answer.
LLAMA = CallFormat(
    name="llama",
    marks=("ipython", '"parameters": '),
    begin="",
    also=("<|python_tag|>",),
    call=('{"name": "', '", "parameters": ', "}"),
)
# Gemma 3: a JSON object in place of an answer, as Google's page on function calling describes it.
GEMMA3 = CallFormat(
    name="gemma3",
    marks=("<start_of_turn>", "first_user_prefix"),
    begin="",
    call=('{"name": "', '", "parameters": ', "}"),
    tools_as="text",
    functions_alone=True,
    description=(
        "You have access to functions. If you decide to invoke any of the function(s), you MUST put it in the format "
        'of\n{"name": function name, "parameters": dictionary of argument name and its value}\n\n'
        "You SHOULD NOT include any other text in the response if you call a function\n{tools}"
    ),
    results=("Result of the function: ", ""),
)
# Gemma 4: names as they stand and strings between marks, in values in values too.
GEMMA4 = CallFormat(
    name="gemma4",
    marks=("<|tool_call>call:", "<tool_call|>", '<|"|>'),
    trigger="<|tool_call>",
    begin="<|tool_call>",
    call=("call:", "{", "}"),
    between="<tool_call|><|tool_call>",
    end="<tool_call|>",
    thought=("<|channel>thought", "<channel|>"),
    quote='<|"|>',
)
# LFM2: a list of calls as Python writes them.
LFM2 = CallFormat(
    name="lfm2",
    marks=("<|tool_list_start|>",),
    trigger="<|tool_call_start|>",
    begin="<|tool_call_start|>[",
    call=("", "(", ")"),
    between=", ",
    end="]<|tool_call_end|>",
    keywords=True,
)
# gpt-oss: OpenAI's harmony format; one call per answer.
HARMONY = CallFormat(
    name="harmony",
    marks=("<|start|>", "<|channel|>", "<|message|>"),
    begin="",
    call=(" to=functions.", "<|channel|>commentary json<|message|>", "<|call|>"),
    channels=Channels(),
)

# The first that a template speaks in is its format; the last one takes all.
FORMATS = (
    HARMONY, DEEPSEEK, DEEPSEEK_V3_1, MISTRAL_IDS, MISTRAL_ARGS, MISTRAL, SMOLLM3, PHI4_MINI, SEED_OSS, QWEN3_CODER,
    GLM4_5, GLM4_7, EXAONE4, HERMES, GRANITE, LLAMA, GEMMA3, GEMMA4, LFM2, GENERIC,
)  # fmt: skip


def recognised(template: str) -> CallFormat:
    """Returns the format of a chat template's source."""
    return next(row for row in FORMATS if row.speaks_in(template))


def format_named(name: str) -> CallFormat:
    """Returns a format by its name. Raises RequestError."""
    for row in FORMATS:
        if row.name == name:
            return row
    names = ", ".join(row.name for row in FORMATS)
    raise RequestError(f"tool_format is {short_repr(name)}, but must be one of {names}")
