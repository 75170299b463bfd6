"""DeepSeek V3 and R1: a block of JSON for each call; the template describes no tools, and leaves calls open."""

from eagle_runtime.text.call_format import CallFormat

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
