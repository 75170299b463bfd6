"""What an answer consists of: tokens, pieces, the result with its end, and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from eagle_runtime.core.generate import Cycle
from eagle_runtime.sampling.grammar_matcher import Lookahead
from eagle_runtime.text.answer_reader import Part

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]
StopKind = Literal["eos", "stop_token", "stop_string", "constraint_end", "max_new_tokens", "context_full", "cancelled"]
REASONS: dict[StopKind, FinishReason] = {
    "max_new_tokens": "length",
    "context_full": "length",
    "cancelled": "cancelled",
}  # the others are "stop"


@dataclass(frozen=True, slots=True)
class Usage:
    """Figures of one generation.

    cached_tokens: of the prompt, whose rows were there already; prefilled_tokens: the others. target_passes: forward
    passes of the target that verified a tree. tau: tokens emitted per such pass (1 without drafts); the first token
    comes from the prompt's pass, so neither of the two counts. tau_untrimmed: also counts accepted tokens that the end
    of the output cut off, as EAGLE's authors do. accepted_per_depth[d]: passes that accepted at least d + 1 drafted
    tokens. queue_s: seconds spent waiting for other callers before the first token; prefill_s: seconds until the first
    token; decode_s: seconds after it, of which draft_s, verify_s and host_s; neither includes the consumer's time
    between two pieces, nor waiting for other callers. tokens_per_s: tokens after the first, per second of decode_s.
    Of a constraint: forced_tokens, drafted without the head since no others may come; pruned_nodes: candidates for
    drafts that may not come, left out before the verification.
    prediction_accepted, prediction_rejected: tokens of the setting `prediction` that the output has, and has not.
    accepted_per_draft: of method "specinfer", accepted tokens that the tree of each draft bundle had."""

    method: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    new_tokens: int
    target_passes: int
    tau: float
    tau_untrimmed: float
    accepted_per_depth: tuple[int, ...]
    queue_s: float
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    host_s: float
    tokens_per_s: float
    forced_tokens: int
    pruned_nodes: int
    prediction_accepted: int = 0
    prediction_rejected: int = 0
    accepted_per_draft: tuple[int, ...] = ()

    @property
    def ttft_s(self) -> float:
        """Seconds until the first token, waiting included."""
        return self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Stop:
    """Why an answer ended. value: the token's id or the stop string; None for the other kinds."""

    kind: StopKind
    value: int | str | None = None

    @property
    def reason(self) -> FinishReason:
        """The kind as OpenAI's API names it."""
        return REASONS.get(self.kind, "stop")


@dataclass(frozen=True, slots=True)
class PastTurn:
    """A turn of a conversation that has ended. seed: draws the same answer again; usage: None where the turn was left
    early."""

    seed: int
    stop: Stop
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. text is None if the bundle has no tokenizer; of an answer in OpenAI's harmony format it is
    the content alone.

    The text ends before a stop string; token_ids include the stop token, or the token that completed the stop string.
    finish_reason: "stop" at an end-of-sequence or stop token, a stop string or the end of a constraint, "length" at
    max_new_tokens or a full context, "tool_calls" where it would be "stop" and tools are called, "cancelled" after
    `Turn.cancel`. message: of an answer to a chat, with "content", "reasoning_content" and "tool_calls" as OpenAI's API
    has them; None for other texts. prompt: its tokens with their log-probabilities, where prompt_logprobs was set; the
    first one has none."""

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop: Stop
    usage: Usage
    message: Mapping[str, Any] | None = None
    prompt: tuple[Token, ...] = ()

    @property
    def seed(self) -> int:
        """The seed that draws the same tokens again after the same prompt."""
        return self.usage.seed

    def as_data(self) -> dict[str, Any]:
        """Returns the fields as JSON has them; the prompt only where it was asked for."""
        told = asdict(self)
        if not self.prompt:
            del told["prompt"]
        return told


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. text: what it completes, "" for a part of a character; a marker of the harmony format has
    its own. drafted: whether it was a node of a draft tree, and not the target's own sample after one. logprob: natural
    logarithm of its probability by the target's own logits, before all settings of sampling; top: the likeliest tokens,
    (id, logprob), best first. None and () unless asked for."""

    id: int
    text: str
    drafted: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens whose text is certain. text: theirs; of an answer in OpenAI's harmony format its content alone. parts: of
    an answer to a chat that may call tools or reason, taken apart. The last piece of a turn carries the result."""

    tokens: tuple[Token, ...]
    text: str
    result: Result | None = None
    parts: tuple[Part, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens."""
        return tuple(token.id for token in self.tokens)


def usage_of(
    method: str,
    seed: int,
    prompt: tuple[int, int],
    new_tokens: int,
    cycles: Sequence[Cycle],
    times: tuple[float, float, float],
    lookahead: Lookahead | None = None,
) -> Usage:
    """Returns the figures of a generation. prompt: its tokens, and how many of them were known; cycles: those after
    the prompt's; times: seconds of waiting, of prefill and of decode; lookahead: of a constraint."""
    passes = len(cycles)
    accepted = [cycle.step.num_accepted for cycle in cycles]
    queue_s, prefill_s, decode_s = times
    after_first = max(0, new_tokens - 1)
    return Usage(
        method=method,
        seed=seed,
        prompt_tokens=prompt[0],
        cached_tokens=prompt[1],
        prefilled_tokens=prompt[0] - prompt[1],
        new_tokens=new_tokens,
        target_passes=passes,
        tau=after_first / passes if passes else 1.0,
        tau_untrimmed=(sum(accepted) + passes) / passes if passes else 1.0,
        accepted_per_depth=tuple(sum(a > d for a in accepted) for d in range(max(accepted, default=0))),
        queue_s=queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        draft_s=sum(cycle.draft_s for cycle in cycles),
        verify_s=sum(cycle.verify_s for cycle in cycles),
        host_s=sum(cycle.host_s for cycle in cycles),
        tokens_per_s=after_first / decode_s if passes and decode_s > 0 else 0.0,
        forced_tokens=0 if lookahead is None else lookahead.forced_tokens,
        pruned_nodes=0 if lookahead is None else lookahead.pruned,
    )
