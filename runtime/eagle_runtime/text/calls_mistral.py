"""Mistral: a list of JSON objects after [TOOL_CALLS], or in templates of version 11 and later names and arguments."""

from eagle_runtime.text.call_format import CallFormat

MISTRAL = CallFormat(
    name="mistral",
    marks=("[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS][",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    end="]",
    id_length=9,
)
MISTRAL_ARGS = CallFormat(
    name="mistral-args",
    marks=("[TOOL_CALLS]", "[ARGS]"),
    trigger="[TOOL_CALLS]",
    begin="[TOOL_CALLS]",
    call=("", "[ARGS]", ""),
    between="[TOOL_CALLS]",
    id_length=9,
)
