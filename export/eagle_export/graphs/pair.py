"""A target and its draft head: opens both checkpoints, checks that they fit, and traces their graphs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensor

from eagle_export.base.errors import ExportError
from eagle_export.graphs.graphs import TargetGraph
from eagle_export.graphs.head_modules import MODULES
from eagle_export.graphs.trace import Expected, Layout, build_fake, trace_target
from eagle_export.graphs.weights import Weight, attach, store_transposed
from eagle_export.heads.assistant import groups_of
from eagle_export.heads.assistant_config import TOKEN_ORDERING
from eagle_export.heads.block_layouts import fitted
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS, Kind, placed
from eagle_export.heads.layout import HeadLayout
from eagle_export.heads.layouts import official
from eagle_export.heads.prediction import prediction_layers, without_prediction_layers
from eagle_export.heads.reading import read_head_config, stored_map
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint, is_table, open_checkpoint
from eagle_export.reading.families.family import Config, Family, Rows, Windows
from eagle_export.reading.families.generation import Generation, generation_of
from eagle_export.reading.families.registry import accepted_by_transformers, family_of, read_config, windows_of
from eagle_export.reading.families.target import open_target
from eagle_export.reading.reconcile import check_ends, unwrapped
from eagle_export.reading.stored_tensors import FLOATS, HalvedTensor, same_values
from eagle_export.reading.texts import read_texts, text_of
from eagle_export.recipes.graph import WINDOW
from eagle_export.recipes.routed_experts import RoutedExperts
from eagle_runtime.text.tokenizer import Text

ROTATED = re.compile(r"model\.layers\.\d+\.self_attn\.([qk])_proj\.(?:weight|bias)")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class HeadPart:
    """A head's checkpoint, with the official names, and what was derived from it. layout: how its folder is written.
    own_embedding: whether its embedding differs from the target's, so that both are stored."""

    checkpoint: Checkpoint
    layout: HeadLayout
    config: HeadConfig
    d2t: torch.Tensor | None
    own_embedding: bool

    @property
    def kind(self) -> Kind:
        return KINDS[self.config.kind]


@dataclass(frozen=True, slots=True)
class Pair:
    """A target's checkpoint and what was derived from it. texts: name -> content of its text files; text: its tokenizer
    and template. head: None for a target alone. left_out: multi-token-prediction layers of the target's folder that
    neither graph has."""

    target: Checkpoint
    family: Family
    config: Config
    texts: Mapping[str, bytes]
    text: Text
    generation: Generation
    head: HeadPart | None
    left_out: int = 0

    @property
    def tied(self) -> bool:
        """Whether the target's LM head is its embedding."""
        return LM_HEAD not in self.target.tensors

    @property
    def rows(self) -> Rows:
        """Key/value heads and their width of each layer of the target that has some."""
        return self.family.rows(self.config)

    @property
    def several_shapes(self) -> bool:
        """Whether keys of its layers differ in shape (Gemma-4)."""
        return len(set(self.rows)) > 1

    @property
    def head_dim(self) -> int:
        """Width of a head of the attention of the target's first layer."""
        return self.rows[0][1]

    @property
    def rotated(self) -> int:
        """How many numbers of a head are rotated."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        return int(self.head_dim * rope.get("partial_rotary_factor", 1.0))

    @property
    def num_kv_heads(self) -> int:
        return self.rows[0][0]

    @property
    def context(self) -> int:
        """The most tokens of a text."""
        return self.family.context(self.config)

    @property
    def windows(self) -> Windows:
        """For each layer of the target the number of keys that a row sees, itself included; None for all."""
        return windows_of(self.family, self.config)

    @property
    def torch_head(self) -> HeadPart | None:
        """The head, if torch can run it on the target's hidden states alone: then its drafts are checked, and what its
        layers read is recorded."""
        return None if self.head is None or MODULES[self.head.config.kind].head is None else self.head

    @property
    def has_sinks(self) -> bool:
        """Whether heads of the target's attention have a score without a key (gpt-oss)."""
        return any(name.endswith(".sinks") for name in self.target.tensors)

    @property
    def bounded_scores(self) -> bool:
        """Whether the target bounds its attention's scores (Gemma-2)."""
        return getattr(self.config, "attn_logit_softcapping", None) is not None


def left_out_note(pair: Pair) -> str | None:
    """Returns which multi-token-prediction layers of the target a bundle does not have; None if there are none."""
    folder = pair.target.folder
    if not pair.left_out:
        return None
    if pair.head is not None and pair.head.kind.in_target:
        return (
            f"of the multi-token-prediction layers of {folder} the first drafts, fed with its own output; the others "
            "are left out"
        )
    return (
        f"{folder} has a multi-token-prediction layer, which the bundle leaves out; eagle-export {folder} {folder} "
        "drafts with it"
    )


