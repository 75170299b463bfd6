"""Fields that would change the answer if they were honoured, and are not: refused unless they say nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from eagle_serve.errors import unsupported

Endpoint = Literal["chat", "completions"]
OFF, ONE, ZERO = (False,), (1,), (0,)
EMPTY: tuple[object, ...] = ("", [], {})
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
# Field -> the values that ask for nothing. Of OpenAI's API, and of the servers and front ends that are named.
NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI and Azure
    "suffix": ("",),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "data_sources": ([],),
    # vLLM and SGLang
    "use_beam_search": OFF,
    "length_penalty": ONE,
    "early_stopping": OFF,
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": OFF,
    "prompt_embeds": (),
    "include_stop_str_in_output": OFF,
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # of special tokens, which are skipped
    "truncate_prompt_tokens": (),
    "return_token_ids": OFF,
    "return_tokens_as_token_ids": OFF,
    "logprob_token_ids": ([],),
    "return_logprob": OFF,
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "documents": ([],),
    "chat_template": ("",),
    "continue_final_message": OFF,
    "add_generation_prompt": (True,),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json_object": OFF,
    "structural_tag": ("",),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "vllm_xargs": ({},),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "regex": ("",),
    "ebnf": ("",),
    "stop_regex": EMPTY,
    "no_stop_trim": OFF,
    "custom_logit_processor": ("",),
    "custom_params": ({},),
    "lora_path": ("",),
    "lora_adapter": ("",),
    # llama.cpp
    "grammar": ("",),
    "json_schema": ({},),
    "mirostat": ZERO,
    "mirostat_mode": ZERO,
    "typical_p": ONE,
    "typ_p": ONE,
    "tfs_z": ONE,
    "xtc_probability": ZERO,
    "dry_multiplier": ZERO,
    "dynatemp_range": ZERO,
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
    "min_keep": (0, 1),
    "samplers": (*EMPTY, *DEFAULT_ORDERS),
    "n_indent": ZERO,
    "t_max_predict_ms": (-1, 0),
    "post_sampling_probs": OFF,
    "reasoning_budget": (-1,),
    "reasoning_budget_tokens": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "parse_tool_calls": (True,),
    "lora": ([],),
    # Hugging Face's TGI, transformers and text-generation-webui
    "do_sample": (True,),
    "num_beams": ONE,
    "penalty_alpha": ZERO,
    "top_a": ZERO,
    "top_h": (),
    "epsilon_cutoff": ZERO,
    "eta_cutoff": ZERO,
    "smoothing_factor": ZERO,
    "temperature_last": OFF,
    "no_repeat_ngram_size": ZERO,
    "encoder_repetition_penalty": ONE,
    "guidance_scale": ONE,
    "negative_prompt": ("",),
    "ban_eos_token": OFF,
    "custom_token_bans": ("",),
    "banned_strings": EMPTY,
    "min_length": ZERO,
    "min_new_tokens": ZERO,
    "watermark": OFF,
    "return_full_text": OFF,
    "truncate": OFF,
    "adapter_id": ("",),
    "details": OFF,
    "decoder_input_details": OFF,
    "top_n_tokens": ZERO,
    "rep_pen": ONE,
    # Ollama, Mistral, DeepSeek, Anthropic
    "format": ("",),
    "options": ({},),
    "system": ("",),
    "template": ("",),
    "context": ([],),
    "raw": OFF,
    "think": (),
    "images": ([],),
    "safe_prompt": OFF,
    "thinking_budget": (-1,),
    # this server's own, which stands in `eagle`
    "constraint": (),
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
