"""Granite 3: a list of JSON objects after <|tool_call|>; the template leaves out earlier calls."""

from eagle_runtime.text.call_format import CallFormat

GRANITE = CallFormat(
    name="granite",
    marks=("<|start_of_role|>", "available_tools"),
    trigger="<|tool_call|>",
    begin="<|tool_call|>[",
    call=('{"name": "', '", "arguments": ', "}"),
    between=", ",
    end="]",
)
