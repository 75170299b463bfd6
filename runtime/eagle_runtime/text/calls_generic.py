"""Templates that know no tools: the form of Hermes, described in the system message."""

from dataclasses import replace

from eagle_runtime.text.calls_hermes import HERMES

GENERIC = replace(
    HERMES,
    name="generic",
    marks=(),
    tools_as="text",
    description=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\nFor each function call, "
        "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
    results=("<tool_response>\n", "\n</tool_response>"),
)
