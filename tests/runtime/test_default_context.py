"""How long a context is that nobody asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.opening.backends import default_context

LONG = 1 << 17


@pytest.mark.parametrize(
    ("backend", "tokens_free", "context"),
    [
        ("cpu", 4 * LONG, LONG),
        ("native", 4 * LONG, LONG),
        ("cpu", 4 * LONG - 4, LONG // 2),
        ("cpu", 4 * 20_000, 1 << 14),
        ("cpu", 4 * 100, 4096),  # as before; a machine that cannot hold so many says so
        ("cpu", None, 4096),
        ("cuda", 4 * LONG, 4096),
        ("tensorrt", 4 * LONG, 4096),
    ],
)
def test_it_is_what_model_and_memory_allow(
    bundle_of: Callable[..., Path], backend: str, tokens_free: int | None, context: int
) -> None:
    manifest = read_manifest(bundle_of("eagle1", "int8"))
    short = manifest.target.context
    models = manifest.models.values()
    token = sum(2 * model.num_layers * model.graph.kv_row_bytes for model in models)
    free = None if tokens_free is None else tokens_free * token
    assert default_context(manifest, backend, free) == min(short, context)
    long = dataclasses.replace(manifest, target=dataclasses.replace(manifest.target, context=LONG))
    assert default_context(long, backend, free) == context
