"""The files that a manifest lists, compared with their SHA-256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from eagle_runtime.bundle.manifest import MANIFEST_NAME, Manifest
from eagle_runtime.errors import BundleError
from eagle_runtime.files import TEXT_BYTES, bundle_file, file_sha256, read_plain


def verify_hashes(bundle: Path, manifest: Manifest) -> None:
    """Compare every listed file with its SHA-256; raises BundleError naming the first that differs."""
    for name, expected in manifest.files.items():
        _check_digest(bundle, name, file_sha256(bundle_file(bundle, name)), expected)


def read_listed(bundle: Path, manifest: Manifest, name: str, limit: int) -> bytes:
    """Returns the content of a listed file of at most `limit` bytes, after comparing that very content with its
    SHA-256. Raises BundleError."""
    if name not in manifest.files:
        raise BundleError(f"{bundle / name} is not listed in {MANIFEST_NAME}; export the bundle again")
    try:
        content = read_plain(bundle_file(bundle, name), limit)
    except OSError as error:
        raise BundleError(f"{bundle / name} cannot be read ({error.strerror}); copy the bundle again") from None
    _check_digest(bundle, name, hashlib.sha256(content).hexdigest(), manifest.files[name])
    return content


def read_text_file(bundle: Path, manifest: Manifest, name: str) -> bytes | None:
    """Returns the content of one of files.TEXT_BYTES; None where the bundle has no such file. Raises BundleError for a
    file in the folder that is not listed: it is not the bundle's own."""
    if name in manifest.files:
        return read_listed(bundle, manifest, name, TEXT_BYTES[name])
    if os.path.lexists(bundle / name):
        raise BundleError(
            f"{bundle / name} is not listed in {MANIFEST_NAME}, so it is none of the bundle's; take it away, or export "
            "the bundle again"
        )
    return None


def _check_digest(bundle: Path, name: str, actual: str, expected: str) -> None:
    if actual != expected:
        raise BundleError(
            f"{bundle / name} does not match its SHA-256 in {MANIFEST_NAME}; copy or export the bundle again"
        )
