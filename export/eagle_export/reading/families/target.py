"""Opens a target: a Hugging Face folder or a GGUF file, with the names that its graph's weights have."""

from __future__ import annotations

from pathlib import Path

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import LM_HEAD, Checkpoint, read_json
from eagle_export.reading.families.family import Family
from eagle_export.reading.families.nested import language_model
from eagle_export.reading.families.registry import declared, family_of
from eagle_export.reading.gguf.checkpoint import open_stored
from eagle_export.reading.reconcile import reconciled, with_one_table


def open_target(path: Path) -> Checkpoint:
    """Opens a target, and decides what its parts contradict each other in (reconcile.py). Of values those of an LM head
    that the config ties are read. Raises ExportError."""
    target = agreeing(stored_target(path))
    family = declared(target.config)
    if family is None or LM_HEAD not in target.tensors:
        return target
    return with_one_table(target, _ties(family, target))


def stored_target(path: Path) -> Checkpoint:
    """Opens a target as it is stored. Raises ExportError: of a folder that cannot be read and whose family is not known
    the latter, since other files would not help."""
    try:
        return open_stored(path)
    except ExportError:
        if (path / "config.json").is_file() and not any(path.glob("*.gguf")):
            known_family(path, path / "config.json")
        raise


def known_family(folder: Path, config: Path) -> None:
    """Raises ExportError if a config.json is not of a family that is known. folder: for errors."""
    family_of(language_model(Checkpoint(folder, read_json(config), {})))


def agreeing(stored: Checkpoint) -> Checkpoint:
    """Returns a target's checkpoint whose config, names and tensors agree with each other and with its family's graph;
    of a family that is not known with each other alone. No values are read. Raises ExportError."""
    target = reconciled(language_model(stored))
    family = declared(target.config)
    return target if family is None else family.opened(target)


def _ties(family: Family, target: Checkpoint) -> bool:
    """Whether a config ties the LM head to the embedding; one that says nothing does as its class."""
    stated = target.config.get("tie_word_embeddings")
    return stated is True if stated is not None else bool(family.model_class().config_class().tie_word_embeddings)
