"""How tokens are sampled where a request does not say: as the bundle's generation_config.json, else as OpenAI's API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_runtime import BundleError
from eagle_serve.errors import ApiError
from eagle_serve.request import SAMPLING

OPENAI: Mapping[str, Any] = {"temperature": 1.0}
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
LARGEST = 1 << 20  # bytes


def sampling_defaults(bundle: Path, files: Mapping[str, str]) -> dict[str, Any]:
    """Returns settings of the runtime. files: path in the bundle -> SHA-256, as its manifest lists them; a file that is
    not listed is not read. Raises BundleError."""
    name = "generation_config.json"
    if name not in files:
        return dict(OPENAI)
    path = bundle / name
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST)
        config = json.loads(content)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as JSON ({error}); export the bundle again") from None
    if hashlib.sha256(content).hexdigest() != files[name] or not isinstance(config, dict):
        raise BundleError(f"{path} was altered; export the bundle again")
    if config.get("do_sample") is not True:  # its numbers are then transformers' own defaults, not the model's
        return dict(OPENAI)
    settings = dict(OPENAI)
    for key in NAMES:
        if config.get(key) is not None:
            try:
                settings[key] = SAMPLING[key](config[key], key)
            except ApiError as error:
                raise BundleError(f"{path}: {error.message}; export the bundle again") from None
    return settings
