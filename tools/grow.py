"""A pair of real size that behaves like a small one: timing needs the size, checking needs the behaviour.

    python tools/grow.py TARGET EAGLE1_HEAD EAGLE3_HEAD -o OUT --layers 16 --hidden 2048 --heads 32 --kv-heads 8 \\
        --head-dim 64 --intermediate 8192 --vocab 128256 --draft-vocab 32000

writes OUT/target, OUT/eagle1 and OUT/eagle3, Hugging Face folders of the given shape whose logits equal the small
pair's up to rounding (function-preserving growth in the manner of Net2Net, arXiv 1511.05641):

    wider     every coordinate, attention head and MLP unit is copied until the width is filled. What writes a vector
              writes all copies; what reads it gives each copy a share of the weight, a power of two, so that halves
              hold grown weights as exactly as small ones.
    head_dim  rotary pair i of d stands at pair i * D / d of D, which turns at the same speed. Pairs between are
              silent: their keys are 0, their queries random.
    deeper    inserted layers have random weights in adjacent equal pairs, read with opposite signs: they cost what any
              layer costs and add nothing. They stand where EAGLE-3's taps keep seeing what they saw.
    tokens    the residual stream gives one coordinate to a constant, from which the rows of added tokens read a logit
              far below all others. The constant takes the place of a part of the norms' epsilon.

Nothing is left out of storage or computation, and next to nothing is zero. The LM head is stored on its own even if
the small target's is tied to the embedding. Memory: one tensor and one file of the output.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_export.heads.config import default_taps
from eagle_export.pair import EMBEDDING, LM_HEAD, HeadPart, Pair, open_pair
from eagle_runtime.errors import EagleError

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 1 << 30
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
ADDED_LOGIT = 256.0  # what EAGLE-1's LM head takes off an added token; behind a norm it is ADDED_LOGIT / (constant RMS)
INSERTED_OUTPUT = 1e-3  # standard deviation of the weights whose products cancel: small, so that rounding leaves little
LAST_NORM = "model.norm.weight"

Names = Iterator[tuple[str, Tensor]]


class GrowError(EagleError):
    """A pair that cannot be grown to the shape asked for."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the grown target is like; its heads' layers get the same shape. 0 for the vocabularies: as they are."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 0
    draft_vocab: int = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """How one axis of a matrix grows: new index i is a copy of old index source[i].

    source [n]; write [n]: factor where this axis is written (rows); read [n]: factor where it is read (columns). A
    silent index has write and read 0."""

    source: Tensor
    write: Tensor
    read: Tensor

    def __add__(self, other: Axis) -> Axis:
        """This axis, then the other: both are slices of one old axis, this one the first."""
        offset = int(self.source.max()) + 1
        return Axis(
            torch.cat([self.source, other.source + offset]),
            torch.cat([self.write, other.write]),
            torch.cat([self.read, other.read]),
        )


