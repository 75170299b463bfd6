"""The golden target with a tokenizer, which it lacks, and a chat template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from conftest import GOLDEN

EOS = 1
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def text_target(folder: Path, template: str = CHAT) -> Path:
    """Writes the target with a tokenizer of one token per ASCII character, id = byte + 3, to a new folder."""
    from tokenizers import Tokenizer, decoders, models

    shutil.copytree(GOLDEN / "target", folder)
    vocab = {"<pad>": 0, "</s>": EOS, "<s>": 2} | {chr(byte): byte + 3 for byte in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<pad>", "</s>", "<s>"])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
