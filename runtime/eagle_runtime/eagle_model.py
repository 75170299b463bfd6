"""EagleModel: a bundle, loaded and ready to decode. What applications use."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle_runtime.arguments import checked_ids, checked_int, short_repr
from eagle_runtime.bundle.manifest import TreeKind
from eagle_runtime.decoding_state import DecodingState
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
from eagle_runtime.drafting.costs.measurement import measure
from eagle_runtime.drafting.costs.model import Costs
from eagle_runtime.drafting.costs.storage import NOTABLE
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker, NoiseWeight, RankedHead
from eagle_runtime.drafting.drafter import CheckedDrafter, Drafter, NoDraft
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.drafting.shapes import EagleDrafter, TreeShape
from eagle_runtime.errors import ClosedError, RequestError
from eagle_runtime.generate import Cycle, generate
from eagle_runtime.loading import OpenBundle, open_bundle
from eagle_runtime.result import Piece, Result, StopCondition, Stream, stats_of
from eagle_runtime.sampling import Sampler, SamplingParams
from eagle_runtime.session.protocol import Session
from eagle_runtime.text.tokenizer import Message
from eagle_runtime.threads.scheduler import Lease, Scheduler
from eagle_runtime.tree import Float

Prompt = str | Sequence[int] | Sequence[Message]


class EagleModel:
    """A loaded bundle: target, head if it has one, their caches, tokenizer.

    Any thread may call any method; a model decodes one text at a time.

    - Calls of `generate` from several threads wait for each other and run in order of arrival.
    - A stream holds the model from its first piece until it ends, is closed or dropped. Meanwhile other threads get a
      BusyError, since the stream may never end. A newer generation in the stream's own thread (the one that asked for a
      piece last) ends it: the next piece then raises RequestError. `score` is such a stream.
    - Twins decode at the same time, step by step in order of arrival. The caller's own code runs between steps, also
      on_cycle; only a `drafter` of the caller's runs within a step.
    - `close` waits for the running step. All later calls raise ClosedError, on twins too, and so does every call in a
      process that was forked after the model was loaded."""

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
        self._state = DecodingState(bundle.target, bundle.head)
        self._costs = bundle.costs
        self._acceptance = bundle.acceptance
        self._scheduler = Scheduler(self._engines)

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

        backend: one of backends.BACKENDS, or "auto" for the first of them that the bundle was made for and that works
        on this machine. `model.backend` is the one in use, `model.passed_over` gives the reason against each one before
        it, and `model.notice` is a warning, also logged, if "auto" runs engine files of the bundle. context: tokens of
        prompt and output together that the caches hold; None takes the model's own limit, at most 4096. threads: of a
        forward pass on the CPU; None takes the number of physical cores. check_hashes: compare the SHA-256 of every
        file (about a second per gigabyte).

        On the CPU the rows of a quantised target are checked once per machine (exact_rows; some 170 rows):
        `model.row_check`. Raises BundleError, BackendError, RequestError; gives a FidelityWarning for a bundle that
        differs more from its source model than its precision should."""
        return cls(open_bundle(Path(bundle), backend, context, threads, check_hashes))

    def twin(self) -> EagleModel:
        """Returns a model on the same engines with caches of its own, so that two generations may alternate step by
        step, in one thread or in several. Twins share measured costs and acceptance statistics; closing one closes all.
        Raises RequestError on all backends but cpu, whose engines are tied to one cache."""
        if self.backend != "cpu":
            raise RequestError(f"a model on {self.backend} has no twins; load the bundle once more")
        return EagleModel(self._bundle.with_new_caches())

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The session of the target and, if there is one, of the head, for tools that compare engines. Sessions take no
        part in scheduling: use them only while no other code uses the model."""
        return self._engines.sessions

    @property
    def head(self) -> Head:
        """The draft head. Raises RequestError for a bundle without one."""
        self._engines.check()
        if self._head is None:
            raise RequestError(NO_HEAD)
        return self._head

    @property
    def default_method(self) -> Method:
        """The method of a request that names neither method nor tree."""
        return default_method(self.manifest.tree_defaults, self._head is not None)

    def generate(self, prompt: Prompt, **settings: Any) -> Result:
        """Decode to the end and return the result; settings as in `stream`."""
        with self.stream(prompt, **settings) as pieces:
            pieces.lease.ticket.streamed = False  # it ends without the caller's help, so others may wait for it
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
        drafter: Drafter | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        on_cycle: Callable[[Cycle], None] | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> Stream:
        """Decode piece by piece.

        prompt: text, token ids, or chat messages ({"role", "content"} dicts, for the bundle's template).
        max_new_tokens: the output also ends where the context is full. stop_token_ids: end the output, as do the
        model's end-of-sequence ids unless ignore_eos. on_cycle: called with each Cycle after its verification.

        What drafts changes the speed, not the output. method: "vanilla" (no drafts), "lookup" (n-gram matches),
        "eagle" (the head) or "eagle+lookup" (both); None takes `default_method`, or "eagle" if the tree asked for is
        one that only a head grows. tree, total_token, depth, draft_top_k: see manifest.TreeDefaults; None takes the
        bundle's, and a dynamic tree if total_token or depth is given. A cost-aware tree is sized by measured costs (see
        `costs`). tree may also be a TreeShape, drafter a drafting.drafter.Drafter of your own, new for each call.

        How tokens are sampled: sampling, or its fields as keyword settings, such as temperature=0.7; a field may be set
        in one of the two. seed: None takes that of `sampling`, or a random one, which the statistics report.

        Raises RequestError and ClosedError at once; pieces raise these too, and BusyError."""
        self._engines.check()
        params = _sampling_params(sampling, settings if seed is None else {**settings, "seed": seed})
        tokens = self._checked_prompt(prompt)
        max_new_tokens = checked_int("max_new_tokens", max_new_tokens, 1)
        sampler = Sampler(params, tokens, self.manifest.target.vocab_size)
        sizes, top_k = Sizes(total_token, depth, draft_top_k), None if self._head is None else self._head.top_k
        if drafter is None:
            method, choice = choose_drafter(method, tree, sizes, self.manifest.tree_defaults, top_k)
            drafter = self._drafter(choice, method, sampler)
        elif (method, tree, *sizes) != (None,) * 5:
            raise RequestError("a drafter of your own takes no method, tree or sizes of a tree; leave them out")
        else:
            checked = CheckedDrafter(drafter, self.manifest.target.vocab_size)
            drafter = NoDraft(self._costs) if self._drafts_are_off else checked
        eos = () if ignore_eos else self.manifest.target.eos_token_ids
        stop_ids = frozenset({*checked_ids("stop_token_ids", stop_token_ids), *eos})
        stop = StopCondition(stop_ids, min(max_new_tokens, self.context - len(tokens)))
        lease = Lease(streamed=True)
        return Stream(self._decode(lease, tokens, drafter, sampler, stop, method or "drafter", on_cycle), lease)

    def score(self, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
        """Yields the target's logits after tokens[first], tokens[first + 1], ... in arrays [R, V]. Holds the model as a
        stream does. Raises RequestError and ClosedError; pieces also raise BusyError."""
        self._engines.check()
        checked = self._checked_prompt(tokens)
        first = checked_int("first", first, 0)
        return self._scheduler.steps(Lease(streamed=True), self._target.score(checked, first))

    def costs(self, *, measure_again: bool = False) -> Costs:
        """Returns what forward passes cost on this machine, as learned from the passes of this model's generations and
        of earlier runs with this bundle, backend and machine, or else estimated from the models' shapes.

        measure_again: time some 150 forward passes now, in one step, and go on from there. On the cpu that leaves
        running generations alone; on other backends it holds the model as a call of `generate` does."""
        self._engines.check()
        if measure_again:
            other = self.twin() if self.backend == "cpu" else self
            sampler = Sampler(SamplingParams(temperature=1.0), [], self.manifest.target.vocab_size)
            ranker = GumbelRanker(sampler, NoiseWeight())  # sampling takes longer than greedy decoding
            head = None if other._head is None else RankedHead(other._head, ranker)

            def measured() -> None:
                other._state.forget()
                self._costs.measured(measure(other._target, head))

            other._scheduler.run(measured)
        return self._costs.latest()

    def close(self) -> None:
        """Free the engines when the running step is over; a second call does nothing. Unfinished generations raise
        ClosedError at their next step. It may be called from anywhere: another thread, on_cycle, between two pieces, a
        signal handler, a forked process (where it frees nothing)."""
        with contextlib.suppress(ClosedError):
            self._engines.check()
            self._costs.save()
        self._engines.close()

    def __enter__(self) -> EagleModel:
        self._engines.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode(
        self,
        lease: Lease,
        prompt: list[int],
        drafter: Drafter,
        sampler: Sampler,
        stop: StopCondition,
        method: str,
        on_cycle: Callable[[Cycle], None] | None,
    ) -> Generator[Piece, None, None]:
        decoder = self.text.stream(prompt)
        emitted: list[int] = []
        cycles: list[Cycle] = []
        started = first_at = time.perf_counter()
        elsewhere = 0.0  # seconds in which the consumer had its turn
        steps = self._scheduler.steps(lease, self._generate(drafter, sampler, prompt))
        with contextlib.closing(steps):
            for cycle in steps:
                if emitted:
                    cycles.append(cycle)
                    if on_cycle is not None:
                        on_cycle(cycle)
                else:  # the prompt's
                    started += lease.waited
                    first_at = time.perf_counter()
                    elsewhere -= lease.waited
                new = stop.cut(cycle.step.tokens.tolist(), len(emitted))
                emitted += new
                text = decoder.feed(new) if decoder is not None else ""
                if stop.reason is not None:
                    break
                left = time.perf_counter()
                yield Piece(text, tuple(new))
                elsewhere += time.perf_counter() - left
        times = (first_at - started, time.perf_counter() - first_at - elsewhere - lease.waited)
        stats = stats_of(method, sampler.params.seed, len(prompt), len(emitted), cycles, times)
        if decoder is not None:
            text += decoder.finish()
        whole = decoder.text if decoder is not None else None
        try:
            yield Piece(text, tuple(new), Result(whole, tuple(emitted), stop.reason or "length", stats))
        finally:  # also where the consumer, having the result, does not come back
            self._costs.save(NOTABLE)

    def _generate(self, drafter: Drafter, sampler: Sampler, prompt: list[int]) -> Iterator[Cycle]:
        """A text of its own: equal calls read equal rows. Until its first step another one may have the caches."""
        self._state.forget()
        yield from generate(self._state, drafter, sampler, prompt)

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

    @property
    def _drafts_are_off(self) -> bool:
        """Whether drafts would change the output, since rows differ by which others share their forward pass."""
        return self.row_check is not None and self.row_check.padding is None

    def _drafter(self, choice: Choice, method: Method, sampler: Sampler) -> Drafter:
        """Builds what was chosen, or NoDraft where the target's rows are not exact: drafts would change the output."""
        if isinstance(choice, Vanilla) or self._drafts_are_off:
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
        return CostAwareDrafter(head, self._costs, acceptance, top_k=choice.top_k, lookup=choice.lookup)


def _sampling_params(sampling: SamplingParams | None, settings: dict[str, Any]) -> SamplingParams:
    """Returns `sampling` with the keyword settings; raises RequestError for a setting that is unknown or in both."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(settings) - known):
        raise RequestError(f"unknown setting {unknown[0]!r}; sampling takes {', '.join(sorted(known))}")
    if sampling is None:
        return SamplingParams(**{"seed": secrets.randbits(32), **settings})
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is {short_repr(sampling)}, but must be a SamplingParams")
    if both := [name for name in settings if getattr(sampling, name) != getattr(SamplingParams(), name)]:
        raise RequestError(f"{both[0]} is set twice, as a keyword and in sampling; leave one of them out")
    return dataclasses.replace(sampling, **settings)
