"""The grown tensors of a target and of a head, one at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from eagle_export.graphs.pair import Pair
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD
from eagle_tools.grow.axes import LOUDER, Axis, LayerAxes, Stream, head_layer, place_layers, target_layer
from eagle_tools.grow.shape import GROWN, GrowError, Shape, head_of

ADDED_LOGIT = 256.0  # what is taken off an added token, times 1 / (constant RMS) after a norm
INSERTED_OUTPUT = 1e-3  # standard deviation of the weights whose products cancel: small, so that rounding leaves little
LAST_NORM = "model.norm.weight"

NamedTensors = Iterator[tuple[str, Tensor]]


def target_tensors(pair: Pair, shape: Shape, stream: Stream) -> NamedTensors:
    """Yields the grown target's tensors by name, one at a time. Raises GrowError for a tensor it does not know."""
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


def head_tensors(pair: Pair, shape: Shape, stream: Stream) -> NamedTensors:
    """Yields a grown head's tensors by name, one at a time, but not the embedding, which is the target's. Raises
    GrowError for a tensor it does not know."""
    head = head_of(pair).config
    rng = torch.Generator().manual_seed(1)
    layer = head_layer(pair, shape)
    growth, read = GROWN[head.kind], stream.axis
    for _ in range(growth.streams - 1):
        read += stream.axis
    axes = layer.axes(read, stream.axis)
    for name, stored in head_of(pair).checkpoint.tensors.items():
        if name in ("embed_tokens.weight", "d2t", "t2d") or name.endswith("inv_freq"):
            continue
        if match := re.fullmatch(r"(?:midlayer|layers\.\d+)\.(.+)", name):
            yield name, grow_part(match[1], stored.read(), axes, layer, stream, rng)
        elif name in growth.readers:
            yield name, grow_fc(stored.read(), stream, growth.passed_on)
        elif name == "fc.bias":
            yield name, stored.read().float()[stream.axis.source] * stream.axis.write
        elif name in growth.norms:
            yield name, stream.norm(stored.read())
        elif name == "mask_embedding":
            yield name, grow_embedding(stored.read()[0], stream, 0, rng)[None]
        elif name in growth.per_token:
            sizes = (shape.vocab, head.vocab_size), (shape.draft_vocab, head.draft_vocab_size)
            new, old = sizes[growth.per_token.index(name)]
            yield name, more_rows(stored.read(), max(new - old, 0), rng)
        elif name == "norm.weight" and not head.borrows:
            yield name, stream.last_norm(stored.read())
        elif name == "lm_head.weight" and not head.borrows:
            added = max(shape.draft_vocab - head.draft_vocab_size, 0)
            yield name, grow_lm_head(stored.read(), stream, added, rng)
        else:
            folder = head_of(pair).checkpoint.folder
            raise GrowError(f"{folder}: tensor {name!r} is unknown; only plain EAGLE and block heads grow")
    if not head.borrows_lm_head:
        yield from vocabulary_map(pair, shape)


def grow_matrix(old: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """Returns old [out, in] grown to [out', in'], in fp32."""
    grown = old.float()[rows.source][:, columns.source]
    return grown.mul_(rows.write[:, None]).mul_(columns.read)


def grow_part(
    part: str, old: Tensor, axes: dict[str, tuple[Axis, Axis]], layer: LayerAxes, stream: Stream, rng: torch.Generator
) -> Tensor:
    """Returns the grown tensor of a decoder layer, named as in "self_attn.q_proj.weight"."""
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
    """Returns one tensor of an inserted layer, which adds nothing to the residual stream.

    Rows of v_proj, gate_proj and up_proj come in equal pairs, so that o_proj and down_proj read equal numbers in pairs
    of columns, which have opposite signs: w x + (-w) x."""
    if part.endswith("norm.weight"):
        return torch.ones(len(axes["mlp.gate_proj"][1].source))
    module, kind = part.rsplit(".", 1)
    rows, columns = (len(axis.source) for axis in axes[module])
    if kind == "bias":
        return torch.zeros(rows)
    if module in ("self_attn.o_proj", "mlp.down_proj"):
        weights = torch.randn(rows, columns // 2, generator=rng).mul_(INSERTED_OUTPUT)
        return torch.stack([weights, -weights], -1).flatten(1)
    if module in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        return torch.randn(rows // 2, columns, generator=rng).mul_(columns**-0.5).repeat_interleave(2, 0)
    return torch.randn(rows, columns, generator=rng).mul_(columns**-0.5)


def more_rows(old: Tensor, added: int, rng: torch.Generator) -> Tensor:
    """Returns old [V, n] with added rows: random ones, since no text contains their tokens."""
    rows = torch.randn(added, old.shape[1], generator=rng) * old.float().std()
    return torch.cat([old.float(), rows])


def grow_embedding(old: Tensor, stream: Stream, added: int, rng: torch.Generator) -> Tensor:
    """Returns old [V, H] grown to [V + added, H']."""
    grown = more_rows(old, added, rng)[:, stream.axis.source].mul_(stream.axis.write)
    if stream.constant:
        grown[:, -1] = stream.constant
    return grown


def grow_lm_head(old: Tensor, stream: Stream, added: int, rng: torch.Generator) -> Tensor:
    """Returns old [V, H] grown to [V + added, H']. Added rows are random, but read a very low logit."""
    grown = more_rows(old, added, rng)[:, stream.axis.source].mul_(stream.axis.read)
    if added:
        grown[-added:, -1] = -ADDED_LOGIT / (LOUDER * stream.constant)
    return grown


def grow_fc(old: Tensor, stream: Stream, passed_on: float) -> Tensor:
    """Returns old [H, n H] grown to [H', n H'].

    fc reads n vectors of the stream's width and passes on the constant of the first one, times `passed_on`. That is the
    embedding (EAGLE-1, a block head's input_fc) or a tap (EAGLE-3, block), neither of which went through a norm."""
    columns = stream.axis
    for _ in range(old.shape[1] // stream.old_width - 1):
        columns = columns + stream.axis
    grown = grow_matrix(old, stream.axis, columns)
    if stream.constant:
        grown[-1, stream.width - 1] = passed_on
    return grown


def vocabulary_map(pair: Pair, shape: Shape) -> NamedTensors:
    """Yields d2t and t2d; the added draft tokens map to the first added tokens."""
    head, d2t = head_of(pair).config, head_of(pair).d2t
    size, vocab = shape.draft_vocab or head.draft_vocab_size, shape.vocab or head.vocab_size
    old = torch.zeros(head.draft_vocab_size, dtype=torch.int64) if d2t is None else d2t
    added = torch.full((size - head.draft_vocab_size,), head.vocab_size - head.draft_vocab_size)
    offsets = torch.cat([old, added])
    yield "d2t", offsets
    yield "t2d", torch.zeros(vocab, dtype=torch.bool).index_fill_(0, offsets + torch.arange(size), True)