def open_pair(target_folder: Path, head_folder: Path | None) -> Pair:
    """Opens a target, a folder or a GGUF file, and a head's folder, if any. Raises ExportError if they do not fit."""
    whole = open_target(target_folder)
    target, layers = without_prediction_layers(whole), len(set(prediction_layers(whole).values()))
    head = None
    if head_folder is not None:
        head = open_checkpoint(head_folder, pickled=True)
        head = replace(head, tensors=unwrapped(head.tensors)[0])
    family = family_of(target)
    config = read_config(family, target)
    check_ends(target, config, family.mlp_norm)
    part = None if head is None else _head_part(target, config, head)
    drafting = part is not None and part.kind.in_target and target_folder.samefile(part.checkpoint.folder)
    texts = read_texts(target)
    text = text_of(target, texts)
    generation = generation_of(target, family, text, int(config.vocab_size))
    return Pair(target, family, config, texts, text, generation, part, layers - drafting)


def build_graphs(pair: Pair, precision: str, top_k: int, routed: bool = True) -> dict[str, ir.Model]:
    """Traces the graphs "target" and, if there is a head, "draft", and attaches their weights. Raises ExportError if a
    tensor of either checkpoint is left over.

    precision: "fp32" or "fp16". top_k: children per row that the head's graph returns. routed: whether experts are
    computed for the rows that are routed to them alone, else for all rows."""
    dtype = DTYPES[precision]
    head = pair.head
    target = _target_module(pair, dtype)
    modules: dict[str, torch.nn.Module] = {"target": target}
    checkpoints = {"target": pair.target}
    if head is not None:
        modules["draft"], checkpoints["draft"] = _draft_module(pair, head, dtype, top_k), head.checkpoint
    weights = weight_sources(pair)
    for name, module in modules.items():
        _check_all_used(checkpoints[name], module, weights[name])
    rotated_keys = head.config.num_layers if head is not None and head.kind.keys_in_target else 0
    graphs = {
        "target": trace_target(
            target,
            Layout(pair.rows, dtype),
            Expected(
                attention=pair.family.attention_layers(pair.config),
                rms_norm=pair.family.norm_count(pair.config) + _tap_norms(head),
                rotary=pair.family.rotations(pair.config) + rotated_keys,
            ),
        )
    }
    if head is not None:
        graphs["draft"] = MODULES[head.config.kind].trace(modules["draft"], head.config, dtype)
    for name, model in graphs.items():
        attach(model, weights[name])
        store_transposed(model)
    _note_windows(graphs["target"], pair.windows)
    if routed and pair.family.experts is not None and not RoutedExperts().apply(graphs["target"]):
        raise ExportError("no experts were recognised in the trace; report this as a bug")
    return graphs


def weight_sources(pair: Pair) -> dict[str, dict[str, Weight]]:
    """Returns parameter name -> weight, for the graph "target" and, if there is a head, "draft".

    The head's own tensors get the prefix "head."; what it borrows keeps the target's name, one in both graphs."""
    target = {}
    for stored, tensor in {**pair.target.tensors, **pair.family.reordered(pair.target)}.items():
        if not is_table(stored):
            name, part = pair.family.parameter(stored), ROTATED.fullmatch(stored)
            if offset := pair.family.gain_offset(tensor.name):  # the family stores a part of the gain
                tensor = tensor.plus(offset)
            if pair.family.neighbours and part is not None:
                heads = int(pair.config.num_attention_heads) if part[1] == "q" else pair.num_kv_heads
                tensor = HalvedTensor(tensor.name, tensor.file, tensor.shape, tensor.dtype, tensor, heads, pair.rotated)
            target[name] = Weight(name, tensor)
    if pair.tied:
        target[LM_HEAD] = target[EMBEDDING]
    head = pair.head
    if head is None:
        return {"target": target}
    in_draft, in_target = placed(head.config, head.checkpoint.tensors)
    own = {name: Weight(f"head.{name}", tensor) for name, tensor in head.checkpoint.tensors.items()}
    target |= {f"head_reader.{name}": own[name] for name in in_target}
    draft = {f"head.{name}": own[name] for name in in_draft}
    if not head.own_embedding and head.config.embeds:
        draft["head.embed_tokens.weight"] = target[EMBEDDING]
    if head.config.borrows_lm_head:
        draft["head.lm_head.weight"] = target[LM_HEAD]
    return {"target": target, "draft": draft}