@dataclass(frozen=True, slots=True)
class Stream:
    """The grown residual stream: its axis, and what its norms need.

    constant: value of the last coordinate, or 0 where no coordinate is set aside. gain: factor of norm weights."""

    axis: Axis
    constant: float
    gain: float
    copies: int
    old_width: int

    @property
    def width(self) -> int:
        return len(self.axis.source)

    def epsilon(self, old: float) -> float:
        """rms_norm_eps that makes the grown norm equal the old one: the constant's square adds to the mean too."""
        return (old * self.copies * self.old_width - self.constant**2) / self.width

    def norm(self, weight: Tensor) -> Tensor:
        """A norm's weight. Nobody reads the constant behind it."""
        grown = weight.float()[self.axis.source] * self.gain
        if self.constant:
            grown[-1] = 0
        return grown

    def last_norm(self, weight: Tensor) -> Tensor:
        """The weight of the norm before an LM head, which reads the constant as 1 / RMS of the old stream."""
        grown = self.norm(weight)
        if self.constant:
            grown[-1] = self.gain / self.constant
        return grown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="grow.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the small target")
    parser.add_argument("heads", type=Path, nargs="+", help="folders of its EAGLE heads, one of a kind")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    for field in fields(Shape):
        size = {"default": 0} if field.name.endswith("vocab") else {"required": True}
        parser.add_argument(f"--{field.name.replace('_', '-')}", dest=f"shape_{field.name}", type=int, **size)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp16", help="default: %(default)s")
    args = parser.parse_args(argv)
    shape = Shape(**{field.name: getattr(args, f"shape_{field.name}") for field in fields(Shape)})
    try:
        grow(args.target, args.heads, args.out, shape, args.dtype)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def grow(
    target: Path, heads: list[Path], out: Path, shape: Shape, dtype: str = "fp16", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the grown target to out/target and each head to out/eagle1 or out/eagle3. Raises EagleError.

    dtype: one of DTYPES. shard_bytes: most bytes of a file, unless one tensor alone is larger."""
    pairs = [open_pair(target, head) for head in heads]
    kinds = [head_of(pair).config.kind for pair in pairs]
    if len(set(kinds)) < len(kinds):
        raise GrowError(f"two of the heads are {max(kinds, key=kinds.count)} heads; give one of a kind")
    for name in ("target", *kinds):
        if (out / name).exists():
            raise GrowError(f"{out / name} exists; choose another folder or remove it")
    check_shape(pairs, shape)
    stream = grow_stream(pairs, shape)
    config = dict(pairs[0].target.config) | {
        **attention_sizes(shape),
        "vocab_size": shape.vocab or int(pairs[0].config.vocab_size),
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": stream.epsilon(float(pairs[0].config.rms_norm_eps)),
        "tie_word_embeddings": False,
    }
    write_folder(out / "target", config, target_tensors(pairs[0], shape, stream), DTYPES[dtype], shard_bytes)
    for name in COPIED:
        if (target / name).is_file():
            shutil.copyfile(target / name, out / "target" / name)
    for pair in pairs:
        head = head_of(pair).config
        config = dict(head_of(pair).checkpoint.config) | {
            **attention_sizes(shape),
            "vocab_size": shape.vocab or head.vocab_size,
            "rms_norm_eps": stream.epsilon(head.rms_norm_eps),
        }
        if head.kind == "eagle3":
            config["draft_vocab_size"] = shape.draft_vocab or head.draft_vocab_size
        write_folder(out / head.kind, config, head_tensors(pair, shape, stream), DTYPES[dtype], shard_bytes)


def attention_sizes(shape: Shape) -> dict[str, int]:
    """Config entries that target and heads share."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
    }


def check_shape(pairs: list[Pair], shape: Shape) -> None:
    """Raises GrowError where a size cannot hold the old one."""
    config = pairs[0].config
    layers = int(config.num_hidden_layers)
    least = {
        "layers": layers,
        "hidden": int(config.hidden_size),
        "heads": int(config.num_attention_heads),
        "kv_heads": pairs[0].num_kv_heads,
        "head_dim": pairs[0].head_dim,
        "intermediate": int(config.intermediate_size),
    }
    for name, old in least.items():
        if getattr(shape, name) < old:
            raise GrowError(f"{name} would be {getattr(shape, name)}, but the target has {old}; growth only adds")
    if shape.intermediate % 2:
        raise GrowError(
            f"intermediate {shape.intermediate} is odd, but units of inserted layers come in pairs; add one"
        )
    if shape.heads % shape.kv_heads:
        raise GrowError(f"{shape.heads} heads do not share {shape.kv_heads} key/value heads evenly; change one of them")
    if shape.hidden % shape.heads:
        raise GrowError(
            f"hidden {shape.hidden} is no multiple of {shape.heads} heads, as a Llama's must be; change one"
        )
    if shape.vocab and shape.vocab < int(config.vocab_size):
        raise GrowError(f"vocab would be {shape.vocab}, but the target has {config.vocab_size}; growth only adds")
    rope: list[dict[str, Any]] = [config.rope_parameters or {}]
    rope += [head_of(pair).config.rope["rope_parameters"] for pair in pairs]
    for parameters in rope:
        if parameters.get("rope_type", "default") not in ("default", "linear", "llama3"):
            raise GrowError(f"rope scaling {parameters['rope_type']!r} depends on head_dim; grow a pair without it")
    target_layer(pairs[0], shape)
    for pair in pairs:
        head_layer(pair, shape)
        head, folder = head_of(pair).config, head_of(pair).checkpoint.folder
        if head.hidden_size != int(config.hidden_size) or head_of(pair).own_embedding:
            raise GrowError(f"{folder} has an embedding of its own; only heads that share the target's grow")
        if head.kind == "eagle3" and head.taps != default_taps(layers):
            raise GrowError(f"{folder} taps layers {head.taps}; only the usual {default_taps(layers)} grow")
        if shape.draft_vocab and head.kind == "eagle3":
            added = shape.draft_vocab - head.draft_vocab_size
            if added < 0 or added > (shape.vocab or head.vocab_size) - head.vocab_size:
                raise GrowError(
                    f"draft-vocab {shape.draft_vocab} adds {added} draft tokens, which must be 0 or more and at most "
                    "as many as --vocab adds"
                )


