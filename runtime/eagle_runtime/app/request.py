"""What a caller asks of one answer: its settings are checked, and its sampler, its drafter and its end are made."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_runtime.app.output import End
from eagle_runtime.base.arguments import checked_ids, checked_int, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.sampling_defaults import SamplingDefaults
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.checked_drafter import CheckedDrafter
from eagle_runtime.drafting.choose import Sizes, choose_drafter
from eagle_runtime.drafting.method import Parts
from eagle_runtime.drafting.predicted import PredictedText
from eagle_runtime.drafting.shapes import TreeShape
from eagle_runtime.drafting.specinfer import SPECINFER
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.opening.opened import OpenBundle
from eagle_runtime.sampling.call_grammar import calls_constraint
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.sampling.grammar_lookahead import Lookahead
from eagle_runtime.sampling.sampler import Sampler, SamplingParams
from eagle_runtime.text.answer_form import THINK, AnswerForm
from eagle_runtime.text.answer_reader import AnswerReader

MOST_STRINGS, LONGEST_STRING = 16, 256  # stop strings of a request, and characters of one
MOST_LOG_PROBS = 20  # likeliest tokens of a position


@dataclass(frozen=True, slots=True)
class Request:
    """One answer. method: the drafter's name in the figures; has_text: whether there is a tokenizer; on_cycle: called
    after each verification; on_prefill: called with the tokens of the prompt that are read, and all of them; lookahead:
    the drafter's view of a constraint; predicted: a text that is expected in it; reader: takes it apart;
    draft_accepted: counts, for each draft model, accepted tokens that it drafted (specinfer.py)."""

    prompt: list[int]
    sampler: Sampler
    drafter: Drafter
    method: str
    end: End
    has_text: bool
    on_cycle: Callable[[Cycle], None] | None
    on_prefill: Callable[[int, int], None] | None
    lookahead: Lookahead | None = None
    predicted: PredictedText | None = None
    reader: AnswerReader | None = None
    draft_accepted: Sequence[int] = ()


def request_of(
    bundle: OpenBundle,
    state: DecodingState,
    prompt: list[int],
    context: int,
    *,
    max_new_tokens: int = 256,
    min_new_tokens: int = 0,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    constraint: Constraint | None = None,
    form: AnswerForm | None = None,
    prediction: str | Sequence[int] | None = None,
    method: str | None = None,
    tree: str | TreeShape | None = None,
    total_token: int | None = None,
    depth: int | None = None,
    draft_top_k: int | None = None,
    drafter: Drafter | None = None,
    on_cycle: Callable[[Cycle], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    sampling: SamplingParams | None = None,
    **settings: Any,
) -> Request:
    """The settings of `EagleModel.stream`, checked. state: the one that shall answer; prompt: ids that fit `context`,
    which counts the answer too; form: of the answer to a chat. Raises RequestError."""
    params = _sampling_params(sampling, settings, bundle.manifest.sampling)
    target = bundle.manifest.target
    limit = checked_int("max_new_tokens", max_new_tokens, 1)
    least = checked_int("min_new_tokens", min_new_tokens, 0, limit)
    if logprobs is not None:
        logprobs = checked_int("logprobs", logprobs, 0, MOST_LOG_PROBS)
    strings, special = _stop_strings(bundle, stop)
    eos = frozenset(() if ignore_eos else target.eos_token_ids)
    stop_ids = frozenset({*checked_ids("stop_token_ids", stop_token_ids), *special})
    room = context - len(prompt)
    end = End(min(limit, room), "max_new_tokens" if limit <= room else "context_full", eos, stop_ids, strings, least)
    matcher = lookahead = reader = None
    if form is not None:
        written = form.format
        specials = bundle.text.specials_in((*written.begins, *written.call, written.between or "", written.end, *THINK))
        reader = AnswerReader(form, specials)
        constraint = _constraint_of(form, specials, constraint)
    if constraint is not None:
        if ignore_eos or least:
            name = "ignore_eos" if ignore_eos else "min_new_tokens"
            raise RequestError(f"{name} cannot be combined with a constraint, which says where the text ends; omit one")
        matcher = bundle.grammars.matcher(constraint, eos | stop_ids)
        lookahead = Lookahead(matcher)
    sampler = Sampler(
        params, prompt, target.vocab_size, late=eos | stop_ids, least=least, log_probs=logprobs, matcher=matcher
    )
    predicted = None if prediction is None else PredictedText(prompt, _predicted_ids(bundle, prediction))
    sizes = Sizes(total_token, depth, draft_top_k)
    draft_accepted = [0] * len(state.draft_models)
    off = NoDraft(bundle.costs) if bundle.drafts_are_off else None  # drafts would change the output
    if drafter is None:
        choice = choose_drafter(method, tree, sizes, bundle.loaded)
        parts = Parts(
            sampler=sampler,
            costs=bundle.costs,
            acceptance=bundle.acceptance,
            ranks=bundle.ranks,
            habits=bundle.habits,
            head=state.head,
            draft_models=state.draft_models,
            draft_costs=bundle.drafts[0].costs if bundle.drafts else None,
            draft_accepted=draft_accepted,
            datastore=bundle.datastore,
            predicted=predicted,
            lookahead=lookahead,
        )
        method, drafter = choice.method.name, off or choice.build(choice, parts)
    elif (method, tree, *sizes) != (None,) * 5:
        raise RequestError("a drafter of your own takes no method, tree or sizes of a tree; leave them out")
    else:
        checked = CheckedDrafter(drafter, target.vocab_size)
        drafter = off or checked
    name, has_text = method or "drafter", bundle.text.available
    shown = (on_cycle, on_prefill, lookahead, predicted, reader, draft_accepted if method == SPECINFER.name else ())
    return Request(prompt, sampler, drafter, name, end, has_text, *shown)


def _constraint_of(form: AnswerForm, specials: Mapping[str, int], constraint: Constraint | None) -> Constraint | None:
    """What an answer must follow that may call tools, or else follows `constraint`. Raises RequestError."""
    if form.use is None:
        return constraint
    if constraint is None:
        return calls_constraint(form, specials, None)
    if constraint.kind != "json_schema":
        raise RequestError("constraint may be a JSON schema where tools are offered, and nothing else; omit the tools")
    return calls_constraint(form, specials, json.loads(constraint.source))


def _stop_strings(bundle: OpenBundle, stop: str | Sequence[str]) -> tuple[tuple[str, ...], list[int]]:
    """Returns the stop strings, and the ids of those that are special tokens, which no text shows. Raises
    RequestError."""
    given = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Sequence) else None
    if given is None or not all(isinstance(string, str) for string in given):
        raise RequestError(f"stop is {short_repr(stop)}, but must be a string or a list of strings")
    if len(given) > MOST_STRINGS:
        raise RequestError(f"stop has {len(given)} strings, but at most {MOST_STRINGS} can be looked for")
    for string in given:
        if not 1 <= len(string) <= LONGEST_STRING:
            raise RequestError(
                f"the stop string {short_repr(string)} has {len(string)} characters, but must have 1 to "
                f"{LONGEST_STRING}"
            )
    if given and not bundle.text.available:
        raise RequestError("stop takes strings, but the bundle has no tokenizer; use stop_token_ids")
    special = {string: bundle.text.special_id(string) for string in given}
    strings = tuple(dict.fromkeys(string for string in given if special[string] is None))
    return strings, [token for token in special.values() if token is not None]


def _predicted_ids(bundle: OpenBundle, prediction: str | Sequence[int]) -> list[int]:
    """The ids of a text that may be in the output. Raises RequestError."""
    vocab = bundle.manifest.target.vocab_size
    if isinstance(prediction, str):  # the tokenizer may have tokens beyond the vocabulary, which are never drawn
        return [token for token in bundle.text.encode_rendered(prediction) if token < vocab]
    ids = checked_ids("prediction", prediction)
    if wrong := [token for token in ids if not 0 <= token < vocab]:
        raise RequestError(f"prediction holds the id {short_repr(wrong[0])}, outside the vocabulary of {vocab}")
    return ids


def _sampling_params(
    sampling: SamplingParams | None, settings: dict[str, Any], defaults: SamplingDefaults
) -> SamplingParams:
    """Returns `sampling` with the keyword settings, or the model's defaults with them; a setting that is None is left
    out. Raises RequestError for one that is unknown or in both."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(set(settings) - known):
        raise RequestError(f"unknown setting {unknown[0]!r}; sampling takes {', '.join(sorted(known))}")
    settings = {name: value for name, value in settings.items() if value is not None}
    if sampling is None:
        return SamplingParams(**{"seed": secrets.randbits(32), **dataclasses.asdict(defaults), **settings})
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is {short_repr(sampling)}, but must be a SamplingParams")
    if both := [name for name in settings if getattr(sampling, name) != getattr(SamplingParams(), name)]:
        raise RequestError(f"{both[0]} is set twice, as a keyword and in sampling; leave one of them out")
    return dataclasses.replace(sampling, **settings)
