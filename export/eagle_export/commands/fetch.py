"""What an export's arguments name: folders here, or models of the hub, which are looked at and then downloaded."""

from __future__ import annotations

from pathlib import Path

from eagle_export.base.destination import check_destination, disk_errors
from eagle_export.base.errors import ExportError
from eagle_export.inspection.facts import head_facts, target_facts
from eagle_export.inspection.headers import open_headers
from eagle_export.reading.hub import download, go_offline, hub_id


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
        facts = target_facts(opened["target"].checkpoint)
        problems = list(facts.problems)
        if draft is not None:
            problems += head_facts(opened["draft"].checkpoint, facts, opened["target"].checkpoint).problems
        for problem in problems:
            raise ExportError(f"{problem}; no weights were downloaded")
        for role, headers in opened.items():
            if (model := headers.model) is not None:
                folders[role] = download(model, texts=role == "target")
                sources[f"{role}: {model.id.name}"] = model.commit
    go_offline()
    return folders["target"], folders.get("draft"), sources
