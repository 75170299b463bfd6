"""What a caller asks of one answer: its settings are checked, and its sampler and its drafter are made."""

from __future__ import annotations

import dataclasses
import difflib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from eagle_runtime.app.output import End, end_of
from eagle_runtime.app.prompt_scores import PromptScores
from eagle_runtime.app.settings import Settings
from eagle_runtime.base.arguments import checked_ids, checked_int, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import SamplingDefaults
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.generate import Cycle
from eagle_runtime.drafting.checked_drafter import CheckedDrafter
from eagle_runtime.drafting.choose import Sizes, choose_drafter
from eagle_runtime.drafting.matches import PredictedText
from eagle_runtime.drafting.method import Parts
from eagle_runtime.drafting.vanilla import NoDraft
from eagle_runtime.opening.opened import OpenBundle
from eagle_runtime.sampling.answer_grammar import answer_constraint
from eagle_runtime.sampling.grammar_matcher import Lookahead, Matcher
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.text.answer_reader import AnswerReader
from eagle_runtime.text.channel_reader import reader_of

if TYPE_CHECKING:
    from typing import Unpack

MOST_LOG_PROBS = 20  # likeliest tokens of a position, as many as OpenAI's API returns


@dataclass(frozen=True, slots=True)
class Request:
    """One answer. method: the drafter's name in the figures; on_cycle: called after each verification; on_prefill:
    called with the tokens of the prompt that are read, and all of them; lookahead: the drafter's view of a constraint;
    predicted: a text that is expected in it; reader: takes it apart; draft_accepted: counts, for each of several draft
    models, accepted tokens that it drafted (specinfer.py); scores: of the prompt's tokens."""

    prompt: list[int]
    sampler: Sampler
    drafter: Drafter
    method: str
    end: End
    on_cycle: Callable[[Cycle], None] | None
    on_prefill: Callable[[int, int], None] | None
    lookahead: Lookahead | None = None
    predicted: PredictedText | None = None
    reader: AnswerReader | None = None
    draft_accepted: Sequence[int] = ()
    scores: PromptScores | None = None


def request_of(
    bundle: OpenBundle, state: DecodingState, prompt: list[int], context: int, **settings: Unpack[Settings]
) -> Request:
    """The settings of `EagleModel.stream`, checked. state: the one that shall answer; prompt: ids that fit `context`,
    which counts the answer too. Raises RequestError."""
    params = _sampling_params(settings, bundle.manifest.sampling)
    vocab = bundle.manifest.target.vocab_size
    end = end_of(settings, context - len(prompt), bundle.manifest.target.eos_token_ids, bundle.text)
    log_probs, of_prompt = (_most_log_probs(settings, name) for name in ("logprobs", "prompt_logprobs"))
    matcher, reader = _followed(bundle, end, settings)
    late = end.eos | end.stop_ids
    sampler = Sampler(params, prompt, vocab, late=late, least=end.least, log_probs=log_probs, matcher=matcher)
    lookahead = None if matcher is None else Lookahead(matcher)
    expected = settings.get("prediction")
    predicted = None if expected is None else PredictedText(prompt, _predicted_ids(bundle, expected))
    drafter, method, draft_accepted = _chosen(bundle, state, sampler, predicted, lookahead, settings)
    return Request(
        prompt=prompt,
        sampler=sampler,
        drafter=NoDraft(bundle.costs) if bundle.drafts_are_off else drafter,  # drafts would change the output
        method=method,
        end=end,
        on_cycle=settings.get("on_cycle"),
        on_prefill=settings.get("on_prefill"),
        lookahead=lookahead,
        predicted=predicted,
        reader=reader,
        draft_accepted=draft_accepted,
        scores=None if of_prompt is None else PromptScores(prompt, of_prompt, bundle.text),
    )