def _head_part(target: Checkpoint, config: Config, head: Checkpoint) -> HeadPart:
    sizes = int(config.hidden_size), int(config.num_hidden_layers), int(config.vocab_size)
    layout, head = fitted(official(head), target)
    head = KINDS[layout.kind].beside(head, target.config)
    head_config = read_head_config(head, layout, *sizes)
    if head_config.borrows_lm_head:
        _check_borrowed(target, head)
    d2t = _vocabulary_map(head, head_config)
    return HeadPart(head, layout, head_config, d2t, _own_embedding(target, head, head_config))


def _tap_norms(head: HeadPart | None) -> int:
    """Norms of the head in the target's graph: between the taps and fc, or of a block head after fc and of its keys."""
    if head is None:
        return 0
    config, norms = head.config, {"none": 0, "all": 1, "each": len(head.config.taps)}
    return norms[config.tap_norm] + (1 + config.num_layers * config.qk_norm if head.kind.keys_in_target else 0)


def _check_borrowed(target: Checkpoint, head: Checkpoint) -> None:
    """Raises ExportError if a head that borrows the target's LM head holds another one. Files for vLLM hold a copy."""
    if LM_HEAD not in head.tensors:
        return
    theirs = target.lm_head
    own = head.require(LM_HEAD, theirs.shape)
    if not same_values(own, theirs):
        raise ExportError(
            f"{own.file}: tensor {own.name!r} is not the target's, which such a head borrows; the checkpoint is of "
            "a variant that is not supported, or of another target"
        )


def _target_module(pair: Pair, dtype: torch.dtype) -> TargetGraph:
    head = None if pair.head is None else pair.head.config

    def build() -> TargetGraph:
        reader = None if head is None else MODULES[head.kind].reader
        read = None if head is None or reader is None else reader(head)
        return TargetGraph(pair.family, pair.config, pair.windows, () if head is None else head.taps, read)

    with accepted_by_transformers(pair.target):
        return build_fake(build, dtype)


def _draft_module(pair: Pair, head: HeadPart, dtype: torch.dtype, top_k: int) -> torch.nn.Module:
    logits = partial(pair.family.logits, pair.config) if head.config.borrows_lm_head else None
    with accepted_by_transformers(head.checkpoint):
        module = build_fake(partial(MODULES[head.config.kind].graph, head.config, top_k, logits), dtype)
    if head.d2t is not None:
        module.d2t = head.d2t[:, None]
    if (own := head.config.assistant) is not None and own.centroids:
        module.group_of = groups_of(head.checkpoint.tensors[TOKEN_ORDERING].read(), own.centroids)
    return module


def _note_windows(model: ir.Model, windows: Windows) -> None:
    """Writes each layer's window into its Attention node, for recipes that build another mask than the traced one."""
    if not any(windows):  # of as many nodes as there are layers, but in families whose layers have none
        return
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    for node, width in zip(nodes, windows, strict=True):
        if width is not None:
            node.metadata_props[WINDOW] = str(width)


def _check_all_used(checkpoint: Checkpoint, module: torch.nn.Module, weights: Mapping[str, Weight]) -> None:
    """Raises ExportError unless weights and parameters match one to one, with equal shapes. A tensor that is left over
    would mean a kind of checkpoint that this export does not know, and wrong output without an error."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    parameters |= {name: each for name, each in module.named_buffers() if isinstance(each, FakeTensor)}
    if unused := sorted(set(weights) - set(parameters)):
        first = weights[unused[0]].source
        raise ExportError(
            f"{first.file}: tensor {first.name!r} is not used by this kind of model; the checkpoint is of a variant "
            "that is not supported"
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
        if source.dtype not in FLOATS:
            raise ExportError(
                f"{source.file}: tensor {source.name!r} is stored as {source.dtype}, not as one of "
                f"{', '.join(FLOATS)}; export the original checkpoint"
            )


def _vocabulary_map(head: Checkpoint, config: HeadConfig) -> torch.Tensor | None:
    """Returns d2t [Vd], offsets from draft to target ids, checked against t2d [V] if it is there; None for same ids."""
    size, vocab = config.draft_vocab_size, config.vocab_size
    stored = stored_map(head, KINDS[config.kind], size, vocab)
    if stored is None:
        return None
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
    """Whether the head's embedding differs from the target's. Published heads hold a copy, or none."""
    name = "embed_tokens.weight"
    if name not in head.tensors:
        target.require(EMBEDDING, (config.vocab_size, config.hidden_size))
        return False
    own = head.require(name, (config.vocab_size, config.hidden_size))
    return not same_values(own, target.tensors[EMBEDDING])
