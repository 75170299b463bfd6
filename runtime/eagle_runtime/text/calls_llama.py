"""Llama 3.1 and 3.2: a JSON object in place of an answer, or after the tag of Python; one call per answer."""

from eagle_runtime.text.call_format import CallFormat

LLAMA = CallFormat(
    name="llama",
    marks=("ipython", '"parameters": '),
    begin="",
    also=("<|python_tag|>",),
    call=('{"name": "', '", "parameters": ', "}"),
)
