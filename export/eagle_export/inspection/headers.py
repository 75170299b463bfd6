"""Opens a model's config and headers: of a local folder, or on the hub by ranged reads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from eagle_export.reading.checkpoint import Checkpoint, pickled_weights, read_json
from eagle_export.reading.gguf.checkpoint import open_stored
from eagle_export.reading.hub import HubModel, hub_id, look_up
from eagle_export.reading.hub import open_headers as open_hub_headers
from eagle_export.reading.pickled import pickled_tensors
from eagle_export.reading.reconcile import reconciled, unwrapped


@dataclass(frozen=True, slots=True)
class Headers:
    """model: on the hub, None for a local folder."""

    checkpoint: Checkpoint
    model: HubModel | None

    @property
    def commit(self) -> str | None:
        """Of a model on the hub."""
        return None if self.model is None else self.model.commit


def open_headers(argument: str, *, head: bool = False) -> Headers:
    """argument: a folder, a GGUF file, or the id of a model on the hub. head: whether it is a head's, whose weights may
    be pickled, or a target's. No values of tensors are read. Raises ExportError."""
    stored = _stored_headers(argument, head)
    if not head:
        return replace(stored, checkpoint=reconciled(stored.checkpoint))
    return replace(stored, checkpoint=replace(stored.checkpoint, tensors=unwrapped(stored.checkpoint.tensors)[0]))


def _stored_headers(argument: str, pickled: bool) -> Headers:
    name = hub_id(argument)
    if name is not None:
        model = look_up(name, pickled=pickled)
        return Headers(open_hub_headers(model), model)
    folder = Path(argument)
    weights = pickled_weights(folder) if pickled else None
    if weights is None:
        return Headers(open_stored(folder), None)
    config = read_json(folder / "config.json")
    with weights.open("rb") as file:
        return Headers(Checkpoint(folder, config, pickled_tensors(file, weights)), None)
