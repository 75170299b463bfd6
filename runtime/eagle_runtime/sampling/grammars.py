"""Compiling constraints for a model: once each, within limits. The only file that imports llguidance.

llguidance limits its own work by counts, but a few inputs go past them: intersections of patterns take exponential time
before a limit is asked, and chains of thousands of rules overflow the stack. So a grammar is compiled in a thread with
a large stack and a deadline, and one of the kinds that were seen to go wrong is first tried in a process of its own,
which can be stopped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import ConstraintError
from eagle_runtime.sampling.call_grammar import grammar_of_arguments
from eagle_runtime.sampling.constraint import CONTENT, Constraint
from eagle_runtime.sampling.grammar_matcher import Matcher, one_line
from eagle_runtime.sampling.schemas import SPACING, STRICT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SECONDS = 2.0  # that compiling may take; chosen, as what somebody waits for
MOST_DIGITS = 5  # but for zeros before them, of numbers whose multiples together take less
START = 10.0  # seconds that another Python may take to start; chosen, for a busy machine
STACK = 64 * 2**20  # bytes; rules that name each other in a chain of 64 KiB take about half
MEMORY = 2**30  # bytes of address space of the process that tries a grammar; chosen
CACHED = 16  # grammars per model; one of 64 KiB takes up to 40 MB
# Of llguidance.LLParserLimits, beyond its defaults. A state of the lexer takes 1 to 2 KiB.
LIMITS: dict[str, Any] = {"max_lexer_states": 50_000, "verbose_errors": False}

_CHILD = """
import json, sys, threading
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({memory}, {memory}))
except (ImportError, ValueError, OSError):
    pass
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
grammar, limits = json.load(sys.stdin)
print(".", flush=True)
def compile_it():
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LLParserLimits(**limits))
    matcher.compute_bitmask()
    print(matcher.get_error())
threading.stack_size({stack})
threading.Thread(target=compile_it).start()
"""


class Grammars:
    """The grammars of one model."""

    def __init__(self, tokenizer_json: Callable[[], str | None], vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_json: gives the content of a tokenizer.json, None without one; called when first needed."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos = [token for token in eos_token_ids if token < vocab_size]
        self._lock = threading.Lock()  # of what is compiled; held for a moment
        self._compiling = threading.Lock()  # one at a time
        self._unknown: int | None = None
        self._compiled: OrderedDict[Constraint, LLMatcher] = OrderedDict()
        self._overrun: threading.Thread | None = None  # one that missed its deadline

    def matcher(self, constraint: Constraint, ends: frozenset[int] = frozenset()) -> Matcher:
        """Returns a matcher at the beginning of an output. ends: as in Matcher. Raises ConstraintError for a constraint
        that is wrong, that asks for too much, or that this model's tokenizer cannot follow."""
        if not isinstance(constraint, Constraint):
            raise ConstraintError(f"constraint is {short_repr(constraint)}, but must be a Constraint")
        matcher = self._known(constraint)
        if matcher is None:
            with self._compiling:
                matcher = self._known(constraint)  # another thread may have been first
                if matcher is None:
                    compiled = self._compile(constraint)
                    with self._lock:
                        self._compiled[constraint] = compiled
                        while len(self._compiled) > CACHED:
                            self._compiled.popitem(last=False)
                    matcher = compiled.deep_copy()
        return Matcher(matcher, self._vocab_size, ends, self._unknown)

    def _known(self, constraint: Constraint) -> LLMatcher | None:
        """A copy of a grammar that is compiled, which becomes the newest."""
        with self._lock:
            if constraint not in self._compiled:
                return None
            self._compiled.move_to_end(constraint)
            return self._compiled[constraint].deep_copy()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise ConstraintError("constraints need llguidance; pip install 'eagle-edge[grammar]'") from None
        tokenizer = self._tokenizer
        if self._overrun is not None and self._overrun.is_alive():
            raise ConstraintError("an earlier constraint that took too long is still being compiled; try again later")
        grammar, seconds = _grammar(constraint), SECONDS
        if _may_take_long(constraint):
            _try_elsewhere(grammar)  # an error shows again below
            seconds /= 2  # which is what the trial took at most
        done: list[LLMatcher] = []
        wrong: list[ConstraintError] = []

        def compiled(grammar: str) -> LLMatcher:
            matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
            matcher.compute_bitmask()  # some errors show here
            return matcher

        def compile_it() -> None:
            matcher = compiled(grammar)
            if matcher.is_error():
                wrong.append(_wrong_tool(constraint, compiled) or _refused(matcher.get_error()))
            done.append(matcher)

        thread = _start(compile_it)
        thread.join(seconds)
        if not done:
            self._overrun = thread
            raise _too_long()
        if wrong:
            raise wrong[0]
        return done[0]

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        content = self._tokenizer_json()
        if content is None:
            raise ConstraintError("the bundle has no tokenizer.json, which constraints need; export it with one")
        if not self._eos:
            raise ConstraintError("the bundle names no end-of-sequence token, which constraints need")
        try:
            data = json.loads(content)
            self._unknown, tokens = _unknown_token(data), _count_tokens(data)
            # A tokenizer may have more tokens than the model has rows: masks are cut to the rows (Matcher).
            rows = max(self._vocab_size, tokens)
            return LLTokenizer(json.dumps(_verbatim(data)), n_vocab=rows, eos_token=self._eos)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConstraintError(f"llguidance cannot read this model's tokenizer ({one_line(str(error))})") from None


