"""All formats, and which one a chat template speaks of."""

from __future__ import annotations

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.text.call_format import CallFormat
from eagle_runtime.text.calls_deepseek import DEEPSEEK
from eagle_runtime.text.calls_gemma3 import GEMMA3
from eagle_runtime.text.calls_generic import GENERIC
from eagle_runtime.text.calls_granite import GRANITE
from eagle_runtime.text.calls_hermes import HERMES
from eagle_runtime.text.calls_llama import LLAMA
from eagle_runtime.text.calls_mistral import MISTRAL, MISTRAL_ARGS
from eagle_runtime.text.calls_phi4_mini import PHI4_MINI
from eagle_runtime.text.calls_smollm3 import SMOLLM3

# The first whose marks a template holds is its format; the last one has none.
FORMATS = (
    DEEPSEEK, MISTRAL_ARGS, MISTRAL, SMOLLM3, PHI4_MINI, HERMES, GRANITE, LLAMA, GEMMA3, GENERIC,
)  # fmt: skip


def recognised(template: str) -> CallFormat:
    """Returns the format of a chat template's source."""
    return next(row for row in FORMATS if all(mark in template for mark in row.marks))


def format_named(name: str) -> CallFormat:
    """Returns a format by its name. Raises RequestError."""
    for row in FORMATS:
        if row.name == name:
            return row
    names = ", ".join(row.name for row in FORMATS)
    raise RequestError(f"tool_format is {short_repr(name)}, but must be one of {names}")
