"""Uploads a finished bundle to the Hugging Face Hub, from where it is loaded by its id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eagle_export.base.errors import ExportError
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def make_repository(name: str) -> None:
    """Makes OWNER/NAME on the hub, private, unless it is there. Raises ExportError, before an export has begun."""
    if NAME.fullmatch(name) is None:
        raise ExportError(f"--push {name!r} is not a name on the hub; give OWNER/NAME")
    with _errors(name):
        from huggingface_hub import HfApi

        HfApi().create_repo(name, private=True, exist_ok=True)


def push(bundle: Path, name: str) -> str:
    """Uploads a bundle to OWNER/NAME: the manifest and the files that it lists, no engines. Returns the commit. Raises
    ExportError; the bundle stays where it is."""
    files = [MANIFEST_NAME, *read_manifest(bundle).files]
    with _errors(name):
        from huggingface_hub import HfApi, constants

        constants.HF_HUB_OFFLINE = False  # an export forbids downloads; make_repository has reached the hub
        api = HfApi()
        return str(api.upload_folder(repo_id=name, folder_path=bundle, allow_patterns=files).oid)


@contextmanager
def _errors(name: str) -> Iterator[None]:
    """Turns what huggingface_hub and the network raise into ExportErrors of one sentence."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(("huggingface_hub", "httpx")) and not isinstance(error, OSError):
            raise
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ExportError(
            f"{name} cannot be written on the hub ({said}); log in with `hf auth login`, or check the name"
        ) from None