# Axes ----------------------------------------------------------------------------------------------------------------


def shares(source: npt.NDArray[np.int64]) -> Tensor:
    """[n] weights of copies, powers of two that sum to 1 over the copies of each source.

    Of c copies, p being the power of two below or at c, 2(c - p) get 1/2p and the others 1/p."""
    order = np.argsort(source, kind="stable")
    counts = np.bincount(source)
    ranks = np.empty(len(source), np.int64)
    ranks[order] = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    copies = counts[source]
    power = 2 ** np.floor(np.log2(copies)).astype(np.int64)
    return torch.from_numpy(np.where(ranks < 2 * (copies - power), 0.5, 1.0) / power).float()


def copied(source: npt.NDArray[np.int64]) -> Axis:
    """Every new index is a copy; readers share."""
    return Axis(torch.from_numpy(source), torch.ones(len(source)), shares(source))


def grow_stream(pairs: list[Pair], shape: Shape) -> Stream:
    """Copies of the residual stream's coordinates side by side.

    A norm divides by the mean square, so all coordinates must weigh alike: where some have one copy less than others,
    theirs are larger."""
    old = int(pairs[0].config.hidden_size)
    constant = 0.0
    width = shape.hidden
    if shape.vocab or shape.draft_vocab:
        width -= 1
    if width < old:
        raise GrowError(f"hidden {shape.hidden} leaves no coordinate for the added tokens' constant; add one")
    copies = -(-width // old)
    source = np.arange(width) % old
    scale = torch.from_numpy(np.sqrt(copies / np.bincount(source)[source])).float()
    axis = Axis(torch.from_numpy(source), scale, shares(source) / scale)
    if width < shape.hidden:
        zero = torch.zeros(1)
        axis = Axis(torch.cat([axis.source, zero.long()]), torch.cat([scale, zero]), torch.cat([axis.read, zero]))
        epsilon = min(float(pairs[0].config.rms_norm_eps), *(head_of(pair).config.rms_norm_eps for pair in pairs))
        # A power of two, exact in every type, whose square is at most half of what epsilon adds to the sum.
        constant = 2.0 ** math.floor(math.log2(math.sqrt(epsilon * copies * old / 2)))
    return Stream(axis, constant, math.sqrt(copies * old / shape.hidden), copies, old)


@dataclass(frozen=True, slots=True)
class Layer:
    """Axes inside a decoder layer. silent [n]: rows of q_proj whose value is free, as their keys are 0."""

    queries: Axis
    keys: Axis
    values: Axis
    attended: Axis
    units: Axis
    silent: Tensor

    def axes(self, attention_input: Axis, stream: Axis) -> dict[str, tuple[Axis, Axis]]:
        """Module -> its rows and columns."""
        return {
            "self_attn.q_proj": (self.queries, attention_input),
            "self_attn.k_proj": (self.keys, attention_input),
            "self_attn.v_proj": (self.values, attention_input),
            "self_attn.o_proj": (stream, self.attended),
            "mlp.gate_proj": (self.units, stream),
            "mlp.up_proj": (self.units, stream),
            "mlp.down_proj": (stream, self.units),
        }


def grow_layer(heads: int, kv_heads: int, head_dim: int, units: int, shape: Shape, where: Path) -> Layer:
    """From the old sizes (of a target's or a head's layer) to the shape's. Raises GrowError."""
    times, rest = divmod(shape.head_dim, head_dim)
    if rest or (times > 1 and head_dim % 2):
        raise GrowError(f"head_dim {shape.head_dim} is no multiple of {where}'s {head_dim}: rotary speeds would differ")
    if units > shape.intermediate or kv_heads > shape.kv_heads:
        raise GrowError(f"{where} has {units} MLP units and {kv_heads} key/value heads, more than the shape asked for")
    kv_source = np.arange(shape.kv_heads) % kv_heads
    head_source = query_sources(heads // kv_heads, kv_source, shape)
    if len(set(head_source)) < heads:
        raise GrowError(f"{shape.heads} heads over {shape.kv_heads} key/value heads cannot hold all {heads} of {where}")
    # Rotary pair i lies at i and i + d/2, and goes to pair i * times.
    position = np.arange(shape.head_dim)
    half, pair = np.divmod(position, shape.head_dim // 2)
    live = torch.from_numpy(pair % times == 0)
    turned = half * (head_dim // 2) + pair // times

    def rotary(source: npt.NDArray[np.int64], factor: float) -> Axis:
        index = torch.from_numpy((source[:, None] * head_dim + turned).ravel())
        write = live.repeat(len(source)).float() * factor
        return Axis(index, write, write)

    def plain(source: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (source[:, None] * head_dim + position % head_dim).ravel()

    return Layer(
        queries=rotary(head_source, math.sqrt(times)),  # attention divides by sqrt(head_dim)
        keys=rotary(kv_source, 1.0),
        values=copied(plain(kv_source)),
        attended=copied(plain(head_source)),
        units=copied(np.arange(shape.intermediate) % units),
        silent=~live.repeat(shape.heads),
    )


def head_of(pair: Pair) -> HeadPart:
    """All pairs here were opened with one."""
    assert pair.head is not None
    return pair.head


def target_layer(pair: Pair, shape: Shape) -> Layer:
    """The target's layers. Raises GrowError."""
    config = pair.config
    sizes = (int(config.num_attention_heads), pair.num_kv_heads, pair.head_dim, int(config.intermediate_size))
    return grow_layer(*sizes, shape, pair.target.folder)


def head_layer(pair: Pair, shape: Shape) -> Layer:
    """The head's layers. Raises GrowError."""
    head = head_of(pair).config
    sizes = (head.num_heads, head.num_kv_heads, head.head_dim, head.intermediate_size)
    return grow_layer(*sizes, shape, head_of(pair).checkpoint.folder)


def query_sources(group: int, kv_source: npt.NDArray[np.int64], shape: Shape) -> npt.NDArray[np.int64]:
    """[heads]: the old query head each new one copies, one of those that share the old key/value head."""
    per_kv = shape.heads // shape.kv_heads
    seen = np.zeros(int(kv_source.max()) + 1, np.int64)
    sources = np.empty(shape.heads, np.int64)
    for head in range(shape.heads):
        kv = kv_source[head // per_kv]
        sources[head] = kv * group + seen[kv] % group
        seen[kv] += 1
    return sources


def grow_matrix(old: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """[out, in] -> the grown matrix."""
    grown = old.float()[rows.source][:, columns.source]
    return grown.mul_(rows.write[:, None]).mul_(columns.read)


def place_layers(old: int, new: int) -> list[int | None]:
    """[new]: the old layer at each depth, None where one is inserted, so that the stream at EAGLE-3's taps is the old
    one at the old taps."""
    before, after = ((0, *default_taps(count), count) for count in (old, new))
    placed: list[int | None] = [None] * new
    for first, last, start, end in zip(before, before[1:], after, after[1:], strict=False):
        for layer in range(first, last):
            placed[start + (layer - first) * (end - start) // (last - first)] = layer
    return placed


# Tensors -------------------------------------------------------------------------------------------------------------


def target_tensors(pair: Pair, shape: Shape, stream: Stream) -> Names:
    """The grown target, one tensor at a time. Raises GrowError for a tensor it does not know."""
    config, tensors = pair.config, pair.target.tensors
    rng = torch.Generator().manual_seed(0)
    layer = target_layer(pair, shape)
    axes = layer.axes(stream.axis, stream.axis)
    added = max(shape.vocab - int(config.vocab_size), 0)
    parts: dict[int, list[str]] = {}
    for name in tensors:
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            parts.setdefault(int(match[1]), []).append(match[2])
        elif name not in (EMBEDDING, LM_HEAD, LAST_NORM):
            raise GrowError(f"{pair.target.folder}: tensor {name!r} is unknown; only plain Llama targets grow")
    yield EMBEDDING, grow_embedding(tensors[EMBEDDING].read(), stream, added, rng)
    for index, source in enumerate(place_layers(int(config.num_hidden_layers), shape.layers)):
        for part in parts[0 if source is None else source]:
            if part.endswith("inv_freq"):
                continue  # follows from the config
            if source is None:
                grown = inserted_part(part, axes, rng)
            else:
                grown = grow_part(part, tensors[f"model.layers.{source}.{part}"].read(), axes, layer, stream, rng)
            yield f"model.layers.{index}.{part}", grown
    yield LAST_NORM, stream.last_norm(tensors[LAST_NORM].read())
    yield LM_HEAD, grow_lm_head(tensors[EMBEDDING if pair.tied else LM_HEAD].read(), stream, added, rng)


def head_tensors(pair: Pair, shape: Shape, stream: Stream) -> Names:
    """A grown head, one tensor at a time, without an embedding: it is the target's. Raises GrowError for a tensor it
    does not know."""
    head = head_of(pair).config
    rng = torch.Generator().manual_seed(1)
    layer = head_layer(pair, shape)
    axes = layer.axes(stream.axis + stream.axis if head.kind == "eagle3" else stream.axis, stream.axis)
    for name, stored in head_of(pair).checkpoint.tensors.items():
        if name in ("embed_tokens.weight", "d2t", "t2d") or name.endswith("inv_freq"):
            continue
        if match := re.fullmatch(r"(?:midlayer|layers\.\d+)\.(.+)", name):
            yield name, grow_part(match[1], stored.read(), axes, layer, stream, rng)
        elif name == "fc.weight":
            yield name, grow_fc(stored.read(), stream)
        elif name == "fc.bias":
            yield name, stored.read().float()[stream.axis.source] * stream.axis.write
        elif name == "norm.weight" and head.kind == "eagle3":
            yield name, stream.last_norm(stored.read())
        elif name == "lm_head.weight" and head.kind == "eagle3":
            added = max(shape.draft_vocab - head.draft_vocab_size, 0)
            yield name, grow_lm_head(stored.read(), stream, added, rng)
        else:
            folder = head_of(pair).checkpoint.folder
            raise GrowError(f"{folder}: tensor {name!r} is unknown; only plain EAGLE heads grow")
    if head.kind == "eagle3":
        yield from vocabulary_map(pair, shape)


def grow_part(
    part: str, old: Tensor, axes: dict[str, tuple[Axis, Axis]], layer: Layer, stream: Stream, rng: torch.Generator
) -> Tensor:
    """One tensor of a decoder layer, named as in "self_attn.q_proj.weight"."""
    if part.endswith("norm.weight"):
        return stream.norm(old)
    module, kind = part.rsplit(".", 1)
    rows, columns = axes[module]
    if kind == "bias":
        return old.float()[rows.source] * rows.write
    grown = grow_matrix(old, rows, columns)
    if module == "self_attn.q_proj" and bool(layer.silent.any()):
        shape = (int(layer.silent.sum()), grown.shape[1])
        grown[layer.silent] = torch.randn(shape, generator=rng) * grown.std()
    return grown


def inserted_part(part: str, axes: dict[str, tuple[Axis, Axis]], rng: torch.Generator) -> Tensor:
    """One tensor of a layer that adds nothing.

    Rows of v_proj, gate_proj and up_proj come in equal pairs, so that equal numbers stand side by side before o_proj
    and down_proj, whose columns have opposite signs: w x + (-w) x."""
    if part.endswith("norm.weight"):
        return torch.ones(len(axes["mlp.gate_proj"][1].source))
    module, kind = part.rsplit(".", 1)
    rows, columns = (len(axis.source) for axis in axes[module])
    if kind == "bias":
        return torch.zeros(rows)
    if module in ("self_attn.o_proj", "mlp.down_proj"):
        half = torch.randn(rows, columns // 2, generator=rng).mul_(INSERTED_OUTPUT)
        return torch.stack([half, -half], -1).flatten(1)
    if module in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        return torch.randn(rows // 2, columns, generator=rng).mul_(columns**-0.5).repeat_interleave(2, 0)
    return torch.randn(rows, columns, generator=rng).mul_(columns**-0.5)


def grow_embedding(old: Tensor, stream: Stream, added: int, rng: torch.Generator) -> Tensor:
    """[V, H] -> [V + added, H']; added rows are random: no text holds their tokens."""
    rows = torch.randn(added, old.shape[1], generator=rng) * old.float().std()
    grown = torch.cat([old.float(), rows])[:, stream.axis.source].mul_(stream.axis.write)
    if stream.constant:
        grown[:, -1] = stream.constant
    return grown


def grow_lm_head(old: Tensor, stream: Stream, added: int, rng: torch.Generator) -> Tensor:
    """[V, H] -> [V + added, H']; added rows are random but for the constant, from which they read a very low logit."""
    rows = torch.randn(added, old.shape[1], generator=rng) * old.float().std()
    grown = torch.cat([old.float(), rows])[:, stream.axis.source].mul_(stream.axis.read)
    if added:
        grown[-added:, -1] = -ADDED_LOGIT / stream.constant
    return grown


def grow_fc(old: Tensor, stream: Stream) -> Tensor:
    """[H, n H] -> [H', n H']; it reads n vectors of the stream's width and hands on the constant of the first, which is
    the embedding's (EAGLE-1) or a tap's (EAGLE-3), both without a norm."""
    columns = stream.axis
    for _ in range(old.shape[1] // stream.old_width - 1):
        columns = columns + stream.axis
    grown = grow_matrix(old, stream.axis, columns)
    if stream.constant:
        grown[-1, stream.width - 1] = 1
    return grown


def vocabulary_map(pair: Pair, shape: Shape) -> Names:
    """d2t and t2d; added draft tokens stand for the first added tokens."""
    head, d2t = head_of(pair).config, head_of(pair).d2t
    size, vocab = shape.draft_vocab or head.draft_vocab_size, shape.vocab or head.vocab_size
    old = torch.zeros(head.draft_vocab_size, dtype=torch.int64) if d2t is None else d2t
    added = torch.full((size - head.draft_vocab_size,), head.vocab_size - head.draft_vocab_size)
    offsets = torch.cat([old, added])
    yield "d2t", offsets
    yield "t2d", torch.zeros(vocab, dtype=torch.bool).index_fill_(0, offsets + torch.arange(size), True)


# Files ---------------------------------------------------------------------------------------------------------------


def write_folder(folder: Path, config: dict[str, Any], tensors: Names, dtype: torch.dtype, shard_bytes: int) -> None:
    """config.json and the tensors in files of at most shard_bytes with an index. Whole numbers keep their type."""
    folder.mkdir(parents=True)
    names = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": names[dtype]}
    write_json(folder / "config.json", config)
    files: list[list[str]] = []
    total = 0
    for shard in sharded(tensors, dtype, shard_bytes):
        save_file(shard, folder / f"shard-{len(files)}", metadata={"format": "pt"})
        files.append(list(shard))
        total += sum(num_bytes(tensor) for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, held in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(held, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def sharded(tensors: Names, dtype: torch.dtype, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The tensors, converted, in groups of at most shard_bytes. Raises GrowError for values beyond the type's range."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        stored = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        del tensor  # or it would stay while the next one is made
        if stored.is_floating_point() and not bool(torch.isfinite(torch.stack(torch.aminmax(stored))).all()):
            raise GrowError(f"tensor {name!r} is beyond the range of {dtype}; use --dtype fp32")
        if shard and sum(map(num_bytes, shard.values())) + num_bytes(stored) > shard_bytes:
            yield shard
            shard.clear()
        shard[name] = stored
    yield shard


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
