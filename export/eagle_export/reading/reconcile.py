"""Where the parts of a target's checkpoint contradict each other: decided once, before anything else reads it.

Tensors are what a model computes with, so they count more than config.json. Every decision is noted in a sentence,
which the export gives as a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import ADAPTER, EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.reading.stored_tensors import StoredTensor, same_values
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.text.tokenizer import Text

# Segments that torch.compile, DDP and FSDP put into names; PEFT's and DDP's that stand before all others.
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
ADAPTED = "base_model.model."
MARKS = ("_orig_mod.", "module.", ADAPTED)  # one of which each of these names holds
# Tensors beside quantised weights: of GPTQ and AWQ, MLX, compressed-tensors, fp8 and bitsandbytes.
QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|SCB|weight_(packed|scale|scale_inv|zero_point)|weight\.(absmax|(nested_)?quant_\w+))(\.|$)"
)
LORA = re.compile(r"\.(?:lora_[AB]|lora_embedding_[AB]|base_layer|modules_to_save)\b")
BACKBONE = "model."  # which AutoModel leaves out


def reconciled(target: Checkpoint) -> Checkpoint:
    """Returns a target's checkpoint whose config and names agree with its tensors, with a note of each decision. No
    values of tensors are read: with_one_table decides about an LM head. Raises ExportError for adapters that are not
    merged and quantised weights."""
    tensors, notes = _plain_names(target)
    config = _agreeing(target.config)
    if (target.folder / ADAPTER).is_file():
        notes.append(
            f"an adapter lies next to the model ({ADAPTER}) and is left out; if it belongs to it, merge it (PEFT: "
            "merge_and_unload(), then save_pretrained) and export that"
        )
    if notes:
        notes = [f"{target.folder}: {note}" for note in notes]
    return replace(target, config=config, tensors=tensors, notes=(*target.notes, *notes))


def check_ends(target: Checkpoint, config: Any, norm: str) -> None:
    """Raises ExportError unless embedding, LM head and last layer are there, with the config's shapes. norm: name of a
    norm of each layer."""
    hidden = int(config.hidden_size)
    target.require(EMBEDDING, (int(config.vocab_size), hidden), stated=True)
    if LM_HEAD in target.tensors:
        target.require(LM_HEAD, (int(config.vocab_size), hidden), stated=True)
    elif not config.tie_word_embeddings:
        raise ExportError(
            f"{target.folder}: tensor {LM_HEAD!r} is missing, and config.json does not tie it to the embedding; give "
            "the complete model, or, if its LM head is its embedding, set tie_word_embeddings to true there"
        )
    last = f"model.layers.{config.num_hidden_layers - 1}.{norm}.weight"
    target.require(last, (hidden,), stated=True)


def with_one_table(target: Checkpoint, ties: bool) -> Checkpoint:
    """Returns a target that has an LM head without it where that is a copy of the embedding to which its config ties
    it (ties); else with a config that ties nothing, and a note if the two differ. Reads both if the config ties."""
    embedding, lm_head = target.tensors.get(EMBEDDING), target.tensors.get(LM_HEAD)
    if embedding is None or lm_head is None:
        return target
    if ties and same_values(embedding, lm_head):
        return replace(target, tensors={name: each for name, each in target.tensors.items() if name != LM_HEAD})
    note = (
        f"{target.folder}: config.json ties the LM head to the embedding, but {LM_HEAD!r} is stored too and differs; "
        "it is used as it is stored, as transformers 5 does"
    )
    untied = {**target.config, "tie_word_embeddings": False}
    return replace(target, config=untied, notes=(*target.notes, *([note] if ties else [])))


def rowless_note(target: Checkpoint, text: Text, vocab: int) -> str | None:
    """Returns that a target's tokenizer knows tokens for which its embedding of `vocab` rows has none; None if all
    have one."""
    beyond = sorted((number, token) for token, number in (text.ids_of_tokens() or {}).items() if number >= vocab)
    if not beyond:
        return None
    number, token = beyond[0]
    what = f"the token {short_repr(token)} (id {number})"
    if len(beyond) > 1:
        what = f"{len(beyond)} tokens, such as {short_repr(token)} (id {number}),"
    return (
        f"{target.folder}: its tokenizer has {what} for which the model has no row; a prompt that holds one is refused"
    )


def unwrapped(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], str | None]:
    """Returns tensors under names without what training programs put into them, and an example of that; None if there
    is none, or if two tensors would have one name."""
    together = "\n".join(tensors)  # a search in which is many times as fast as one in each
    if not any(mark in together for mark in MARKS):
        return dict(tensors), None
    names = {name: WRAPPERS.sub("", name).removeprefix(ADAPTED) for name in tensors}
    changed = next((name for name, plain in names.items() if name != plain), None)
    if changed is None or len(set(names.values())) < len(names):
        return dict(tensors), None
    plain = names[changed]
    extra = changed.removesuffix(plain) if changed.endswith(plain) else WRAPPERS.search(changed)[0]  # type: ignore[index]
    return {names[name]: tensor for name, tensor in tensors.items()}, extra


def _plain_names(target: Checkpoint) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors under the names that a causal language model has, and what was left out or added."""
    lora = next((name for name in target.tensors if LORA.search(name)), None)
    if lora is not None:
        raise ExportError(
            f"{target.folder} holds an adapter that is not merged (tensor {lora!r}); merge it into the model "
            "(PEFT: merge_and_unload(), then save_pretrained) and export that"
        )
    if (scales := next((name for name in target.tensors if QUANTISED.search(name)), None)) is not None:
        raise ExportError(
            f"{target.folder}: the weights are quantised already (tensor {scales!r}); export the original checkpoint"
        )
    notes = []
    tensors, extra = unwrapped(target.tensors)
    if extra is not None:
        notes.append(f"names of tensors hold {extra!r}, which a training program put there; it is left out")
    if EMBEDDING not in tensors and EMBEDDING.removeprefix(BACKBONE) in tensors:
        tensors = {name if name == LM_HEAD else BACKBONE + name: tensor for name, tensor in tensors.items()}
        notes.append(f"names of tensors lack {BACKBONE!r}, as the model was saved without its class; it is added")
    return tensors, notes


def _agreeing(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The config without values that say nothing."""
    config = dict(stated)
    if not config.get("quantization_config", True):
        del config["quantization_config"]  # null or {}: nothing is quantised
    if config.get("rope_theta", True) is None:
        del config["rope_theta"]
    if config.get("sliding_window") in (0, -1):
        config["sliding_window"] = None
    vocab, pad = config.get("vocab_size"), config.get("pad_token_id")
    if type(pad) is int and type(vocab) is int and not 0 <= pad < vocab:
        config["pad_token_id"] = None  # fills batches in training; there is no such row
    return config
