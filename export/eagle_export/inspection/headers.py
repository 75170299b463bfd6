"""Opens a model's config and headers: of a local folder, or on the hub by ranged reads, before it is downloaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eagle_export.base.destination import check_destination, disk_errors
from eagle_export.base.errors import ExportError
from eagle_export.inspection.facts import head_facts, target_facts
from eagle_export.reading.checkpoint import Checkpoint, open_checkpoint, pickled_weights, read_json
from eagle_export.reading.families.target import agreeing, known_family, stored_target
from eagle_export.reading.hub import HubModel, download, go_offline, hub_id, look_up
from eagle_export.reading.hub import open_headers as open_hub_headers
from eagle_export.reading.pickled import pickled_tensors
from eagle_export.reading.reconcile import unwrapped


def open_headers(argument: str, *, head: bool = False) -> tuple[Checkpoint, HubModel | None]:
    """Returns a checkpoint, and the model of the hub that it is of, if it is one. No values of tensors are read.
    argument: a folder, a GGUF file, or the id of a model on the hub. head: whether it is a head's, whose weights may be
    pickled, or a target's. Raises ExportError."""
    name = hub_id(argument)
    model = None if name is None else look_up(name, pickled=head, known=None if head else known_family)
    stored = _local_headers(Path(argument), head) if model is None else open_hub_headers(model)
    return (replace(stored, tensors=unwrapped(stored.tensors)[0]) if head else agreeing(stored)), model


def _local_headers(folder: Path, head: bool) -> Checkpoint:
    weights = pickled_weights(folder) if head else None
    if weights is None:
        return open_checkpoint(folder) if head else stored_target(folder)
    config = read_json(folder / "config.json")
    with weights.open("rb") as file:
        return Checkpoint(folder, config, pickled_tensors(file, weights))


def fetched(target: str, draft: str | None, bundle: Path) -> tuple[Path, Path | None, dict[str, str]]:
    """Returns the folders of the target and the head, and for models of the hub "target: OWNER/NAME" or "draft:
    OWNER/NAME" -> commit. Nothing is asked for unless an argument is the id of a model, and nothing but configs is
    downloaded unless headers say that the pair can be exported to `bundle`. Raises ExportError."""
    arguments = {"target": target} if draft is None else {"target": target, "draft": draft}
    folders, sources = {role: Path(argument) for role, argument in arguments.items()}, {}
    if any(hub_id(argument) is not None for argument in arguments.values()):
        with disk_errors(bundle):
            check_destination(bundle.absolute())
        opened = {role: open_headers(argument, head=role == "draft") for role, argument in arguments.items()}
        checkpoint = opened["target"][0]
        facts = target_facts(checkpoint)
        problems = list(facts.problems)
        if draft is not None:
            problems += head_facts(opened["draft"][0], facts, checkpoint).problems
        for problem in problems:
            raise ExportError(f"{problem}; no weights were downloaded")
        for role, (_, model) in opened.items():
            if model is not None:
                folders[role] = download(model, texts=role == "target")
                sources[f"{role}: {model.id.name}"] = model.commit
    go_offline()
    return folders["target"], folders.get("draft"), sources
