"""Gemma 3: a JSON object in place of an answer, as Google's page on function calling describes it."""

from eagle_runtime.text.call_format import CallFormat

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
