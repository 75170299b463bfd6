"""Tries on a bundle of a published model what the tests try on the small pair, and prints a line for each step.

    python -m eagle_tools.tried BUNDLE [--draft BUNDLE] [--only STEP,STEP]

BUNDLE is a target alone, as eagle-export writes it; --draft a second one of the same vocabulary. The steps:

identity      every method without a head, and with a datastore, habits and a draft bundle, against vanilla, T = 0 and 1
conversation  turns, a fork, an edit, a file: rows that are read, and answers against vanilla on the whole text
constraints   JSON schema, regular expression, grammar, choice: answers are valid, and those of constrained vanilla
template      system prompts, tools and their results in the bundle's chat template, as far as it knows them
long          a prompt that fills the context but for its answer, and one that is longer
worker        eagle-run --worker: the same answers, a conversation's file, cancelling, an error

In int8 and int4 drafted tokens equal vanilla's to the bit. In fp32 the rounding of a pass depends on its rows, so that
an answer may go the other way where two scores are closer than that: such ties are counted apart.

A server is tried under load by `python -m studies.trials.soak BUNDLE`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_runtime import Constraint, ContextError, EagleModel, Result, TemplateError
from eagle_runtime.base.errors import RequestError
from eagle_runtime.commands.command import Listed, Parser, run_command
from eagle_runtime.drafting.methods import ALONE
from eagle_tools.questions import prompt_ids
from eagle_tools.ties import is_quantised, is_tie
from eagle_tools.tried_worker import worker

TARGET_ALONE = tuple(name for name in ALONE if name != "vanilla")
QUESTIONS = (
    "Write a short poem about the sea.",
    "def fibonacci(n):\n    Complete this Python function, then explain it.",
    "Repeat this list and add two items: apples, pears, plums, apples, pears, plums.",
)
SYSTEM = {"role": "system", "content": "You are a clerk. Answer in one short sentence."}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["cat", "dog", "parrot"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 40},
        "colours": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "colours"],
    "additionalProperties": False,
}
LARK = 'start: city ": " NUMBER " degrees"\ncity: "Paris" | "Oslo" | "Rome"\nNUMBER: /-?[0-9]{1,2}/\n'
DATE = r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]"
Lines = Iterator[str]


class DiffersError(Exception):
    """An answer that is not what it must be."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, 1 if anything differs, 2 for wrong input."""
    return run_command(_parser(), argv, run, extra="grammar", interrupted="interrupted")


def run(args: argparse.Namespace) -> None:
    """Tries the steps in turn. Raises RequestError at the end if one of them failed."""
    failed = []
    for name in args.only or STEPS:
        started = time.perf_counter()
        try:
            for line in STEPS[name](args):
                print(f"{name:13} {line}", flush=True)
        except (DiffersError, RequestError) as error:
            failed.append(name)
            print(f"{name:13} FAILED: {error}", flush=True)
        print(f"{name:13} {time.perf_counter() - started:.0f} s", flush=True)
    if failed:
        raise RequestError(f"failed: {', '.join(failed)}")


def loaded(args: argparse.Namespace, **options: Any) -> EagleModel:
    """The bundle, with the context and threads that were asked for."""
    return EagleModel.load(
        args.bundle, check_hashes="once", **{"context": args.context, "threads": args.threads, **options}
    )


def settings_of(args: argparse.Namespace, temperature: float = 0.0, seed: int = 0) -> dict[str, Any]:
    """The settings of two answers that are to be equal. The model's own temperature and a drawn seed would not do."""
    return {"max_new_tokens": args.tokens, "temperature": temperature, "seed": seed}


def compare(model: EagleModel, prompt: list[int], wanted: Result, got: Result, temperature: float = 0.0) -> bool:
    """Returns whether two answers are equal, and False where they part at a tie of fp32. Raises DiffersError."""
    ours, theirs = got.token_ids, wanted.token_ids
    if ours == theirs:
        return True
    seed = wanted.usage.seed
    if not is_quantised(model.manifest) and is_tie(model, prompt, theirs, ours, temperature=temperature, seed=seed):
        return False
    raise DiffersError(f"{got.usage.method}, T = {temperature:g}: {ours} instead of {theirs}")


