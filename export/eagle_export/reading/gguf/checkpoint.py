"""Opens a Hugging Face folder or a GGUF file as it is stored."""

from __future__ import annotations

from pathlib import Path

from eagle_export.reading.checkpoint import Checkpoint, is_gguf, open_checkpoint
from eagle_export.reading.gguf.architectures import architecture_of, config_of
from eagle_export.reading.gguf.file import read_gguf
from eagle_export.reading.gguf.tensors import check_kinds, named_tensors
from eagle_export.reading.gguf.tokenizer import notes_of, special_ids, texts_of


def open_stored(path: Path) -> Checkpoint:
    """Opens a folder or a GGUF file. Raises ExportError."""
    return open_gguf(path) if is_gguf(path) else open_checkpoint(path)


def open_gguf(path: Path) -> Checkpoint:
    """Returns a GGUF file as a checkpoint; its texts are made here, and its tensors are read one by one later. Raises
    ExportError for what is not known or cannot be expressed."""
    file = read_gguf(path)
    architecture = architecture_of(file)
    config = config_of(file, architecture)
    check_kinds(file)
    tensors = named_tensors(file, architecture, config["num_attention_heads"], config["num_key_value_heads"])
    texts = texts_of(file)
    return Checkpoint(path, {**config, **special_ids(file)}, tensors, texts, notes_of(file) if texts else ())
