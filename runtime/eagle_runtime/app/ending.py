"""What a caller says of the end of an answer, checked: lengths, stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle_runtime.app.output import End
from eagle_runtime.app.settings import Settings
from eagle_runtime.base.arguments import checked_ids, checked_int, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.text.tokenizer import Text

MOST_NEW_TOKENS = 256  # where a caller names no number
# Stop strings of a request, and characters of one; OpenAI's API takes four strings.
MOST_STRINGS, LONGEST_STRING = 16, 256


def end_of(settings: Settings, room: int, eos_token_ids: Iterable[int], text: Text) -> End:
    """Returns what ends an answer. room: tokens that the context holds of it; eos_token_ids: the model's. Raises
    RequestError."""
    limit = checked_int("max_new_tokens", settings.get("max_new_tokens", MOST_NEW_TOKENS), 1)
    least = checked_int("min_new_tokens", settings.get("min_new_tokens", 0), 0, limit)
    strings, special = _stop_strings(settings.get("stop", ()), text)
    eos = frozenset(() if settings.get("ignore_eos") else eos_token_ids)
    stop_ids = frozenset({*checked_ids("stop_token_ids", settings.get("stop_token_ids", ())), *special})
    return End(min(limit, room), "max_new_tokens" if limit <= room else "context_full", eos, stop_ids, strings, least)


def _stop_strings(stop: str | Sequence[str], text: Text) -> tuple[tuple[str, ...], list[int]]:
    """Returns the stop strings, and the ids of those that are special tokens, which no text shows. Raises
    RequestError."""
    given = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Sequence) else None
    if given is None or not all(isinstance(string, str) for string in given):
        raise RequestError(f"stop is {short_repr(stop)}, but must be a string or a list of strings")
    if len(given) > MOST_STRINGS:
        raise RequestError(f"stop has {len(given)} strings, but at most {MOST_STRINGS} can be looked for")
    for string in given:
        if not 1 <= len(string) <= LONGEST_STRING:
            raise RequestError(
                f"the stop string {short_repr(string)} has {len(string)} characters, but must have 1 to "
                f"{LONGEST_STRING}"
            )
    if given and not text.available:
        raise RequestError("stop takes strings, but the bundle has no tokenizer; use stop_token_ids")
    special = {string: text.special_id(string) for string in given}
    strings = tuple(dict.fromkeys(string for string in given if special[string] is None))
    return strings, [token for token in special.values() if token is not None]
