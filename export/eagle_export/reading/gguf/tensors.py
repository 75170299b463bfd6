"""Tensors of a GGUF file under the names that Hugging Face's checkpoints have.

Names and changes of values are those of llama.cpp's converter (conversion/*.py and gguf-py/gguf/tensor_mapping.py of
ggml-org/llama.cpp). It changes values in three ways, all undone here: gains of Gemma and Qwen3.5 have 1 added, Qwen3.5
and Granite 4 have -exp of a number by which states fade, and some families have the rows of each head of queries and
keys in another order, because llama.cpp rotates rows 2 i and 2 i + 1 together, where transformers rotates rows i and
i + d/2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import is_gain
from eagle_export.reading.gguf.architectures import Architecture
from eagle_export.reading.gguf.file import ADVICE, OTHER_TYPE, UNBLOCKED_TYPES, GgufFile, GgufTensor, Order

# Of the language model: what rotates, and what reads images and sound or predicts further tokens, which Ollama keeps in
# one file.
NOT_WEIGHTS = re.compile(
    r"(blk\.\d+\.)?(rope_(freqs|factors_long|factors_short)\.weight|attn_rot_embd(\.weight)?)|(v|a|mm|mtp)\..+"
)

GATE_UP = "gate_up"  # in the name of a tensor with the rows of an expert's gate before those of its up


def check_kinds(file: GgufFile) -> None:
    """Raises ExportError for a tensor of a type that the package gguf does not dequantise."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    for kind in sorted({entry.kind for entry in file.tensors.values()} - set(UNBLOCKED_TYPES)):
        try:
            dequantize(
                np.zeros((1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]), np.uint8), GGMLQuantizationType[kind]
            )
        except NotImplementedError:
            first = next(name for name, entry in file.tensors.items() if entry.kind == kind)
            raise ExportError(
                f"{file.path}: tensor {first!r} is of type {kind}, which the package gguf does not dequantise; "
                f"{OTHER_TYPE}"
            ) from None


def named_tensors(file: GgufFile, architecture: Architecture, heads: int, kv_heads: int) -> dict[str, GgufTensor]:
    """Returns the tensors by Hugging Face's names, without those of layers that predict further tokens, which follow
    the others. Raises ExportError for one that the architecture does not have."""
    tensors: dict[str, GgufTensor] = {}
    layers = file.layers
    for entry in file.tensors.values():
        number = re.match(r"blk\.(\d+)\.", entry.name)
        if NOT_WEIGHTS.fullmatch(entry.name) or (number and int(number[1]) >= layers):
            continue
        for name, tensor in _parts(file, entry, architecture, heads, kv_heads):
            if name in tensors:
                raise ExportError(f"{file.path}: {entry.name!r} is stored twice under different names; {ADVICE}")
            tensors[name] = tensor
    return tensors


def _parts(
    file: GgufFile, entry: GgufTensor, architecture: Architecture, heads: int, kv_heads: int
) -> Iterator[tuple[str, GgufTensor]]:
    """The checkpoint's tensors that an entry holds: one, or several whose rows follow each other."""
    if (top := architecture.top.get(entry.name)) is not None:
        yield top, _tensor(entry, top, architecture)
        return
    match = re.fullmatch(r"blk\.(\d+)\.([a-z0-9_.]+?)(?:\.(\d+))?(?:\.(weight|bias))?", entry.name)
    if match is None or (match[4] is None and match[2] not in architecture.bare):
        raise _unknown(file, entry)
    number, part, expert, kind = match.groups()
    layer = f"model.layers.{number}"
    if part == "attn_qkv" and "attn_qkv" not in architecture.layer and architecture.layers is None:
        head_rows = entry.shape[0] // (heads + 2 * kv_heads)
        start = 0
        for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            rows = _some_rows(entry, start, (count * head_rows, *entry.shape[1:]))
            order = _turned(count, rows) if architecture.turned and name != "v" else None
            full = f"{layer}.self_attn.{name}_proj.{kind}"
            yield full, replace(_tensor(rows, full, architecture), order=order)
            start += count * head_rows
        return
    if part.removesuffix("_exps") in architecture.experts and (part.endswith("_exps") or expert is not None):
        form = f"{layer}.{architecture.experts[part.removesuffix('_exps')]}.{kind}"
        if expert is not None:  # files from before the experts of a layer became one tensor
            yield form.format(int(expert)), _tensor(entry, form.format(int(expert)), architecture)
            return
        forms = [form.replace(GATE_UP, half) for half in GATE_UP.split("_")] if GATE_UP in form else [form]
        count, shape = entry.shape[0], (entry.shape[1] // len(forms), *entry.shape[2:])
        for place in range(count * len(forms)):
            name = forms[place % len(forms)].format(place // len(forms))
            # Of a bias one row, which becomes a vector.
            yield name, _tensor(_some_rows(entry, place * math.prod(shape[:-1]), shape), name, architecture)
        return
    if part not in architecture.layer or expert is not None:
        raise _unknown(file, entry)
    name = f"{layer}.{architecture.layer[part]}" + ("" if part in architecture.bare else f".{kind}")
    if part in architecture.shaped:
        shape = architecture.shaped[part](entry.shape)
        entry = replace(entry, shape=shape, row_bytes=entry.num_bytes // max(1, math.prod(shape[:-1])))
    order = architecture.ordered(file, part, entry.shape)
    if architecture.turned and part in ("attn_q", "attn_k"):
        order = _turned(heads if part == "attn_q" else kv_heads, entry)
    tensor = _tensor(entry, name, architecture)
    yield name, replace(tensor, order=order, exponential=part in architecture.exponential)


def _turned(heads: int, rows: GgufTensor) -> Order:
    """Of the rows of heads, which rotate in pairs i and i + d/2 in a checkpoint, and 2 i and 2 i + 1 in a file."""
    return Order(heads, rows.shape[0] // heads // 2, 2)


def _some_rows(entry: GgufTensor, start: int, shape: tuple[int, ...]) -> GgufTensor:
    """The part of an entry from its row `start` on, with that shape. A vector's numbers are rows."""
    if len(entry.shape) > 1:
        return replace(entry, offset=entry.offset + start * entry.row_bytes, shape=shape)
    size = entry.row_bytes // entry.shape[0]
    return replace(entry, offset=entry.offset + start * size, shape=shape, row_bytes=shape[0] * size)


def _tensor(entry: GgufTensor, name: str, architecture: Architecture) -> GgufTensor:
    return replace(entry, name=name, added=architecture.norm_added if is_gain(name) else 0.0)


def _unknown(file: GgufFile, entry: GgufTensor) -> ExportError:
    return ExportError(
        f"{file.path}: tensor {entry.name!r} is not known in a model of architecture {file.architecture!r}; the file "
        "is of a variant that is not supported"
    )
