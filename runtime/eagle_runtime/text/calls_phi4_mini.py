"""Phi-4-mini: tools are a field of the system message, calls a list of JSON objects between two tags."""

from eagle_runtime.text.call_format import CallFormat

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