def _grammar(constraint: Constraint) -> str:
    """The constraint as llguidance takes it, with the grammar around it if there is one."""
    from llguidance import LLMatcher

    in_lark = constraint.kind in ("lark", "calls")
    try:
        if constraint.kind == "regex":
            source = LLMatcher.grammar_from_regex(constraint.source)
        elif in_lark:
            source = LLMatcher.grammar_from_lark(constraint.source)
        else:
            source = LLMatcher.grammar_from_json_schema(constraint.source, defaults=SPACING, overrides=STRICT)
    except ValueError as error:
        raise _refused(str(error)) from None
    if constraint.within is None:
        return source
    own = {"lark_grammar": source} if in_lark else json.loads(source)["grammars"][0]
    return json.dumps({"grammars": [{"name": "answer", "lark_grammar": constraint.within}, {**own, "name": CONTENT}]})


def _unknown_token(tokenizer: dict[str, Any]) -> int | None:
    """The id that stands for text that a tokenizer lacks. llguidance forces it where a grammar asks for such text."""
    model = tokenizer["model"]
    if "unk_id" in model:
        unknown: int | None = model["unk_id"]
        return unknown
    ids: dict[str, int] = model["vocab"]
    return ids.get(model.get("unk_token"))


def _verbatim(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer without what changes a text, as NFC does, or a space put before it: the text of a grammar has to come
    as it stands there. Spaces are still written as another letter."""
    steps, before = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    kept = [step for step in steps.get("normalizers", [steps]) if step.get("pattern") == {"String": " "}]
    splits = [
        {**split, "add_prefix_space": False} if split.get("type") == "ByteLevel" else split
        for split in before.get("pretokenizers", [before])
    ]
    return {
        **tokenizer,
        "normalizer": {"type": "Sequence", "normalizers": kept} if kept else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits} if before else None,
    }


def _count_tokens(tokenizer: dict[str, Any]) -> int:
    """One more than the highest id."""
    vocab = tokenizer["model"]["vocab"]  # id of each token, or in a list at its id
    ids = list(vocab.values()) if isinstance(vocab, dict) else [len(vocab) - 1]
    return 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens") or ())], default=-1)


def _may_take_long(constraint: Constraint) -> bool:
    """Whether patterns may be intersected: several of a schema, or those of a grammar that says so; or multiples of a
    number are one of many states."""
    source = constraint.source
    if constraint.kind in ("json_schema", "calls"):
        source += constraint.within or ""  # which may have tools' schemas
        single = '"patternProperties"' in source or "\nPATTERN" in source  # the latter as tagged_grammar.py writes them
        multiples = "".join(number.lstrip("0.") for number in re.findall(r'"multipleOf":\s*([^\s,}]*)', source))
        return single or len(multiples) > MOST_DIGITS or source.count('"pattern"') + source.count('"format"') > 3
    return constraint.kind == "lark" and any(sign in source for sign in ("&", "~", "%"))


def _try_elsewhere(grammar: str) -> None:
    """Compile a grammar in a process that is stopped after half of SECONDS. Raises ConstraintError. Does nothing where
    this process is not plain Python that could start another one, as in a frozen application."""
    if getattr(sys, "frozen", False) or not Path(sys.executable or "").stem.lower().startswith("python"):
        return
    command = [sys.executable, "-I", "-c", _CHILD.format(memory=MEMORY, stack=STACK)]
    hidden = getattr(subprocess, "CREATE_NO_WINDOW", 0)  # on Windows
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, encoding="utf-8", creationflags=hidden
        )
    except OSError:
        return
    with child:
        assert child.stdin is not None and child.stdout is not None
        started = ""
        with _stopped_after(START, child), contextlib.suppress(BrokenPipeError):
            json.dump([grammar, LIMITS], child.stdin)
            child.stdin.close()
            started = child.stdout.readline()
        if not started:  # it cannot even import llguidance
            return
        with _stopped_after(SECONDS / 2, child) as stopped:
            child.stdout.read()
            child.wait()
    if stopped.is_set():
        raise _too_long()
    if child.returncode != 0:
        raise ConstraintError("the constraint takes more memory than is allowed to compile; make it simpler")


@contextlib.contextmanager
def _stopped_after(seconds: float, child: subprocess.Popen[str]) -> Iterator[threading.Event]:
    """A process that is still running after so long within the block is stopped; the event says so."""
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        child.kill()

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        yield stopped
    finally:
        timer.cancel()


def _start(function: Callable[[], None]) -> threading.Thread:
    """Start a thread with a stack of STACK bytes, which does not keep the process from ending."""
    before = threading.stack_size(STACK)
    try:
        thread = threading.Thread(target=function, daemon=True, name="eagle-constraint")
        thread.start()
    finally:
        threading.stack_size(before)
    return thread


def _wrong_tool(constraint: Constraint, compiled: Callable[[str], LLMatcher]) -> ConstraintError | None:
    """The error of the first tool whose arguments have no grammar; None where each has one."""
    from llguidance import LLMatcher

    source = constraint.source if constraint.kind == "calls" else constraint.within or ""
    for number, name in enumerate(constraint.tools):
        matcher = compiled(LLMatcher.grammar_from_lark(grammar_of_arguments(source, number)))
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            return ConstraintError(f"the parameters of tool {name!r} cannot be followed ({reason}); correct them")
    return None


def _too_long() -> ConstraintError:
    return ConstraintError("the constraint takes too long to compile; make it simpler")


def _refused(message: str) -> ConstraintError:
    return ConstraintError(f"the constraint cannot be compiled ({_reason(message)}); correct it")


def _reason(message: str) -> str:
    """What llguidance says, without its place in a grammar that nobody wrote."""
    text = re.sub(r"^at \d+\(\d+\): |failed to compile JSON schema:? ?", "", one_line(message))
    keywords = re.fullmatch(r"Unimplemented keys: \[(.*)\]", text)
    if keywords is None:
        return text
    names = sorted(keywords[1].replace('"', "").split(", "))
    return f"its keyword{'s' * (len(names) > 1)} {', '.join(names)} {'have' if names[1:] else 'has'} no grammar"
