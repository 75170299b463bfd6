"""Opens a model's config and headers: of a local folder, or on the hub by ranged reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eagle_export.checkpoint import Checkpoint, pickled_weights, read_json
from eagle_export.gguf.checkpoint import open_target
from eagle_export.hub import HubModel, hub_id, look_up
from eagle_export.hub import open_headers as open_hub_headers
from eagle_export.inspection.pickled import pickled_tensors


@dataclass(frozen=True, slots=True)
class Headers:
    """model: on the hub, None for a local folder."""

    checkpoint: Checkpoint
    model: HubModel | None

    @property
    def commit(self) -> str | None:
        """Of a model on the hub."""
        return None if self.model is None else self.model.commit


def open_headers(argument: str, *, pickled: bool = False) -> Headers:
    """argument: a folder, a GGUF file, or the id of a model on the hub. pickled: whether pickled weights are read if
    there is no safetensors file. No values of tensors are read. Raises ExportError."""
    name = hub_id(argument)
    if name is not None:
        model = look_up(name, pickled=pickled)
        return Headers(open_hub_headers(model), model)
    folder = Path(argument)
    weights = pickled_weights(folder) if pickled else None
    if weights is None:
        return Headers(open_target(folder), None)
    config = read_json(folder / "config.json")
    with weights.open("rb") as file:
        return Headers(Checkpoint(folder, config, pickled_tensors(file, weights)), None)