def _most_log_probs(settings: Settings, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    """How many likeliest tokens a setting asks for. Raises RequestError."""
    value = settings.get(name)
    return None if value is None else checked_int(name, value, 0, MOST_LOG_PROBS)


def _chosen(
    bundle: OpenBundle,
    state: DecodingState,
    sampler: Sampler,
    predicted: PredictedText | None,
    lookahead: Lookahead | None,
    settings: Settings,
) -> tuple[Drafter, str, Sequence[int]]:
    """The drafter that is asked for by its method and tree, or given; its name in the figures, and draft_accepted as in
    Request. Raises RequestError."""
    method, tree = settings.get("method"), settings.get("tree")
    sizes = Sizes(settings.get("total_token"), settings.get("depth"), settings.get("draft_top_k"))
    if (own := settings.get("drafter")) is not None:
        if (method, tree, *sizes) != (None,) * 5:
            raise RequestError("a drafter of your own takes no method, tree or sizes of a tree; leave them out")
        return CheckedDrafter(own, bundle.manifest.target.vocab_size), "drafter", ()
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
        draft_accepted=[0] * len(state.draft_models),
        datastore=bundle.datastore,
        predicted=predicted,
        lookahead=lookahead,
    )
    several = choice.method.proposer == "draft models"
    return choice.build(choice, parts), choice.method.name, parts.draft_accepted if several else ()


def _followed(bundle: OpenBundle, end: End, settings: Settings) -> tuple[Matcher | None, AnswerReader | None]:
    """What keeps an answer to its constraint, and what takes the answer to a chat apart. Raises RequestError."""
    constraint, form, reader = settings.get("constraint"), settings.get("form"), None
    if form is not None:
        specials = bundle.text.specials_in(form.format.texts)
        reader = reader_of(form, specials)
        constraint = answer_constraint(form, specials, constraint)
    if constraint is None:
        return None, reader
    if settings.get("ignore_eos") or end.least:
        name = "ignore_eos" if settings.get("ignore_eos") else "min_new_tokens"
        raise RequestError(f"{name} cannot be combined with a constraint, which says where the text ends; omit one")
    return bundle.grammars.matcher(constraint, end.eos | end.stop_ids), reader


def _predicted_ids(bundle: OpenBundle, prediction: str | Sequence[int]) -> list[int]:
    """The ids of a text that may be in the output. Raises RequestError."""
    vocab = bundle.manifest.target.vocab_size
    if isinstance(prediction, str):  # the tokenizer may have tokens beyond the vocabulary, which are never drawn
        return [token for token in bundle.text.encode_rendered(prediction) if token < vocab]
    ids = checked_ids("prediction", prediction)
    if wrong := [token for token in ids if not 0 <= token < vocab]:
        raise RequestError(f"prediction holds the id {short_repr(wrong[0])}, outside the vocabulary of {vocab}")
    return ids


def _sampling_params(settings: Settings, defaults: SamplingDefaults) -> SamplingParams:
    """Returns the setting `sampling` with those of the same names as its fields, or the model's defaults with them; a
    setting that is None is left out. Raises RequestError for one that is unknown or in both."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    if unknown := sorted(settings.keys() - (names := Settings.__annotations__).keys()):
        near = difflib.get_close_matches(unknown[0], names, 1, cutoff=0.75)
        advice = f"did you mean {near[0]}?" if near else f"settings are {', '.join(names)}"
        raise RequestError(f"unknown setting {short_repr(unknown[0])}; {advice}")
    given: dict[str, Any] = {name: value for name, value in settings.items() if name in known and value is not None}
    sampling = settings.get("sampling")
    if sampling is None:
        return SamplingParams(**{"seed": secrets.randbits(32), **dataclasses.asdict(defaults), **given})
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling is {short_repr(sampling)}, but must be a SamplingParams")
    if both := [name for name in given if getattr(sampling, name) != getattr(SamplingParams(), name)]:
        raise RequestError(f"{both[0]} is set twice, as a keyword and in sampling; leave one of them out")
    return dataclasses.replace(sampling, **given)
