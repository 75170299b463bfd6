"""A target and a head that belong together: read, checked against each other, and turned into two graphs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from transformers import LlamaConfig

from eagle_export.checkpoint import Checkpoint, open_checkpoint, read_json
from eagle_export.errors import ExportError
from eagle_export.graphs import DraftGraph, TargetGraph, build_head
from eagle_export.heads.config import HeadConfig, read_head_config, rope_settings
from eagle_export.trace import Expected, Layout, build_fake, trace_draft, trace_target
from eagle_export.weights import Weight, attach, simplify

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
STORED = ("F64", "F32", "F16", "BF16")  # anything else is quantised: its numbers mean nothing without their scales


@dataclass(frozen=True, slots=True)
class Pair:
    """Both checkpoints and what was concluded from them. eos: ids that end a text. own_embedding: the head's
    embedding is not the target's, so it is stored beside it."""

    target: Checkpoint
    head: Checkpoint
    config: LlamaConfig
    head_config: HeadConfig
    eos: tuple[int, ...]
    d2t: torch.Tensor | None
    own_embedding: bool

    @property
    def tied(self) -> bool:
        """Whether the target's LM head is its embedding."""
        return LM_HEAD not in self.target.tensors

    @property
    def head_dim(self) -> int:
        """Of the target's attention."""
        assert self.config.head_dim is not None  # filled in by transformers
        return int(self.config.head_dim)

    @property
    def num_kv_heads(self) -> int:
        """Of the target's attention."""
        assert self.config.num_key_value_heads is not None  # filled in by transformers
        return int(self.config.num_key_value_heads)


def open_pair(target_folder: Path, head_folder: Path) -> Pair:
    """Open both folders and check that they fit, before any long work. Raises ExportError."""
    target, head = open_checkpoint(target_folder), open_checkpoint(head_folder)
    config = _llama_config(target)
    head_config = read_head_config(head, int(config.hidden_size), int(config.num_hidden_layers), int(config.vocab_size))
    return Pair(
        target=target,
        head=head,
        config=config,
        head_config=head_config,
        eos=_eos_ids(target),
        d2t=_vocabulary_map(head, head_config),
        own_embedding=_own_embedding(target, head, head_config),
    )


def build_graphs(pair: Pair, precision: str, top_k: int) -> tuple[ir.Model, ir.Model]:
    """Trace target and head and attach their weights. Raises ExportError if any tensor of either file is left over.

    precision: "fp32" or "fp16". top_k: children per row computed by the head's graph."""
    dtype = DTYPES[precision]
    modules = _target_module(pair, dtype), _draft_module(pair, dtype, top_k)
    weights = weight_sources(pair)
    for checkpoint, module, sources in zip((pair.target, pair.head), modules, weights, strict=True):
        _check_all_used(checkpoint, module, sources)
    config, head = pair.config, pair.head_config
    layers = int(config.num_hidden_layers)
    target = trace_target(
        modules[0],
        Layout(layers, pair.num_kv_heads, pair.head_dim, dtype),
        Expected(attention=layers, rms_norm=2 * layers + 1),
    )
    draft = trace_draft(
        modules[1],
        head.hidden_size,
        Layout(head.num_layers, head.num_kv_heads, head.head_dim, dtype),
        Expected(attention=head.num_layers, rms_norm=4 if head.kind == "eagle3" else 2 * head.num_layers - 1),
    )
    for model, sources in zip((target, draft), weights, strict=True):
        attach(model, sources)
        simplify(model)
    return target, draft


def weight_sources(pair: Pair) -> tuple[dict[str, Weight], dict[str, Weight]]:
    """Parameter name -> weight, for the target's graph and the head's.

    The head's own tensors get the prefix "head."; what it borrows keeps the target's name, so that both graphs call
    the same weight the same."""
    target_names = set(pair.target.tensors) - _rotary_buffers(pair.target)
    target = {name: Weight(name, pair.target.tensors[name]) for name in target_names}
    if pair.tied:
        target[LM_HEAD] = target[EMBEDDING]
    elsewhere = _rotary_buffers(pair.head) | ({"d2t", "t2d"} if pair.head_config.kind == "eagle3" else set())
    draft = {
        f"head.{name}": Weight(f"head.{name}", tensor)
        for name, tensor in pair.head.tensors.items()
        if name not in elsewhere
    }
    if not pair.own_embedding:
        draft["head.embed_tokens.weight"] = target[EMBEDDING]
    if pair.head_config.kind == "eagle1":
        draft["head.lm_head.weight"] = target[LM_HEAD]
    else:  # its fc reads taps, so it stands in the target's graph
        for name in ("fc.weight", "fc.bias"):
            if f"head.{name}" in draft:
                target[f"head_{name}"] = draft.pop(f"head.{name}")
    return target, draft


def _target_module(pair: Pair, dtype: torch.dtype) -> torch.nn.Module:
    head = pair.head_config

    def build() -> TargetGraph:
        fc = None
        if head.kind == "eagle3":
            fc = torch.nn.Linear(len(head.taps) * head.target_hidden_size, head.hidden_size, bias=head.fc_bias)
        return TargetGraph(pair.config, head.taps, fc)

    with _accepted_by_transformers(pair.target):
        return build_fake(build, dtype)


def _draft_module(pair: Pair, dtype: torch.dtype, top_k: int) -> torch.nn.Module:
    def build() -> DraftGraph:
        head = build_head(pair.head_config)
        if pair.head_config.kind == "eagle3":
            del head.fc
        return DraftGraph(head, top_k)

    with _accepted_by_transformers(pair.head):
        module = build_fake(build, dtype)
    if pair.d2t is not None:
        module.d2t = pair.d2t[:, None]
    return module


