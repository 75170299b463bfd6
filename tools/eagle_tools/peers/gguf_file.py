"""Conversion of a Llama to GGUF, the format of llama.cpp.

Queries and keys are stored in another order of rows than in Hugging Face folders, whose rotary embedding pairs row i
of a head with row i + d/2, where llama.cpp pairs rows 2 i and 2 i + 1 (convert_hf_to_gguf.py of ggml-org/llama.cpp). A
file has no tokens, only their number, since engines are compared on ids.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_export.reading.gguf.architectures import LLAMA_NAMES
from eagle_export.reading.gguf.architectures import TOP as TOP_NAMES
from eagle_export.reading.gguf.rope import llama_factors
from eagle_export.reading.stored_tensors import StoredTensor
from eagle_runtime.base.errors import RequestError
from eagle_tools.peers.source import Source

LAYER = {name: part for part, name in LLAMA_NAMES.items()}  # name in the source's layer -> in the file's block
TOP = {name: each for each, name in TOP_NAMES.items()}
Weights = npt.NDArray[Any]


def write_gguf(source: Source, path: Path) -> None:
    """Write the source's weights: matrices of 16 bits as they are, all else in fp32. Holds one tensor in memory."""
    import gguf

    config, writer = source.config, gguf.GGUFWriter(path, "llama")
    heads = int(config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(source.kv_heads)
    writer.add_key_length(source.head_dim)
    writer.add_value_length(source.head_dim)
    writer.add_rope_dimension_count(source.head_dim)
    writer.add_rope_freq_base(float(source.rope["rope_theta"]))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    tensors = source.tensors()
    frequencies = rope_factors(source)
    if frequencies is not None:
        writer.add_tensor_info("rope_freqs.weight", frequencies.shape, frequencies.dtype, frequencies.nbytes)
    kinds = {"BF16": gguf.GGMLQuantizationType.BF16, "F16": gguf.GGMLQuantizationType.F16}
    for tensor in tensors:
        kind = kinds.get(tensor.dtype) if len(tensor.shape) > 1 else None
        size = (4 if kind is None else 2) * math.prod(tensor.shape)
        writer.add_tensor_info(gguf_name(tensor.name), tensor.shape, np.dtype(np.float32), size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if frequencies is not None:
        writer.write_tensor_data(frequencies)
    for tensor in tensors:
        weights = _read(tensor)
        if tensor.name.endswith("q_proj.weight"):
            weights = permuted(weights, heads)
        elif tensor.name.endswith("k_proj.weight"):
            weights = permuted(weights, source.kv_heads)
        writer.write_tensor_data(np.ascontiguousarray(weights))
    writer.close()


def _read(stored: StoredTensor) -> Weights:
    """A matrix of 16 bits as int16, since NumPy has no bf16; any other tensor in fp32."""
    import torch

    tensor = stored.read()
    narrow = tensor.ndim > 1 and tensor.element_size() == 2
    array: Weights = (tensor.view(torch.int16) if narrow else tensor.float()).numpy()
    return array


def gguf_name(name: str) -> str:
    """Returns a tensor's name in the file. Raises RequestError for a tensor that a Llama does not have."""
    if name in TOP:
        return TOP[name]
    _, _, number, part = (*name.split(".", 3), "", "", "")[:4]
    kind = part.removesuffix(".weight")
    if not name.startswith("model.layers.") or kind not in LAYER:
        raise RequestError(f"tensor {name} belongs to no Llama that llama.cpp can run; give a plain Llama")
    return f"blk.{number}.{LAYER[kind]}.weight"


def permuted(weights: Weights, heads: int) -> Weights:
    """weights [heads * d, ...]: of queries or keys. Returns them with rows i and i + d/2 of each head as rows 2 i and
    2 i + 1."""
    rows, *rest = weights.shape
    return weights.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(weights.shape)


def rope_factors(source: Source) -> npt.NDArray[np.float32] | None:
    """Returns by which factor each rotary frequency of a Llama 3 is slower, [d/2], or None without such scaling."""
    rope = source.rope
    if rope["rope_type"] == "default":
        return None
    half = np.arange(0, source.head_dim, 2, dtype=np.float64) / source.head_dim
    waves = 2 * math.pi * float(rope["rope_theta"]) ** half  # positions per turn of each frequency
    low, high, factor = (float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    length = float(rope["original_max_position_embeddings"])
    return llama_factors(waves, factor, low, high, length).astype(np.float32)
