"""Fields that would change the answer if they were honoured, and are not: refused unless they say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_serve.errors import unsupported

# Field -> the values that ask for nothing. Of llama.cpp, vLLM and OpenAI's API.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "moderation": (),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "grammar": ("",),
    "ebnf": ("",),
    "regex": ("",),
}


def refuse(given: Mapping[str, Any]) -> None:
    """Raises ApiError naming the first field that is refused. given: the fields of a request that are not null."""
    for name, value in given.items():
        if name in NEUTRAL and not _is_one_of(value, NEUTRAL[name]):
            raise unsupported(name, "is not supported; leave it out")
    if "modalities" in given and given["modalities"] != ["text"]:
        raise unsupported("modalities", "may be ['text'] alone: this model writes text")
    choice = given.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "may be 'none' alone: tools are not called")
    if given.get("tools") and choice != "none":
        raise unsupported("tools", "are not called by this server; leave them out, or send tool_choice: 'none'")


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """Whether a value asks for nothing; false is not 0 here."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
