"""The rotation that a head's config asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eagle_export.base.errors import ExportError


def rope_settings(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """rope_theta (default 10000, for any target) and scaling of a Llama-like config, as arguments of LlamaConfig.

    Raises ExportError for scalings whose table depends on the length of the current call: rows that are cached already
    would have been rotated with another table."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(key) or {}, Mapping):
            raise ExportError(f"{where}: {key} is {config[key]!r}, but must be an object")
    parameters = {k: v for k, v in (config.get("rope_parameters") or {}).items() if v is not None}
    scaling = {k: v for k, v in (config.get("rope_scaling") or {}).items() if v is not None}
    kind = scaling.get("rope_type", scaling.get("type", parameters.get("rope_type", "default")))
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ExportError(f"{where}: rope scaling {kind!r} depends on the text's length; it is not supported")
    theta = config.get("rope_theta")
    theta = parameters.get("rope_theta", 10000.0) if theta is None else theta
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise ExportError(f"{where}: rope_theta is {theta!r}, but must be a number above 0")
    merged = {**parameters, **{k: v for k, v in scaling.items() if k != "type"}}
    settings: dict[str, Any] = {"rope_parameters": {**merged, "rope_type": kind, "rope_theta": float(theta)}}
    if config.get("max_position_embeddings") is not None:
        settings["max_position_embeddings"] = config["max_position_embeddings"]
    return settings
