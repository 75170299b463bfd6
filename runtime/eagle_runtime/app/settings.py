"""The settings of an answer by name and type, so that editors complete them and type checkers check them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.shapes import TreeShape
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.text.answer_form import AnswerForm


class Settings(TypedDict, total=False):
    """The keywords of `EagleModel.generate` and `stream`, and of a conversation's turns. `EagleModel.stream` says what
    each means. None counts as not given, where it may be given."""

    max_new_tokens: int
    min_new_tokens: int
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: Constraint | None
    form: AnswerForm | None
    prediction: str | Sequence[int] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    sampling: SamplingParams | None
    method: str | None
    tree: str | TreeShape | None
    total_token: int | None
    depth: int | None
    draft_top_k: int | None
    drafter: Drafter | None
    on_cycle: Callable[[Cycle], None] | None
    on_prefill: Callable[[int, int], None] | None


class ChatSettings(Settings, total=False):
    """The keywords of a conversation's turns: which tools the answer may call, as OpenAI's API describes them."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
