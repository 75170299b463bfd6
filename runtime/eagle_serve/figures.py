"""What every API's answers tell of tokens, counts and times, each under its own names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from eagle_runtime import Part, Piece, Result, Token
from eagle_serve.engine import Engine
from eagle_serve.jobs import Job

LEAST_LOGPROB = -9999.0  # what OpenAI's API writes for a probability of zero, which JSON cannot


def shown(piece: Piece) -> list[Token]:
    """The tokens of a piece that have part in the text: not the one that ended it."""
    ended = piece.result is not None and piece.result.stop.kind in ("eos", "stop_token")
    return list(piece.tokens[:-1] if ended else piece.tokens)


def parts_of(piece: Piece, job: Job) -> tuple[Part, ...]:
    """A piece taken apart: content alone where the answer has no other parts."""
    if "form" in job.prepared.settings:
        return piece.parts
    return (Part("content", piece.text),) if piece.text else ()


def text_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def message_of(pieces: Sequence[Piece], result: Result) -> dict[str, Any]:
    """A finished answer as a message, as OpenAI's API has it."""
    return dict(result.message or {"role": "assistant", "content": text_of(pieces)})


def logprob(engine: Engine, token: Token) -> dict[str, Any]:
    """A token with its log-probability and its runners-up."""
    top = [runner_up(engine, other, value) for other, value in token.top]
    own = {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.text.encode("utf-8", "replace"))}
    return {**own, "top_logprobs": top}


def runner_up(engine: Engine, token: int, value: float) -> dict[str, Any]:
    """A token that was not drawn, with its log-probability. It has no bytes where its text alone is no character."""
    text = engine.token_text(token)
    return {
        "token": text,
        "logprob": finite(value),
        "bytes": [] if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode()),
    }


def finite(value: float | None) -> float:
    """A log-probability that JSON can write."""
    return LEAST_LOGPROB if value is None or not math.isfinite(value) else value


def figures(result: Result, job: Job, traced: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """llama.cpp's `timings`, and what is EAGLE's own. traced: the tokens that were asked for, among the latter."""
    usage = result.usage
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    timings = {
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": _ms(usage.prefill_s),
        "prompt_per_second": round(prompt_n / usage.prefill_s, 3) if usage.prefill_s > 0 else 0.0,
        "predicted_n": usage.new_tokens,
        "predicted_ms": _ms(usage.decode_s),
        "predicted_per_second": usage.tokens_per_s,
        "draft_n": job.drafted,
        "draft_n_accepted": job.accepted,
    }
    drafting = {
        "method": usage.method,
        "seed": result.seed,
        "tau": usage.tau,
        "target_passes": usage.target_passes,
        "accepted_per_depth": list(usage.accepted_per_depth),
        "ttft_ms": _ms(job.first or 0.0),
        "stop": {"kind": result.stop.kind, "value": result.stop.value},
    }
    return {"timings": timings, "eagle": {**drafting, **(traced or {})}}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
