"""A target's tokenizer, chat template and settings of generation as files of a bundle."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import PROCESSOR_TEMPLATE, TEXT_FILES, TOOL_TEMPLATE, Checkpoint, read_json
from eagle_runtime.base.errors import BundleError
from eagle_runtime.text.tokenizer import Text

TEMPLATES = {"default": "chat_template.jinja", "tool_use": "chat_template.tool_use.jinja"}  # name -> file of a bundle
NAMES = {TOOL_TEMPLATE: TEMPLATES["tool_use"]}  # of a checkpoint's files in a bundle, where they differ


def read_texts(source: Checkpoint) -> dict[str, bytes]:
    """Returns name -> content. Raises ExportError for what is not a text."""
    if source.texts is not None:
        return dict(source.texts)
    target, texts = source.folder, {}
    for name in TEXT_FILES:
        if not (target / name).is_file():
            continue
        kept = NAMES.get(name, name)
        try:
            texts[kept] = (target / name).read_bytes()
            texts[kept].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ExportError(f"{target / name} is not readable text ({error}); download it again") from None
    for name in ("tokenizer_config.json", PROCESSOR_TEMPLATE):
        if "chat_template.jinja" not in texts and (target / name).is_file():
            texts |= _stored_templates(read_json(target / name).get("chat_template"))
    return texts


def text_of(source: Checkpoint, texts: Mapping[str, bytes]) -> Text:
    """Returns the tokenizer and template in these. Raises ExportError for what the runtime could not read."""
    try:
        return Text(source.folder, texts.get)
    except BundleError as error:
        raise ExportError(str(error)) from None


def _stored_templates(stored: object) -> dict[str, bytes]:
    """The chat templates of an older tokenizer_config.json, which holds one template or several with names, by the
    bundle's names of them; of one alone the name does not count."""
    if isinstance(stored, list):
        named = {item.get("name"): item.get("template") for item in stored if isinstance(item, dict)}
    else:
        named = {"default": stored}
    if len(named) == 1:
        named = {"default": next(iter(named.values()))}
    return {
        file: template.encode(errors="replace")
        for name, file in TEMPLATES.items()
        if isinstance(template := named.get(name), str)
    }