def _check_all_used(checkpoint: Checkpoint, module: torch.nn.Module, weights: Mapping[str, Weight]) -> None:
    """Every weight belongs to a parameter of its shape and every parameter has a weight; a leftover tensor would mean
    that the checkpoint is of a kind this export does not know, and decoding would be silently wrong."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if unused := sorted(set(weights) - set(parameters)):
        raise ExportError(
            f"{weights[unused[0]].source.file}: tensor {weights[unused[0]].source.name!r} is not used by this kind of "
            "model; the checkpoint is of a variant that is not supported"
        )
    if missing := sorted(set(parameters) - set(weights)):
        raise ExportError(
            f"{checkpoint.folder}: tensor {missing[0].removeprefix('head.')!r} is missing; the checkpoint is "
            "incomplete or of another kind"
        )
    for name, parameter in parameters.items():
        source = weights[name].source
        if source.shape != tuple(parameter.shape):
            raise ExportError(
                f"{source.file}: tensor {source.name!r} has shape {list(source.shape)}, but the config asks for "
                f"{list(parameter.shape)}; config and weights do not belong together"
            )
        if source.dtype not in STORED:
            raise ExportError(
                f"{source.file}: tensor {source.name!r} is stored as {source.dtype}, not as one of "
                f"{', '.join(STORED)}; export the original checkpoint"
            )


@contextmanager
def _accepted_by_transformers(checkpoint: Checkpoint) -> Iterator[None]:
    """It validates configs with errors of its own kinds, and some values only where a model is built."""
    try:
        yield
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        where = checkpoint.folder / "config.json"
        raise ExportError(f"{where}: transformers refuses the config ({what}); compare it with the original") from None


def _llama_config(target: Checkpoint) -> LlamaConfig:
    where = target.folder / "config.json"
    if target.config.get("model_type") != "llama":
        raise ExportError(
            f"{where}: model_type is {target.config.get('model_type')!r}, but only 'llama' targets are supported"
        )
    if "quantization_config" in target.config:
        raise ExportError(f"{where}: the weights are quantised already; export the original checkpoint")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        target.integer(key)
    for key in ("head_dim", "max_position_embeddings"):
        target.integer(key, 1)
    heads = target.integer("num_attention_heads")
    kv_heads = target.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ExportError(f"{where}: {heads} heads cannot share {kv_heads} key/value heads; download the config again")
    rope_settings(target.config, str(where))
    with _accepted_by_transformers(target):
        config = LlamaConfig.from_dict(dict(target.config))
    hidden = int(config.hidden_size)
    target.require(EMBEDDING, (int(config.vocab_size), hidden))
    if LM_HEAD in target.tensors:
        target.require(LM_HEAD, (int(config.vocab_size), hidden))
    elif not config.tie_word_embeddings:
        raise ExportError(f"{target.folder}: tensor {LM_HEAD!r} is missing and the config does not tie it")
    target.require(f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight", (hidden,))
    return config


def _eos_ids(target: Checkpoint) -> tuple[int, ...]:
    """One id or a list, from generation_config.json, else config.json."""
    path = target.folder / "generation_config.json"
    value: Any = read_json(path).get("eos_token_id") if path.is_file() else None
    if value is None:
        value = target.config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ExportError(f"{path}: eos_token_id is {value!r}, but must be an id or a list of ids")
    return tuple(ids)


def _vocabulary_map(head: Checkpoint, config: HeadConfig) -> torch.Tensor | None:
    """d2t [Vd], offsets from draft to target ids, checked against t2d [V] if the file has it."""
    if config.kind != "eagle3":
        return None
    size, vocab = config.draft_vocab_size, config.vocab_size
    if "d2t" not in head.tensors:
        if size != vocab:
            raise ExportError(
                f"{head.folder}: lm_head has {size} rows for a vocabulary of {vocab}, but tensor 'd2t' is missing; "
                "the checkpoint is incomplete"
            )
        return None
    stored = head.require("d2t", (size,))
    if stored.dtype not in ("I32", "I64"):
        raise ExportError(f"{stored.file}: tensor 'd2t' is stored as {stored.dtype}, but must hold whole numbers")
    d2t = stored.read().to(torch.int64)
    ids = d2t + torch.arange(size)
    if bool(((ids < 0) | (ids >= vocab)).any()):
        raise ExportError(f"{head.folder}: d2t points outside the target's vocabulary of {vocab}; wrong head")
    if "t2d" in head.tensors:
        t2d = head.require("t2d", (vocab,)).read().to(torch.bool)
        if int(t2d.sum()) != size or not bool(t2d[ids].all()):
            raise ExportError(f"{head.folder}: d2t and t2d name different tokens; the checkpoint is damaged")
    return d2t


def _own_embedding(target: Checkpoint, head: Checkpoint, config: HeadConfig) -> bool:
    """Whether the head's embedding differs from the target's. Published heads carry a copy, or none."""
    name = "embed_tokens.weight"
    if name not in head.tensors:
        target.require(EMBEDDING, (config.vocab_size, config.hidden_size))
        return False
    own, theirs = head.require(name, (config.vocab_size, config.hidden_size)), target.tensors[EMBEDDING]
    if own.shape != theirs.shape or not {own.dtype, theirs.dtype} <= set(STORED):
        return True
    return not torch.equal(own.read().float(), theirs.read().float())


def _rotary_buffers(checkpoint: Checkpoint) -> set[str]:
    """inv_freq tables that old checkpoints carry: they follow from the config."""
    return {name for name in checkpoint.tensors if name.endswith("rotary_emb.inv_freq")}
