"""A target's tokenizer, chat template and settings of generation as files of a bundle."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import TEXT_FILES, Checkpoint, read_json
from eagle_runtime.base.errors import BundleError
from eagle_runtime.text.tokenizer import Text


def read_texts(source: Checkpoint) -> dict[str, bytes]:
    """Returns name -> content. Raises ExportError for what is not a text."""
    if source.texts is not None:
        return dict(source.texts)
    target, texts = source.folder, {}
    for name in TEXT_FILES:
        if not (target / name).is_file():
            continue
        try:
            texts[name] = (target / name).read_bytes()
            texts[name].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ExportError(f"{target / name} is not readable text ({error}); download it again") from None
    if "tokenizer_config.json" in texts and "chat_template.jinja" not in texts:
        template = _stored_template(read_json(target / "tokenizer_config.json").get("chat_template"))
        texts |= {"chat_template.jinja": template.encode(errors="replace")} if template is not None else {}
    return texts


def text_of(source: Checkpoint, texts: Mapping[str, bytes]) -> Text:
    """Returns the tokenizer and template in what read_texts returned. Raises ExportError for a tokenizer that the
    runtime could not read."""
    try:
        return Text(source.folder, texts.get)
    except BundleError as error:
        raise ExportError(str(error)) from None


def _stored_template(stored: object) -> str | None:
    """The chat template of an older tokenizer_config.json, which holds one template or several with names; None if it
    has no default one."""
    if isinstance(stored, list):
        named = [item for item in stored if isinstance(item, dict) and item.get("name") == "default"]
        stored = named[0].get("template") if named else None
    return stored if isinstance(stored, str) else None
