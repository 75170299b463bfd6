"""EagleModel: a bundle, loaded and ready to decode. What applications use."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
import typing
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from eagle_runtime.boundary import shown, token_ids, whole
from eagle_runtime.bundle.manifest import TreeKind
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.cost_aware import CostAwareDrafter, Rehearsal
from eagle_runtime.drafting.costs.tables import Costs, measure
from eagle_runtime.drafting.coupling import Coupling, Greedy, Trust
from eagle_runtime.drafting.drafter import (
    Drafter,
    DynamicTree,
    EagleDrafter,
    NoDraft,
    StaticTree,
    TreeShape,
    chain,
    check_children,
)
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.errors import ClosedError, RequestError
from eagle_runtime.generate import Cycle, generate
from eagle_runtime.loading import OpenBundle, open_bundle
from eagle_runtime.model import Features, Head
from eagle_runtime.result import Ending, Piece, Result, Stream, stats_of
from eagle_runtime.sampling import Sampler, SamplingParams
from eagle_runtime.session.protocol import Session
from eagle_runtime.text.tokenizer import Message
from eagle_runtime.threads.turns import Claim, Turns
from eagle_runtime.tree import EAGLE1_CHOICES, Float

Prompt = str | Sequence[int] | Sequence[Message]
Method = Literal["eagle", "eagle+lookup", "lookup", "vanilla"]


class EagleModel:
    """A bundle in memory: target, head if it has one, their caches, tokenizer.

    Any thread may call any method. A model decodes one text at a time: calls of `generate` from several threads wait
    for each other, in order of arrival. A stream has the model from its first piece until it ends, is closed or
    dropped; meanwhile other threads get a BusyError, since it may never end, and in its own thread (the one that asked
    for a piece last) a newer generation ends it: asked for more, it raises RequestError. `score` is such a stream.
    Twins decode side by side, step by step in order of arrival. No caller's code, on_cycle included, runs within a
    step.

    `close` waits for the running step; whatever comes afterwards raises ClosedError, on twins too, and so does every
    call in a process that was forked after the model was loaded."""

    def __init__(self, bundle: OpenBundle) -> None:
        """Use `EagleModel.load`."""
        self.manifest = bundle.manifest
        self.context = bundle.context
        self.backend = bundle.backend
        self.threads = bundle.threads
        self.passed_over = bundle.passed_over
        self.row_check = bundle.row_check
        self.notice = bundle.notice
        self.text = bundle.text
        self._bundle = bundle
        self._engines = bundle.engines
        self._engines.users.add(self)
        self._target = bundle.target
        self._head = bundle.head
        self._costs = bundle.costs
        self._acceptance = bundle.acceptance
        self._turns = Turns(self._engines)

    @classmethod
    def load(
        cls,
        bundle: str | Path,
        *,
        backend: str = "auto",
        context: int | None = None,
        threads: int | None = None,
        check_hashes: bool = True,
    ) -> EagleModel:
        """Load a bundle folder.

        backend: one of backends.BACKENDS, or "auto" for the first of them that this bundle was made for and this
        machine can run; `model.backend` says which it is, `model.passed_over` why none of those before it, and
        `model.notice`, which is logged too, that it runs engine files of the bundle. context:
        tokens of prompt and output together that buffers are made for; None takes the model's own, at most 4096.
        threads: of one pass on the CPU; None takes the physical cores. check_hashes: read every file once to compare
        its SHA-256 (about a second per gigabyte). On the CPU a quantised target's rows are checked once per machine
        (exact_rows; some 170 rows): `model.row_check`. Raises BundleError, BackendError, RequestError; gives a
        FidelityWarning for a bundle that follows its source less closely than its precision should."""
        return cls(open_bundle(Path(bundle), backend, context, threads, check_hashes))

    def twin(self) -> EagleModel:
        """This model once more: the same engines, caches of its own, so that two generations may take turns, step by
        step, in one thread or in several. What passes cost and what drafts taught is common to them, and closing one
        closes all. Raises RequestError on other backends than cpu, whose engines are tied to one cache."""
        if self.backend != "cpu":
            raise RequestError(f"a model on {self.backend} has no twins; load the bundle once more")
        return EagleModel(self._bundle.with_new_caches())

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Of the target and, if there is one, of the head, for tools that compare engines. They know nothing of the
        model's turns, so nobody else may use the model meanwhile."""
        return self._engines.sessions

    @property
    def head(self) -> Head:
        """Raises RequestError for a bundle without one."""
        self._engines.check()
        if self._head is None:
            raise RequestError(
                "the bundle has no draft head; use method lookup or vanilla, or export the target with a head"
            )
        return self._head

    @property
    def default_method(self) -> Method:
        """How to decode if nothing else is asked for: by all that drafts here, or by the head alone where the bundle
        asks for a tree that only a head grows."""
        if self._head is None:
            return "lookup"
        return "eagle+lookup" if self.manifest.tree_defaults.tree == "cost-aware" else "eagle"

    def generate(self, prompt: Prompt, **settings: Any) -> Result:
        """Decode to the end; settings as in `stream`."""
        with self.stream(prompt, **settings) as pieces:
            pieces.claim.place.streamed = False  # it ends by itself, so others may wait
            for piece in pieces:
                if piece.result is not None:
                    return piece.result
        raise AssertionError("a stream ends with a result")

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        method: Method | None = None,
        tree: TreeKind | TreeShape | None = None,
        total_token: int | None = None,
        depth: int | None = None,
        draft_top_k: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        seed: int | None = None,
        on_cycle: Callable[[Cycle], None] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Decode piece by piece.

        prompt: text, token ids, or chat messages ({"role", "content"} dicts, through the bundle's template).
        max_new_tokens: the output also ends where the context is full. method: "vanilla" decodes without a draft,
        "lookup" without the head, "eagle" without lookup, "eagle+lookup" with both; the tokens are the same. None:
        `default_method`, or "eagle" where a tree is asked for that only the head grows. tree, total_token, depth,
        draft_top_k: see manifest.TreeDefaults; None takes the bundle's, and a dynamic tree where total_token or depth
        is given; tree may also be a TreeShape of your own. A cost-aware tree is sized by what passes cost, which is
        learned from the passes (see `costs`). seed: None draws one (reported in the stats). on_cycle: called after
        every verification. sampling: the fields of SamplingParams. Raises RequestError and ClosedError before any
        work; pieces raise these too, and BusyError."""
        self._engines.check()
        params = _sampling_params(sampling, secrets.randbits(32) if seed is None else seed)
        total_token, depth, draft_top_k = (
            value if value is None else whole(name, value, least)
            for name, value, least in (
                ("total_token", total_token, 2), ("depth", depth, 0), ("draft_top_k", draft_top_k, 1)
            )
        )  # fmt: skip
        tokens = self._checked_prompt(prompt)
        max_new_tokens = whole("max_new_tokens", max_new_tokens, 1)
        if method is None:
            shaped = tree not in (None, "cost-aware") or total_token is not None or depth is not None
            method = "eagle" if shaped and self._head is not None else self.default_method
        sampler = Sampler(params, tokens, self.manifest.target.vocab_size)
        drafter = self._drafter(method, tree, total_token, depth, draft_top_k, sampler)
        stop = frozenset(token_ids("stop_token_ids", stop_token_ids)) | (
            frozenset() if ignore_eos else frozenset(self.manifest.target.eos_token_ids)
        )
        limit = min(max_new_tokens, self.context - len(tokens))
        claim = Claim(streamed=True)
        return Stream(self._decode(claim, tokens, drafter, sampler, Ending(stop, limit), method, on_cycle), claim)

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
        """What the target alone says of a text: the logits after tokens[first], tokens[first + 1], ... in pieces
        [R, V]. Takes the model as a stream does. Raises RequestError, ClosedError, and BusyError with a piece."""
        self._engines.check()
        checked = self._checked_prompt(tokens)
        first = whole("first", first, 0)
        return self._turns.steps(Claim(streamed=True), self._target.score(checked, first))

    def costs(self, *, measure_again: bool = False) -> Costs:
        """What passes cost on this machine, as far as is known: learned from the passes of this model's generations
        and of earlier ones with this bundle, backend and machine, or of shapes alone. measure_again: time some 150
        passes now, all in one step, and go on from there. On the cpu that leaves conversations alone; on other
        backends, whose engines are tied to one cache, it takes the model as a call of `generate` does."""
        self._engines.check()
        if measure_again:
            other = self.twin() if self.backend == "cpu" else self
            other._turns.run(lambda: self._costs.measured(measure(other._target, other._rehearsal())))
        return self._costs.latest()

    def _rehearsal(self) -> Callable[[Features], Rehearsal] | None:
        """Drafting at temperature 1, the dearer kind: it looks at random numbers too."""
        if self._head is None:
            return None
        sampler = Sampler(SamplingParams(temperature=1.0), [], self.manifest.target.vocab_size)
        return partial(Rehearsal, self._head.coupled(Coupling(sampler, Trust())))

    def close(self) -> None:
        """Free the engines, when the running step is over; a second call does nothing. Generations that are not
        finished end with a ClosedError at their next step. May be called from anywhere: another thread, on_cycle,
        between two pieces, a signal handler, a forked process (where it frees nothing)."""
        with contextlib.suppress(ClosedError):
            self._engines.check()
            self._costs.close()
        self._engines.close()

    def __enter__(self) -> EagleModel:
        self._engines.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(
        self,
        claim: Claim,
        prompt: list[int],
        drafter: Drafter,
        sampler: Sampler,
        ending: Ending,
        method: Method,
        on_cycle: Callable[[Cycle], None] | None,
    ) -> Generator[Piece, None, None]:
        decoder = self.text.stream(prompt)
        emitted: list[int] = []
        cycles: list[Cycle] = []
        started = first_at = time.perf_counter()
        elsewhere = 0.0  # seconds in which the consumer had its turn
        # A tree of another kind holds passes of the head that nobody timed.
        timed = self._costs.verified if isinstance(drafter, NoDraft | CostAwareDrafter) else None
        steps = self._turns.steps(claim, generate(self._target, drafter, sampler, prompt, timed=timed))
        with contextlib.closing(steps):
            for event in steps:
                if isinstance(event, Cycle):
                    cycles.append(event)
                    if on_cycle is not None:
                        on_cycle(event)
                    new = event.step.tokens.tolist()
                else:
                    started += claim.waited
                    first_at = time.perf_counter()
                    elsewhere -= claim.waited
                    new = [event]
                new = ending.cut(new, len(emitted))
                emitted += new
                text = decoder.feed(new) if decoder is not None else ""
                if ending.reason is not None:
                    break
                left = time.perf_counter()
                yield Piece(text, tuple(new))
                elsewhere += time.perf_counter() - left
        times = (first_at - started, time.perf_counter() - first_at - elsewhere - claim.waited)
        stats = stats_of(method, sampler.params.seed, len(prompt), len(emitted), cycles, times)
        if decoder is not None:
            text += decoder.finish()
        whole = decoder.text if decoder is not None else None
        try:
            yield Piece(text, tuple(new), Result(whole, tuple(emitted), ending.reason or "length", stats))
        finally:  # also where the consumer, having the result, does not come back
            self._costs.end_generation()

    def _checked_prompt(self, prompt: Prompt) -> list[int]:
        tokens = self.text.encode(prompt)
        vocab = self.manifest.target.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        for index, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise RequestError(f"prompt id {shown(token)} at position {index} is outside the vocabulary of {vocab}")
        if len(tokens) >= self.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.context} with the output; "
                f"shorten it or load with a larger context (this model serves up to {self.manifest.target.context})"
            )
        return tokens

    def _drafter(
        self,
        method: Method,
        tree: TreeKind | TreeShape | None,
        total: int | None,
        depth: int | None,
        top_k: int | None,
        sampler: Sampler,
    ) -> Drafter:
        if method == "vanilla" or (self.row_check is not None and self.row_check.padding is None):
            return NoDraft()  # in the latter case drafts would change the output
        if method not in typing.get_args(Method):
            raise RequestError(f"method is {shown(method)}, but must be one of {', '.join(typing.get_args(Method))}")
        greedy = sampler.params.temperature == 0
        head = None if method == "lookup" else self.head

        def fixed(shape: TreeShape, head: Head) -> Drafter:
            return EagleDrafter(head if greedy else head.coupled(Coupling(sampler, Trust())), shape)

        if tree is not None and not isinstance(tree, str):
            if not hasattr(tree, "grow"):
                raise RequestError(f"tree is {shown(tree)}, but must be one of {', '.join(typing.get_args(TreeKind))}")
            grown_by = self.head
            if method != "eagle":
                raise RequestError(f"method {method} takes no tree shape of your own; leave tree out")
            return fixed(tree, grown_by)
        defaults = self.manifest.tree_defaults
        sized = total is not None or depth is not None
        total = defaults.total_token if total is None else total
        depth = defaults.depth if depth is None else depth
        if top_k is None:
            top_k = defaults.draft_top_k if head is None else min(defaults.draft_top_k, head.top_k)
        elif head is not None:
            check_children(head, top_k)
        # Checked whatever the shape, so that a wrong number never passes unnoticed.
        dynamic, line = DynamicTree(total, depth, top_k), chain(min(depth + 1, total - 1))
        kind = tree or ("cost-aware" if method != "eagle" else "dynamic" if sized else defaults.tree)
        if kind not in typing.get_args(TreeKind):
            raise RequestError(f"tree is {shown(kind)}, but must be one of {', '.join(typing.get_args(TreeKind))}")
        if kind == "cost-aware":
            acceptance = self._acceptance.setdefault((method, greedy), AcceptanceStats())
            if head is not None:
                head = head.coupled(Greedy() if greedy else Coupling(sampler, acceptance.trust))
            return CostAwareDrafter(head, self._costs, acceptance, top_k=top_k, copies=method != "eagle")
        if method == "lookup" and kind == "chain":
            return LookupDrafter(len(line.choices))
        if head is None or method != "eagle":
            raise RequestError(f"method {method} does not draft a {kind} tree; leave the tree to it")
        shapes: dict[str, TreeShape] = {"dynamic": dynamic, "static": StaticTree(EAGLE1_CHOICES), "chain": line}
        return fixed(shapes[kind], head)


def _sampling_params(sampling: dict[str, Any], seed: int) -> SamplingParams:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(sampling) - known):
        raise RequestError(f"unknown setting {unknown[0]!r}; sampling takes {', '.join(sorted(known))}")
    return SamplingParams(seed=seed, **sampling)
