"""EagleModel: a bundle, loaded and ready to decode. What applications use."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eagle_runtime.arguments import checked_ids, checked_int, short_repr
from eagle_runtime.bundle.manifest import TreeKind
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.choose import (
    NO_HEAD,
    Choice,
    FixedTree,
    LookupChain,
    Method,
    Sizes,
    Vanilla,
    choose_drafter,
    default_method,
)
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.costs.measure import measure
from eagle_runtime.drafting.costs.tables import Costs
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker, NoiseWeight, RankedHead
from eagle_runtime.drafting.drafter import Drafter, NoDraft
from eagle_runtime.drafting.eagle import EagleDrafter
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.drafting.shapes import TreeShape
from eagle_runtime.errors import ClosedError, RequestError
from eagle_runtime.generate import Cycle, generate
from eagle_runtime.loading import OpenBundle, open_bundle
from eagle_runtime.result import Piece, Result, StopCondition, Stream, stats_of
from eagle_runtime.sampling import Sampler, SamplingParams
from eagle_runtime.session.protocol import Session
from eagle_runtime.text.tokenizer import Message
from eagle_runtime.threads.turns import Claim, Turns
from eagle_runtime.tree import Float

Prompt = str | Sequence[int] | Sequence[Message]


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
            raise RequestError(NO_HEAD)
        return self._head

    @property
    def default_method(self) -> Method:
        """The method of a request that names neither method nor tree."""
        return default_method(self.manifest.tree_defaults, self._head is not None)

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
        tokens = self._checked_prompt(prompt)
        max_new_tokens = checked_int("max_new_tokens", max_new_tokens, 1)
        sizes, top_k = Sizes(total_token, depth, draft_top_k), None if self._head is None else self._head.top_k
        method, choice = choose_drafter(method, tree, sizes, self.manifest.tree_defaults, top_k)
        sampler = Sampler(params, tokens, self.manifest.target.vocab_size)
        drafter = self._drafter(choice, method, sampler)
        stop = frozenset(checked_ids("stop_token_ids", stop_token_ids)) | (
            frozenset() if ignore_eos else frozenset(self.manifest.target.eos_token_ids)
        )
        limit = min(max_new_tokens, self.context - len(tokens))
        claim = Claim(streamed=True)
        return Stream(
            self._decode(claim, tokens, drafter, sampler, StopCondition(stop, limit), method, on_cycle), claim
        )

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
        """What the target alone says of a text: the logits after tokens[first], tokens[first + 1], ... in pieces
        [R, V]. Takes the model as a stream does. Raises RequestError, ClosedError, and BusyError with a piece."""
        self._engines.check()
        checked = self._checked_prompt(tokens)
        first = checked_int("first", first, 0)
        return self._turns.steps(Claim(streamed=True), self._target.score(checked, first))

    def costs(self, *, measure_again: bool = False) -> Costs:
        """What passes cost on this machine, as far as is known: learned from the passes of this model's generations
        and of earlier ones with this bundle, backend and machine, or of shapes alone. measure_again: time some 150
        passes now, all in one step, and go on from there. On the cpu that leaves conversations alone; on other
        backends, whose engines are tied to one cache, it takes the model as a call of `generate` does."""
        self._engines.check()
        if measure_again:
            other = self.twin() if self.backend == "cpu" else self
            sampler = Sampler(SamplingParams(temperature=1.0), [], self.manifest.target.vocab_size)
            ranker = GumbelRanker(sampler, NoiseWeight())  # sampling takes longer than greedy decoding
            head = None if other._head is None else RankedHead(other._head, ranker)
            other._turns.run(lambda: self._costs.measured(measure(other._target, head)))
        return self._costs.latest()

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
        stop: StopCondition,
        method: Method,
        on_cycle: Callable[[Cycle], None] | None,
    ) -> Generator[Piece, None, None]:
        decoder = self.text.stream(prompt)
        emitted: list[int] = []
        cycles: list[Cycle] = []
        started = first_at = time.perf_counter()
        elsewhere = 0.0  # seconds in which the consumer had its turn
        steps = self._turns.steps(claim, generate(self._target, drafter, sampler, prompt))
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
                new = stop.cut(new, len(emitted))
                emitted += new
                text = decoder.feed(new) if decoder is not None else ""
                if stop.reason is not None:
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
            yield Piece(text, tuple(new), Result(whole, tuple(emitted), stop.reason or "length", stats))
        finally:  # also where the consumer, having the result, does not come back
            self._costs.end_generation()

    def _checked_prompt(self, prompt: Prompt) -> list[int]:
        tokens = self.text.encode(prompt)
        vocab = self.manifest.target.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        for index, token in enumerate(tokens):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"prompt id {short_repr(token)} at position {index} is outside the vocabulary of {vocab}"
                )
        if len(tokens) >= self.context:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.context} with the output; "
                f"shorten it or load with a larger context (this model serves up to {self.manifest.target.context})"
            )
        return tokens

    def _drafter(self, choice: Choice, method: Method, sampler: Sampler) -> Drafter:
        """Builds what was chosen, or NoDraft where the target's rows are not exact: drafts would change the output."""
        if isinstance(choice, Vanilla) or (self.row_check is not None and self.row_check.padding is None):
            return NoDraft(self._costs)
        if isinstance(choice, LookupChain):
            return LookupDrafter(choice.length)
        greedy = sampler.params.temperature == 0
        if isinstance(choice, FixedTree):
            ranked = RankedHead(self.head, GumbelRanker(sampler, NoiseWeight()))
            return EagleDrafter(self.head if greedy else ranked, choice.shape)
        acceptance = self._acceptance.setdefault((method, greedy), AcceptanceStats())
        ranker = GreedyRanker() if greedy else GumbelRanker(sampler, acceptance.noise_weight)
        head = RankedHead(self.head, ranker) if choice.head else None
        return CostAwareDrafter(head, self._costs, acceptance, top_k=choice.top_k, copies=choice.lookup)


def _sampling_params(sampling: dict[str, Any], seed: int) -> SamplingParams:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(sampling) - known):
        raise RequestError(f"unknown setting {unknown[0]!r}; sampling takes {', '.join(sorted(known))}")
    return SamplingParams(seed=seed, **sampling)
