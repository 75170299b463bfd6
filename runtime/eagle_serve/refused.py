"""Fields that would change the answer if they were honoured, and are not: refused unless they say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eagle_serve.errors import unsupported

Endpoint = Literal["chat", "completions"]
OFF, ON, ONE, ZERO, UNSET = (False,), (True,), (1,), (0,), ()
EMPTY: tuple[object, ...] = ("", [], {})
NO_TEXT, NO_LIST, NO_OBJECT = ((value,) for value in EMPTY)
# The orders of llama.cpp's samplers that its clients spell out, being its defaults.
ORDER = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
DEFAULT_ORDERS = (ORDER, [name for name in ORDER if name != "top_n_sigma"], "edskypmxt", "edkypmxt")
# Fields that say how penalties count, which ask nothing where there are none. Field -> values that never ask anything.
OF_PENALTIES: dict[str, tuple[object, ...]] = {
    "repeat_last_n": (-1,),
    "penalty_last_n": (-1,),
    "repetition_penalty_range": (-1, 0),
    "penalize_nl": OFF,
}
# Values that ask for nothing, and the fields of which they do: of OpenAI's API, and of the servers and front ends that
# are named.
NEUTRAL: dict[str, tuple[object, ...]] = {
    name: values
    for values, names in (
        # OpenAI and Azure
        (UNSET, "audio web_search_options moderation"),
        (NO_TEXT, "suffix"),
        (NO_LIST, "data_sources"),
        # vLLM and SGLang
        (UNSET, "allowed_token_ids prompt_embeds truncate_prompt_tokens guided_json guided_whitespace_pattern"),
        (UNSET, "repetition_detection"),
        (OFF, "use_beam_search early_stopping prompt_logprobs include_stop_str_in_output return_token_ids"),
        (OFF, "return_tokens_as_token_ids return_logprob continue_final_message guided_json_object no_stop_trim"),
        (ON, "skip_special_tokens include_reasoning separate_reasoning add_generation_prompt"),
        ((True, False), "spaces_between_special_tokens"),  # of special tokens, which are skipped
        (ONE, "length_penalty"),
        ((-1,), "thinking_token_budget"),
        (NO_TEXT, "chat_template guided_regex guided_grammar structural_tag regex ebnf custom_logit_processor"),
        (NO_TEXT, "lora_path lora_adapter"),
        (NO_LIST, "bad_words logprob_token_ids documents guided_choice logits_processors"),
        (NO_OBJECT, "structured_outputs vllm_xargs custom_params"),
        (EMPTY, "stop_regex"),
        # llama.cpp
        (ZERO, "mirostat mirostat_mode xtc_probability dry_multiplier dynatemp_range n_indent"),
        (ONE, "typical_p typ_p tfs_z"),
        ((-1, 0), "top_n_sigma t_max_predict_ms"),
        ((-1,), "adaptive_target reasoning_budget reasoning_budget_tokens"),
        ((0, 1), "min_keep"),
        ((*EMPTY, *DEFAULT_ORDERS), "samplers"),
        (OFF, "post_sampling_probs"),
        (ON, "parse_tool_calls"),
        (("auto", "deepseek"), "reasoning_format"),
        (NO_TEXT, "grammar"),
        (NO_OBJECT, "json_schema"),
        (NO_LIST, "lora"),
        # Hugging Face's TGI, transformers and text-generation-webui
        (UNSET, "top_h"),
        (OFF, "temperature_last ban_eos_token watermark return_full_text truncate details decoder_input_details"),
        (ON, "do_sample"),
        (ONE, "num_beams encoder_repetition_penalty guidance_scale rep_pen"),
        (ZERO, "penalty_alpha top_a epsilon_cutoff eta_cutoff smoothing_factor no_repeat_ngram_size min_length"),
        (ZERO, "min_new_tokens top_n_tokens"),
        (NO_TEXT, "negative_prompt custom_token_bans adapter_id"),
        (EMPTY, "banned_strings"),
        # Ollama, Mistral, DeepSeek, Anthropic
        (UNSET, "think"),
        (OFF, "raw safe_prompt"),
        ((-1,), "thinking_budget"),
        (NO_TEXT, "format system template"),
        (NO_LIST, "context images"),
        (NO_OBJECT, "options"),
        # this server's own, which stands in `eagle`
        (UNSET, "constraint"),
    )
    for name in names.split()
}
FORM = "send response_format, or eagle.constraint with a json_schema, regex, lark or choice"
INSTEAD = dict.fromkeys(
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "structured_outputs")
    + ("constraint",)
    + ("structural_tag", "json_schema", "regex", "ebnf", "grammar", "format"),
    FORM,
)

EMBEDDINGS = "this model writes text and makes no embeddings; ask a server of an embedding model"
# Addresses of other kinds of models, and those that change or fetch models.
TEXT_ALONE = "this model reads and writes text alone"
NOTHING_KEPT = "nothing is kept on this server from one request to the next"
ONE_MODEL = "this server has the model that it was started with; eagle-export makes others"
ADDRESSES = {
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings"), EMBEDDINGS),
    **dict.fromkeys(("/v1/rerank", "/rerank"), "this model writes text and ranks no documents"),
    **dict.fromkeys(("/v1/images/generations", "/v1/audio/speech", "/v1/audio/transcriptions"), TEXT_ALONE),
    **dict.fromkeys(("/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads", "/v1/conversations"), NOTHING_KEPT),
    **dict.fromkeys(("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"), ONE_MODEL),
    "/v1/moderations": "this model writes text and judges none",
    "/infill": "code is filled in through /v1/completions, with the model's own tokens in the prompt",
}


def neutral(endpoint: Endpoint) -> dict[str, tuple[object, ...]]:
    """Returns NEUTRAL with the fields whose neutral value depends on the endpoint: prompts of a chat have the special
    tokens that the template writes, others those that the tokenizer adds."""
    if endpoint == "chat":
        own: dict[str, tuple[object, ...]] = {"add_special_tokens": OFF, "prompt": (), "echo": OFF}
        return {**NEUTRAL, **OF_PENALTIES, **own, "thinking_budget": (-1, 0)}
    own = {"add_special_tokens": (True,), "messages": (), "thinking": (), "reasoning": ()}
    return {**NEUTRAL, **OF_PENALTIES, **own}


def refuse(given: Mapping[str, Any], endpoint: Endpoint, own_penalty: float) -> None:
    """Raises ApiError naming the first field that is refused. given: the fields of a request that are not null.
    own_penalty: the model's repetition penalty, where a request has none."""
    known = neutral(endpoint)
    if _no_penalties(given, own_penalty):
        known = {name: values for name, values in known.items() if name not in OF_PENALTIES}
    for name, value in given.items():
        if name in known and not _is_one_of(value, known[name]):
            raise unsupported(name, f"is not supported; {INSTEAD.get(name, 'leave it out')}")
    if "modalities" in given and given["modalities"] != ["text"]:
        raise unsupported("modalities", "may be ['text'] alone: this model writes text")


def _no_penalties(given: Mapping[str, Any], own_penalty: float) -> bool:
    """Whether nothing is penalised; a request that does not say has the model's own penalty."""
    repetition = [given[name] for name in ("repeat_penalty", "repetition_penalty") if name in given] or [own_penalty]
    added = [given.get(name, 0) for name in ("presence_penalty", "frequency_penalty")]
    return all(value == 1 for value in repetition) and all(value == 0 for value in added)


def _is_one_of(value: object, values: tuple[object, ...]) -> bool:
    """Whether a value asks for nothing; false is not 0 here."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
