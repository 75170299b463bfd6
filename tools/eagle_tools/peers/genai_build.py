"""Conversion for onnxruntime-genai by its own model builder.

The builder's defaults for processors are symmetric blocks of 32 and byte products (accuracy level 4)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from eagle_tools.own_python import run_python
from eagle_tools.peers.source import Source


def build(source: Source, out: Path, name: str) -> None:
    """Write the model in the precision `name` to the folder `out`. Raises RequestError."""
    builder = ["-m", "onnxruntime_genai.models.builder", "-i", str(source.folder), "-o", str(out)]
    builder += ["-p", name, "-e", "cpu", "-c", str(out / "cache")]
    failed = f"onnxruntime-genai could not convert {source.folder} to {name}"
    run_python(builder, failed, {**os.environ, "HF_HUB_OFFLINE": "1"})
    config = out / "genai_config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))
    settings["model"]["eos_token_id"] = []  # an overlay adds to the list and cannot empty it
    config.write_text(json.dumps(settings), encoding="utf-8")
