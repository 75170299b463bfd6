"""The grammar of an answer that is messages with heads (text/channels.py).

Reasoning is free text in a channel of its own, as often as the model wants. The answer then is text in the final
channel, which may follow a constraint, or a call. Forms of a head that models write and templates do not are allowed
too. Texts hold no special token.
"""

from __future__ import annotations

from collections.abc import Mapping

from eagle_runtime.sampling.call_grammar import Literals, argument_rules, lark_of
from eagle_runtime.sampling.constraint import CONTENT
from eagle_runtime.text.answer_form import AnswerForm

TYPES = ("json", "code")  # of arguments, as heads name them; they are JSON in both


def channel_grammar(form: AnswerForm, specials: Mapping[str, int], *, content: bool) -> str:
    """Returns the grammar of an answer in Lark. form: of a format with channels. specials: the markers that are special
    tokens. content: whether the text of the final channel follows the grammar CONTENT, and is free text otherwise."""
    use, channels, lit = form.use, form.format.channels, Literals(specials)
    assert channels is not None
    rules = {"TEXT": r"/(.|\n)*/"}
    rules["said" if channels.end in specials else "said[lazy]"] = f"TEXT {lit(channels.end)}"
    for name, channel in (("thought", channels.reasoning), ("aside", channels.aside)):
        head, next_head = lit(channels.channel + channel + channels.message), lit(channels.start + channels.role)
        rules[name] = f"{head} said {next_head}"
    types = " | ".join(map(lit, TYPES))
    rules["type"] = f'(" " | " "? {lit(channels.constrain)}) ({types})'
    json_type = f'" "? {lit(channels.constrain)} {lit(TYPES[0])}'
    rules["final"] = f"({lit(channels.channel + channels.final)} ({json_type})?)? {lit(channels.message)}"
    body = []
    if use is None or not use.required:
        body = [f"final @{CONTENT}" if content else "final TEXT"]
    for number, tool in enumerate(use.callable if use is not None else ()):
        rules |= argument_rules(f"args{number}", tool, form, lit)
        rules[f"to{number}"] = lit(f" to={channels.prefix}{tool.name}")
        before = f"to{number} {lit(channels.channel + channels.aside)} type?"
        after = f"{lit(channels.channel)} ({lit(channels.aside)} | {lit(channels.reasoning)}) to{number} type?"
        ends = lit(form.format.call[2])
        rules[f"call{number}"] = f"({before} | {after}) {lit(channels.message)} args{number} {ends}"
        body.append(f"call{number}")
    asides = "thought" if content else "(thought | aside)"  # content that follows a grammar is nothing else
    rules["start"] = f"{asides}* ({' | '.join(body)})"
    return lark_of(rules)
