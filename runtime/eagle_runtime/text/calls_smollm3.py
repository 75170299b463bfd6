"""SmolLM3: the form of Hermes; its template has a variable of its own for such tools, and leaves out earlier calls."""

from dataclasses import replace

from eagle_runtime.text.calls_hermes import HERMES

SMOLLM3 = replace(
    HERMES, name="smollm3", marks=("xml_tools", "python_tools"), tools_as="xml_tools", functions_alone=True
)
