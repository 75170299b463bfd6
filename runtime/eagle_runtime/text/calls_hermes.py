"""Hermes 2 and 3, Qwen2.5, Qwen3, Granite 4: JSON within <tool_call>."""

from eagle_runtime.text.call_format import CallFormat

HERMES = CallFormat(
    name="hermes",
    marks=("<tool_call>", "tool_calls"),
    trigger="<tool_call>",
    begin="<tool_call>\n",
    call=('{"name": "', '", "arguments": ', "}"),
    between="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
