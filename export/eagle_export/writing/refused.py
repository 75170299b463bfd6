"""A bundle that was refused is kept: the same command with other limits writes it without making it again.

It lies with the finished work of its export (resume.py), so that an export of other files or settings begins anew.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eagle_export.base.resume import REFUSED
from eagle_export.checking.limits import RequiredFidelity, refusal
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Certificate, Manifest, read_manifest


def keep_refused(bundle: Path, certificate: Certificate, manifest: Manifest, finished: Path) -> None:
    """Moves a bundle to the finished work, with its certificate in its manifest."""
    (bundle / MANIFEST_NAME).write_text(replace(manifest, certificate=certificate).to_json(), encoding="utf-8")
    bundle.rename(finished / REFUSED)


def accepted(finished: Path, bundle: Path, required: RequiredFidelity | None) -> Manifest | None:
    """Moves a bundle that was kept into the empty folder `bundle`, and returns its manifest; None if there is none.
    required: what it must reach now, None for nothing; raises FidelityError if it does not."""
    kept = finished / REFUSED
    if not kept.is_dir():
        return None
    manifest = read_manifest(kept)
    assert manifest.certificate is not None
    if required is not None and not required.limits.met(manifest.certificate.agreement, manifest.certificate.kl):
        raise refusal(manifest.certificate, required, ())
    bundle.rmdir()
    kept.rename(bundle)
    return manifest
