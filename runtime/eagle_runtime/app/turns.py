"""What answers on an opened bundle: turns in the model's own caches, and in those of conversations and batches."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from eagle_runtime.app.decoding import Work, decode
from eagle_runtime.app.output import Output
from eagle_runtime.app.request import Request, request_of
from eagle_runtime.app.result import Usage
from eagle_runtime.app.slots import Memory, Slot, Slots
from eagle_runtime.app.turn import Turn, TurnState
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import ClosedError, ContextError, RequestError
from eagle_runtime.base.tree import Float
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import Reading, asking
from eagle_runtime.core.scheduler import Lease, Scheduler
from eagle_runtime.opening.opened import OpenBundle
from eagle_runtime.text.answer_form import ChatPrompt
from eagle_runtime.text.tokenizer import Message

Prompt = str | Sequence[int] | Sequence[Message] | ChatPrompt
OnEnd = Callable[[Output, int, Usage | None], None]  # what was answered, its seed, and its figures


class Turns:
    """An opened bundle at work. `EagleModel` is its face; conversations and batches share it. slots: of their rows."""

    def __init__(self, bundle: OpenBundle) -> None:
        self.bundle = bundle
        self.engines = bundle.engines
        self.engines.add_user(self)
        self._state = bundle.state()
        rounds = self.engines.rounds
        for one in (bundle, *bundle.drafts):
            one.costs.share(lambda rounds=rounds: rounds.others, rounds.timed)  # type: ignore[misc]
        self._scheduler = Scheduler(self.engines)
        own = self._new_state if bundle.on_cpu else None
        self.slots = Slots(self.engines, own, (self._state, self._scheduler), bundle.kv_budget)
        self._executor: ThreadPoolExecutor | None = None
        self._worker_lock = threading.Lock()

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a prompt. Raises RequestError."""
        text = self.bundle.text
        return text.encode_rendered(prompt.text) if isinstance(prompt, ChatPrompt) else text.encode(prompt)

    def ids(self, prompt: Prompt) -> list[int]:
        """Returns the ids of a prompt that fits the context. Raises RequestError, ContextError."""
        text, context = self.bundle.text, self.bundle.context
        tokens = self.encode(prompt)
        vocab = self.bundle.manifest.target.vocab_size
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        for index, token in enumerate(tokens):
            if not 0 <= token < vocab:
                named = text.token_named(token)
                raise RequestError(
                    f"prompt id {short_repr(token)} at position {index} is outside the vocabulary of {vocab}"
                    if named is None
                    else f"the prompt holds {short_repr(named)}, for which the model has no row (id {token} of "
                    f"{vocab}); leave it out"
                )
        if len(tokens) >= context:
            most = self.bundle.manifest.target.context
            longer = f" or load with a larger context (this model serves up to {most})" if context < most else ""
            raise ContextError(
                f"the prompt has {len(tokens)} tokens, but the context holds {context} with the output"
                f"{'' if longer else ', and this model serves no more'}; shorten it{longer}",
                needed=len(tokens) + 1,
                available=context,
            )
        return tokens

    def check(self, prompt: list[int], settings: dict[str, Any]) -> None:
        """Raises RequestError for settings that are wrong. prompt: as `ids` returns it."""
        request_of(self.bundle, self._state, prompt, self.bundle.context, **settings)

    def alone(self, prompt: list[int], settings: dict[str, Any], *, streamed: bool) -> Turn:
        """Returns a turn in the model's own caches. streamed: as in Lease. Raises RequestError, ClosedError."""
        self.engines.check()
        state = self._state
        request = request_of(self.bundle, state, prompt, self.bundle.context, **settings)

        def work() -> Work:
            """A text of its own: equal calls read equal rows. Until its first step another one may have the state."""
            state.forget()
            yield from self._asking(state, request)

        return self._turn(state, self._scheduler, request, work(), lambda output, control: None, streamed)

    def in_slot(self, slot: Slot, prompt: list[int], on_end: OnEnd, settings: dict[str, Any]) -> Turn:
        """Returns a turn that answers a text whose beginning the slot may hold. on_end: called when it ends. Raises
        RequestError, MemoryLimitError, ClosedError."""
        self.engines.check()
        self.slots.check(len(prompt), self.bundle.context)
        context = self.slots.most_rows(self.bundle.context)
        request = request_of(self.bundle, slot.state, prompt, context, **settings)
        slot.expect(len(prompt))

        def work() -> Work:
            while slot.waits:
                yield Reading(0, len(prompt))
            slot.begin()
            yield from self._asking(slot.state, request)

        def ended(output: Output, control: TurnState) -> None:
            slot.end()
            on_end(output, request.sampler.params.seed, None if control.result is None else control.result.usage)

        return self._turn(slot.state, slot.scheduler, request, work(), ended)

    def score(self, tokens: list[int], first: int) -> Iterator[Float]:
        """As EagleModel.score; tokens: as `ids` returns them."""
        return self._scheduler.steps(Lease(streamed=True), self.bundle.target.score(tokens, first))

    def memory(self) -> Memory:
        slots = self.slots.members
        own = sum(cache.nbytes for cache in self._state.caches)
        holding = [slot for slot in slots if slot.state.tokens]
        return Memory(
            weights=self.bundle.weight_bytes,
            kv_reserved=own + sum(slot.nbytes for slot in slots),
            kv_used=sum(slot.state.used_bytes for slot in slots) + self._state.used_bytes,
            kv_budget=self.slots.budget,
            conversations=len(slots),
            resident=len(holding),
            dropped=self.slots.dropped,
        )

    def close(self) -> None:
        with contextlib.suppress(ClosedError):
            self.engines.check()
            self.bundle.save_learned()
        self.engines.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _turn(
        self,
        state: DecodingState,
        scheduler: Scheduler,
        request: Request,
        work: Work,
        on_end: Callable[[Output, TurnState], None],
        streamed: bool = True,
    ) -> Turn:
        def ended(output: Output) -> None:
            on_end(output, control)
            if control.result is not None:
                self.bundle.save_learned(last=False)

        lease, control = Lease(streamed=streamed), TurnState(ended)
        output = Output(self.bundle.text.stream(request.prompt), request.end, request.reader)
        events = decode(scheduler, lease, work, request, output, control, lambda: state.reused)
        return Turn(control, output, events, self.engines.rounds.serve, lease, self._worker)

    def _asking(self, state: DecodingState, request: Request) -> Work:
        rounds = self.engines.rounds
        on_rows = None if request.scores is None else request.scores.add
        return asking(
            state, request.drafter, request.sampler, request.prompt, others=lambda: rounds.others, on_rows=on_rows
        )

    def _new_state(self) -> tuple[DecodingState, Scheduler]:
        return self.bundle.with_new_caches().state(), Scheduler(self.engines)

    def _worker(self) -> Executor:
        """The thread in which pieces are computed for event loops; it is started when first needed."""
        with self._worker_lock:
            self.engines.check()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "eagle-turns")
            return self._executor