def identity(args: argparse.Namespace) -> Lines:
    """Every method against vanilla."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.txt"
        notes.write_text("\n\n".join([__doc__ or "", *QUESTIONS]), encoding="utf-8")
        habits = Path(folder) / "habits.bin"
        kinds: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
            ("", {}, TARGET_ALONE),
            ("with a datastore", {"datastore": notes}, ("lookup",)),
            ("with habits", {"habits": habits}, ("recycling",)),
            ("with the habits of before", {"habits": habits}, ("recycling",)),
        ]
        if args.draft is not None:
            kinds.append(("", {"draft_bundle": args.draft}, ("draft-model",)))
        for what, options, methods in kinds:
            with loaded(args, **options) as model:
                for method in methods:
                    yield f"{method} {what}".strip() + f": {_identical(args, model, method)}"


def _identical(args: argparse.Namespace, model: EagleModel, method: str) -> str:
    equal = ties = tokens = passes = 0
    for question in QUESTIONS:
        prompt = prompt_ids(model, question)
        for temperature, seed in ((0.0, 0), (1.0, 11)):
            settings = settings_of(args, temperature, seed)
            wanted = model.generate(prompt, method="vanilla", **settings)
            got = model.generate(prompt, method=method, **settings)
            if compare(model, prompt, wanted, got, temperature):
                equal += 1
            else:
                ties += 1
            tokens, passes = tokens + len(got.token_ids) - 1, passes + got.usage.target_passes
    return f"{equal} answers equal, {ties} ties, {tokens / max(1, passes):.2f} tokens per pass"


def conversation(args: argparse.Namespace) -> Lines:
    """Turns that reuse rows, against a fresh reading without drafts."""
    with loaded(args) as model, tempfile.TemporaryDirectory() as folder:
        if not model.text.chat:
            yield "the bundle has no chat template"
            return
        chat = model.conversation()
        said = ("My name is Ada. What is yours?", "What is my name?", "Write it three times.", "And backwards?")
        for number, message in enumerate(said):
            settings = settings_of(args, number % 2, number)
            result = _answer(chat.send(message, **settings))
            _as_fresh(model, result, chat.messages[:-1], settings)
            usage = result.usage
            yield f"turn {number + 1}: {usage.cached_tokens} rows kept, {usage.prefilled_tokens} read"
            if number and usage.cached_tokens == 0:
                raise DiffersError("nothing was kept of the turns before")
        file = Path(folder) / "chat.safetensors"
        size = chat.save(file)
        other = model.load_conversation(file)
        if other.messages != chat.messages or other.kv_status != "resident":
            raise DiffersError(f"the loaded conversation: {other.kv_status}")
        both = [_answer(one.send("Thank you.", **settings_of(args))) for one in (chat, other)]
        if both[0].token_ids != both[1].token_ids or both[1].usage.cached_tokens == 0:
            raise DiffersError("the loaded conversation goes on otherwise")
        yield f"file of {size / 1e6:.1f} MB: loaded, the next turn is equal and read {both[1].usage.prefilled_tokens}"
        fork = chat.fork()
        fork.edit(0, "My name is Grace. What is yours?")
        fork.rollback(to=1)
        result = _answer(fork.regenerate(**settings_of(args)))
        _as_fresh(model, result, fork.messages[:-1], settings_of(args))
        yield "fork, edit, rollback, regenerate: as a fresh reading"
        memory = model.memory()
        yield f"{memory.conversations} conversations: {memory.kv_reserved / 1e6:.0f} MB of keys and values"


def _answer(turn: Any) -> Result:
    """The result of a turn."""
    with turn:
        for _ in turn:
            pass
    result: Result = turn.result
    return result


def _as_fresh(model: EagleModel, result: Result, messages: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    prompt = model.text.encode(messages)
    wanted = model.generate(prompt, method="vanilla", **settings)
    compare(model, prompt, wanted, result, settings["temperature"])


def constraints(args: argparse.Namespace) -> Lines:
    """Four kinds of constraints, at T = 0 and 1."""

    def is_pet(text: str) -> bool:
        pet = json.loads(text)
        return set(pet) == set(SCHEMA["required"]) and pet["kind"] in ("cat", "dog", "parrot") and 0 <= pet["age"] <= 40

    def is_object(text: str) -> bool:
        return isinstance(json.loads(text), dict)

    asked: list[tuple[str, Constraint, str, Callable[[str], object]]] = [
        ("JSON schema", Constraint.json_schema(SCHEMA), "Describe a pet as JSON.", is_pet),
        ("JSON object", Constraint.json_object(), "Answer in JSON: the capital of France.", is_object),
        ("regex", Constraint.regex(DATE), "When did the war end? Give a date.", lambda text: re.fullmatch(DATE, text)),
        ("Lark", Constraint.lark(LARK), "How warm is it in Rome?", lambda text: text.endswith(" degrees")),
        ("choice", Constraint.choice(["yes", "no"]), "Is water wet?", lambda text: text in ("yes", "no")),
    ]
    with loaded(args) as model:
        for name, constraint, question, valid in asked:
            prompt = prompt_ids(model, question)
            ends, forced, passes, tokens = [], 0, 0, 0
            for temperature, seed in ((0.0, 0), (1.0, 3), (1.0, 4)):
                settings: dict[str, Any] = {"constraint": constraint, "temperature": temperature, "seed": seed}
                settings["max_new_tokens"] = 120
                wanted = model.generate(prompt, method="vanilla", **settings)
                for method in ("lookup", "recycling"):
                    got = model.generate(prompt, method=method, **settings)
                    compare(model, prompt, wanted, got, temperature)
                    forced, passes = forced + got.usage.forced_tokens, passes + got.usage.target_passes
                    tokens += len(got.token_ids) - 1
                ends.append(wanted.stop.kind)
                if wanted.stop.kind in ("constraint_end", "eos") and not valid(wanted.text or ""):
                    raise DiffersError(f"{name}: {wanted.text!r} is not valid")
            yield f"{name}: {', '.join(ends)}; {tokens} tokens in {passes} passes, {forced} forced; {wanted.text!r:.60}"


def template(args: argparse.Namespace) -> Lines:
    """What the chat template makes of system prompts, tools and their results."""
    with loaded(args) as model:
        if not model.text.chat:
            yield "the bundle has no chat template"
            return
        user = {"role": "user", "content": "What is the weather in Rome?"}
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
        result = {"role": "tool", "name": "weather", "content": "22 degrees"}
        chats: list[tuple[str, list[dict[str, Any]], list[dict[str, Any]] | None]] = [
            ("without a system prompt", [user], None),
            ("a system prompt", [SYSTEM, user], None),
            ("tools", [user], [TOOL]),
            ("a tool's result", [user, {"role": "assistant", "content": "", "tool_calls": [call]}, result], [TOOL]),
        ]
        plain = model.text.render([user])
        for name, messages, tools in chats:
            try:
                rendered = model.text.render(messages, tools=tools)
            except TemplateError as error:
                yield f"{name}: refused ({error})"
                continue
            known = "known" if "weather" in rendered.replace(user["content"], "") else "not known"
            what = f", tools are {known}" if tools else ", the same prompt" if rendered == plain else ""
            ids = model.text.encode_rendered(rendered)
            wanted, got = (model.generate(ids, method=method, **settings_of(args)) for method in ("vanilla", None))
            compare(model, ids, wanted, got)
            yield f"{name}: {len(ids)} tokens{what}; {got.text!r:.70}"


def long(args: argparse.Namespace) -> Lines:
    """A prompt of as many tokens as fit, with a sentence in it that is asked for at its end."""
    with loaded(args) as model:
        room = model.context - 40
        line = prompt_ids(model, "x")
        filler = model.text.encode_rendered("The clerk counted the boxes again, and wrote the number in the book. ")
        secret = model.text.encode_rendered("The password is tangerine. ")
        question = prompt_ids(model, "What is the password? The password is")
        ids = (filler * (room // len(filler) + 1))[: room - len(secret) - len(question)]
        ids = [*ids[: len(ids) // 2], *secret, *ids[len(ids) // 2 :], *question]
        started = time.perf_counter()
        wanted = model.generate(ids, method="vanilla", temperature=0, max_new_tokens=24)
        seconds = time.perf_counter() - started
        yield f"{len(ids)} of {model.context} tokens: first token after {wanted.usage.prefill_s:.1f} of {seconds:.1f} s"
        yield f"keys and values: {model.memory().kv_used / 1e6:.0f} MB; answer {wanted.text!r:.70}"
        for method in TARGET_ALONE:
            got = model.generate(ids, method=method, temperature=0, max_new_tokens=24)
            tie = "" if compare(model, ids, wanted, got) else " but for a tie"
            yield f"{method}: equal{tie}, {got.usage.tau:.2f} tokens per pass"
        full = model.generate(ids, method="lookup", max_new_tokens=500, ignore_eos=True)
        if full.stop.kind != "context_full" or len(ids) + len(full.token_ids) != model.context:
            raise DiffersError(f"the context ends as {full.stop.kind} at {len(ids) + len(full.token_ids)}")
        try:
            model.generate(ids + line * 50)
        except ContextError as error:
            yield f"a longer one is refused: {error}"
        else:
            raise DiffersError("a prompt longer than the context was taken")


STEPS: dict[str, Callable[[argparse.Namespace], Lines]] = {
    "identity": identity,
    "conversation": conversation,
    "constraints": constraints,
    "template": template,
    "long": long,
    "worker": lambda args: worker(args, loaded),
}


def _parser() -> Parser:
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = Parser(
        prog="eagle_tools.tried",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a target alone")
    parser.add_argument("--draft", type=Path, metavar="BUNDLE", help="drafts for it with method draft-model")
    parser.add_argument("--only", action=Listed, among=list(STEPS), metavar="A,B", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--context", type=int, metavar="N", help="tokens (default: the model's, at most 4096)")
    parser.add_argument("--threads", type=int, metavar="N", help="of a forward pass (default: physical cores)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of an answer (default 32)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
