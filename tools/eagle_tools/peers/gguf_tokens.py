"""A GGUF file with the tokens of a tokenizer: llama.cpp's server makes text of its answers, and ends without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import RequestError

LEFT_OUT = ("GGUF.", "tokenizer.", "general.architecture")  # beginnings of names that the writer sets itself


def with_tokens(weights: Path, tokenizer: Path) -> Path:
    """Returns a copy of a file from gguf_file, beside it, that has the tokens of a tokenizer.json with BPE; one that is
    there already is not made again. Raises RequestError for another kind of tokenizer."""
    out = weights.with_name(f"{weights.stem}-tokens.gguf")
    if not out.exists():
        part = out.with_suffix(".part")
        _write(weights, _read(tokenizer), part)
        part.rename(out)
    return out


def _read(tokenizer: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(tokenizer.read_text(encoding="utf-8"))
        kind = content["model"]["type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RequestError(f"{tokenizer} cannot be read as a tokenizer ({error}), which llama-server needs") from None
    if kind != "BPE":
        raise RequestError(f"{tokenizer} is of kind {kind}, but only BPE is written for llama-server; leave that out")
    return content


def _write(weights: Path, tokenizer: dict[str, Any], out: Path) -> None:
    import gguf

    reader, writer = gguf.GGUFReader(weights), gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(LEFT_OUT):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    count = int(reader.fields["llama.vocab_size"].contents())
    ids = {token: number for token, number in tokenizer["model"]["vocab"].items() if number < count}
    special = {one["content"]: one["id"] for one in tokenizer.get("added_tokens", ()) if one["id"] < count}
    names = {number: token for token, number in {**ids, **special}.items()}
    kinds = dict.fromkeys(ids.values(), gguf.TokenType.NORMAL)
    kinds |= dict.fromkeys(special.values(), gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(number, f"[unused{number}]") for number in range(count)])
    writer.add_token_types([kinds.get(number, gguf.TokenType.UNUSED) for number in range(count)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
