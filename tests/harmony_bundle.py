"""The golden pair as a model of OpenAI's harmony format: bytes, markers as special tokens, the published template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from conftest import GOLDEN, put_listed
from eagle_runtime.bundle.manifest import MANIFEST_NAME
from eagle_runtime.text.call_formats import HARMONY

TEMPLATE = Path(__file__).parent / "data" / "chat_templates" / "gptoss.jinja"
ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 3]}},
        "required": ["place", "days"],
    },
}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]


def tokenizer_of_markers() -> Tokenizer:
    """Bytes of ASCII and the markers."""
    tokenizer = Tokenizer.from_file(str(GOLDEN / "byte_tokenizer.json"))
    tokenizer.add_special_tokens(list(HARMONY.texts))
    return tokenizer


def marker(text: str) -> int:
    """The id of a marker, or of a letter."""
    token_id = tokenizer_of_markers().token_to_id(text)
    assert token_id is not None
    return token_id


def harmony_bundle(bundle: Path, folder: Path) -> Path:
    """Copy a bundle of the golden pair to `folder`, as one of such a model."""
    shutil.copytree(bundle, folder)
    put_listed(folder, "tokenizer.json", tokenizer_of_markers().to_str().encode())
    put_listed(folder, "chat_template.jinja", TEMPLATE.read_bytes())
    data = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    data["target"]["eos_token_ids"] = [marker(text) for text in ENDS]
    (folder / MANIFEST_NAME).write_text(json.dumps(data), encoding="utf-8")
    return folder


# What is added to logits, so that a model which knows no markers writes all kinds of messages, and ends them.
BIAS = {
    marker("<|channel|>"): 16.0, marker("<|message|>"): 13.0, marker("<|end|>"): 11.0, marker("<|return|>"): 8.0,
    marker("a"): 5.0, marker("f"): 3.0, marker("c"): -3.0,
}  # fmt: skip
