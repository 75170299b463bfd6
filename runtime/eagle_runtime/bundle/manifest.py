"""eagle_config.json: everything the runtime knows about a bundle, checked field by field when it is read.

The exporter writes it with `Manifest.to_json`, the runtime reads it with `read_manifest`; there is no other schema.
Unknown or missing keys, values of a wrong type, numbers beyond what any model has and files outside the folder are
BundleErrors of one sentence.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import BundleError
from eagle_runtime.base.files import MANIFEST_BYTES, bundle_file, read_json
from eagle_runtime.base.files import MANIFEST_NAME as MANIFEST_NAME
from eagle_runtime.base.tree import MAX_DEPTH, MAX_NODES
from eagle_runtime.bundle.graph import GraphSpec as GraphSpec
from eagle_runtime.bundle.graph import Shape, cache_shapes, cache_types, present_names, state_shapes
from eagle_runtime.bundle.graph import TensorSpec as TensorSpec
from eagle_runtime.bundle.graph import pieces_of as pieces_of
from eagle_runtime.bundle.head import BlockSpec as BlockSpec
from eagle_runtime.bundle.head import HeadKind as HeadKind
from eagle_runtime.bundle.head import HeadSpec as HeadSpec
from eagle_runtime.bundle.head import token_inputs
from eagle_runtime.bundle.typed_json import from_json

SCHEMA_VERSION = 9
SHA256 = re.compile("[0-9a-f]{64}")
MAX_TAU = 32  # tokens per target pass in a certificate: no more are decoded from a prompt
# Least and greatest values: a number outside is a mistake, or an attempt to exhaust the memory.
MODEL_RANGES = {
    "hidden_size": (1, 1 << 20),
    "vocab_size": (1, 1 << 24),
    "num_layers": (1, 1 << 10),
    "num_kv_heads": (0, 1 << 16),  # 0: a head without keys and values
    "head_dim": (0, 1 << 16),
    "context": (1, 1 << 30),
    "draft_vocab_size": (1, 1 << 24),
    "top_k": (1, 1 << 16),
}
BLOCK_RANGES = {"size": (2, 64), "mask_id": (0, (1 << 24) - 1), "state_size": (0, 1 << 20)}
# Types of tensors that a graph may hold, and the bits of one number.
DTYPE_BITS = {"bool": 8, "float8_e4m3fn": 8, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8, "int32": 32, "int64": 64}
DTYPE_BITS |= {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
TREE_RANGES = {"total_token": (2, MAX_NODES), "depth": (0, MAX_DEPTH - 1), "draft_top_k": (1, MAX_NODES)}

# Least and greatest values; what is above the least alone begins at the smallest positive number.
SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 1e6),
    "top_k": (0, (1 << 31) - 1),
    "top_p": (math.ulp(0), 1),
    "min_p": (0, 1),
    "repetition_penalty": (math.ulp(0), 1e6),
}

TreeKind = Literal["dynamic", "static", "chain", "cost-aware", "sequoia"]


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """The large model. context: its max_position_embeddings, in tokens. vocab_size: width of the logits.

    eos_token_ids: any of them ends a generation."""

    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    context: int
    eos_token_ids: tuple[int, ...]
    graph: GraphSpec


@dataclass(frozen=True, slots=True)
class TreeDefaults:
    """total_token: nodes, the root included; depth: growth passes, so the tree has depth + 1 levels below the root
    (EAGLE's names). Both are for fixed trees; a cost-aware tree has no fixed size."""

    tree: TreeKind = "cost-aware"
    total_token: int = 60
    depth: int = 5
    draft_top_k: int = 10


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model's own settings, by the names and meanings of SamplingParams. Without arguments: greedy decoding.

    The exporter takes them from the model's files (export/eagle_export/reading/families/generation.py); every setting
    that a caller gives wins over the one here."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens of one row of logits, best first."""

    token_ids: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GoldenPrompt:
    """The source model's greedy continuation of a prompt. top[i]: its likeliest tokens in the row of token i."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]
    top: tuple[TopTokens, ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """How closely a bundle should follow its source: agreement at least, kl (nats) at most."""

    agreement: float
    kl: float

    def met(self, agreement: float, kl: float) -> bool:
        """Returns whether these figures are within the limits."""
        return agreement >= self.agreement and kl <= self.kl


@dataclass(frozen=True, slots=True)
class Certificate:
    """Golden prompts of the source model, and how the bundle compared with it when it was exported.

    agreement: share of the continuations' tokens that the bundle also ranks first, given the same text before them.
    kl: mean KL(source || bundle) of those rows, in nats. tau: of greedy decoding from the prompts (replay.replay).
    limits: what bundles of this precision should reach; a bundle that misses them was accepted by its exporter."""

    prompts: tuple[GoldenPrompt, ...]
    agreement: float
    kl: float
    tau: float
    limits: Limits

    @property
    def within_limits(self) -> bool:
        """Whether the bundle follows its source as closely as its precision should."""
        return self.limits.met(self.agreement, self.kl)


@dataclass(frozen=True, slots=True)
class Manifest:
    """precision: per graph ("target", "draft"). head: None if the bundle has none. files: path inside the bundle ->
    SHA-256, for all files but this one. tools: name -> version of what built the bundle. certificate: None if the
    bundle was never compared with its source. sampling: of what a caller does not say."""

    schema_version: int
    precision: dict[str, str]
    target: TargetSpec
    head: HeadSpec | None
    tree_defaults: TreeDefaults
    sampling: SamplingDefaults
    tools: dict[str, str]
    files: dict[str, str]
    certificate: Certificate | None

    @property
    def models(self) -> dict[str, TargetSpec | HeadSpec]:
        """Keys: "target" and, if there is a head, "draft"."""
        return {"target": self.target} if self.head is None else {"target": self.target, "draft": self.head}

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read_manifest(bundle: Path) -> Manifest:
    """Read and check the manifest of a bundle folder; raises BundleError."""
    path = bundle / MANIFEST_NAME
    missing = "give the folder that eagle-export wrote"
    if bundle.is_file() or (bundle / "config.json").is_file():
        missing += f", or make one of a model: eagle-export {bundle} -o BUNDLE"
    if not bundle.is_dir():
        raise BundleError(f"{bundle} is not a folder; {missing}")
    data = read_json(path, MANIFEST_BYTES, BundleError, "export the bundle again", missing)
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise BundleError(
            f"{path}: schema_version is {short_repr(version)}, this runtime reads {SCHEMA_VERSION}; "
            "export the bundle again or install the matching eagle-edge"
        )
    manifest = typing.cast(Manifest, from_json(Manifest, data, str(path)))
    _check_graphs(manifest, str(path))
    _check_numbers(manifest, str(path))
    _check_certificate(manifest, str(path))
    used = [model.graph.file for model in manifest.models.values()]
    used += [model.graph.native.file for model in manifest.models.values() if model.graph.native is not None]
    if manifest.head is not None and manifest.head.transitions is not None:
        used.append(manifest.head.transitions)
    for file in (*used, *manifest.files):
        bundle_file(bundle, file)
    for file, digest in manifest.files.items():
        if not SHA256.fullmatch(digest):
            raise _wrong(path, f"{short_repr(digest)} is no SHA-256 of {short_repr(file)}")
    if unlisted := [file for file in used if file not in manifest.files]:
        raise _wrong(path, f"file {short_repr(unlisted[0])} is not listed under 'files'")
    return manifest


def _check_graphs(manifest: Manifest, where: str) -> None:
    """Raises BundleError unless every graph has a precision, and inputs and outputs of the shapes that follow from
    the models' sizes."""
    if set(manifest.precision) != set(manifest.models):
        named = ", ".join(sorted(manifest.precision)) or "nothing"
        raise _wrong(where, f"precision is of {named}, but the bundle holds {' and '.join(manifest.models)}")
    target, head = manifest.target, manifest.head
    if head is not None and head.form.block != (head.block is not None):
        given = "absent" if head.block is None else "given"
        raise _wrong(where, f"draft: block is {given}, but the head is of kind {head.kind}")
    features: Shape = (1, "T", target.hidden_size if head is None else head.feature_size)
    tables: list[tuple[str, TargetSpec | HeadSpec, dict[str, Shape], dict[str, Shape]]] = [
        ("target", target, token_inputs("T"), {"logits": (1, "R", target.vocab_size), "features": features})
    ]
    if head is not None:
        tables.append(("head", head, *head.form.shapes(head)))
    for name, spec, inputs, outputs in tables:
        for key, tensor in spec.graph.weights.items():
            if tensor.dtype not in DTYPE_BITS or any(isinstance(n, str) or not 0 <= n < 1 << 32 for n in tensor.shape):
                kind = f"{short_repr(tensor.dtype)} of {_listed(tensor.shape)}"
                raise _wrong(where, f"{name}: graph: {short_repr(key)} is {kind}, which no tensor is")
        keyless = isinstance(spec, HeadSpec) and spec.form.keyless
        past, new = cache_shapes(spec.graph, [] if keyless else _heads_of_layers(spec))
        states = state_shapes(spec.graph)
        past, new = past | states[0], new | states[1]
        for part, wanted, specs in (
            ("inputs", {**inputs, **past}, spec.graph.inputs),
            ("outputs", {**outputs, **new}, spec.graph.outputs),
        ):
            shapes = {key: tensor.shape for key, tensor in specs.items()}
            if wrong := sorted(key for key in {*wanted, *shapes} if wanted.get(key) != shapes.get(key)):
                raise _wrong(
                    where,
                    f"{name}: graph: {part}: {short_repr(wrong[0])} is {_listed(shapes.get(wrong[0]))}, but the sizes "
                    f"given for the models make it {_listed(wanted.get(wrong[0]))}",
                )
            for key in sorted({*past, *new} & {*specs}):
                kinds = cache_types(spec.graph, key)
                if specs[key].dtype not in kinds:
                    kind = short_repr(specs[key].dtype)
                    must = " or ".join(kinds)
                    raise _wrong(where, f"{name}: graph: {part}: {short_repr(key)} is {kind}, but must be {must}")


def _heads_of_layers(spec: TargetSpec | HeadSpec) -> list[tuple[int, int]]:
    """Heads and their width of each layer that has keys and values: those of the model or, of a layer of a target or an
    assistant after the first, what its outputs say. The last layers may have none, if they have weights (Gemma-4)."""
    most = min(spec.num_layers, len(spec.graph.inputs))  # one too many is enough to fail
    sizes = [(spec.num_kv_heads, spec.head_dim)] * most
    if isinstance(spec, HeadSpec) and not spec.form.mixed:
        return sizes
    last = f"model.layers.{spec.num_layers - 1}."
    whole = any(last in name for name in spec.graph.weights)
    for number, name in enumerate(present_names(most, ("key",))[1:], 1):
        row = spec.graph.outputs.get(name)
        if row is None and whole:
            return sizes[:number]
        if row is not None and len(row.shape) == 4 and all(isinstance(size, int) for size in row.shape[2:]):
            sizes[number] = int(row.shape[2]), int(row.shape[3])
    return sizes


def _check_numbers(manifest: Manifest, where: str) -> None:
    """Raises BundleError for a number that no model, tree or certificate has, before anything of that size is
    allocated."""
    models = [(name, model, MODEL_RANGES) for name, model in manifest.models.items()]
    numbers: list[tuple[str, float, float, float]] = [
        (f"{name}: {key}", getattr(part, key), least, most)
        for name, part, ranges in (*models, ("tree_defaults", manifest.tree_defaults, TREE_RANGES))
        for key, (least, most) in ranges.items()
        if hasattr(part, key)
    ]
    numbers += [(f"sampling: {key}", getattr(manifest.sampling, key), *ends) for key, ends in SAMPLING_RANGES.items()]
    numbers += [("target: eos_token_ids", token, 0, (1 << 31) - 1) for token in manifest.target.eos_token_ids]
    if manifest.head is not None:
        numbers += [("draft: taps", tap, 0, MODEL_RANGES["num_layers"][1]) for tap in manifest.head.taps]
        if (block := manifest.head.block) is not None:
            numbers += [(f"draft: block: {key}", getattr(block, key), *ends) for key, ends in BLOCK_RANGES.items()]
    if (certificate := manifest.certificate) is not None:  # from_json has checked that its figures are finite
        numbers += [
            ("certificate: agreement", certificate.agreement, 0, 1),
            ("certificate: kl", certificate.kl, 0, math.inf),
            ("certificate: tau", certificate.tau, 1, MAX_TAU),
            ("certificate: limits: agreement", certificate.limits.agreement, 0, 1),
            ("certificate: limits: kl", certificate.limits.kl, 0, math.inf),
        ]
    for name, value, least, most in numbers:
        if not least <= value <= most:
            meant = f"{least} or more" if most == math.inf else f"{least} to {most}"
            raise _wrong(where, f"{name} is {short_repr(value)}, but must be {meant}")


def _check_certificate(manifest: Manifest, where: str) -> None:
    """Raises BundleError if a prompt cannot be replayed."""
    certificate = manifest.certificate
    if certificate is None:
        return
    if not certificate.prompts:
        raise _wrong(where, "certificate: prompts is empty")
    for index, golden in enumerate(certificate.prompts):
        ids = {*golden.prompt, *golden.continuation, *(token for top in golden.top for token in top.token_ids)}
        consistent = (
            golden.prompt
            and len(golden.continuation) == len(golden.top) > 0
            and all(len(top.token_ids) == len(top.logits) > 0 for top in golden.top)
            and len(golden.prompt) + len(golden.continuation) <= manifest.target.context
        )
        if not consistent or not all(0 <= token < manifest.target.vocab_size for token in ids):
            raise _wrong(where, f"certificate: prompts[{index}] does not fit the model or itself")


def _wrong(where: str | Path, problem: str) -> BundleError:
    return BundleError(f"{where}: {problem}; export the bundle again")


def _listed(shape: Shape | None) -> str:
    return "absent" if shape is None else short_repr(list(shape))
