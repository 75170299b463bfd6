"""Sentences about how closely a bundle follows its source model."""

from __future__ import annotations

from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.bundle.manifest import Limits, Manifest


class FidelityWarning(EagleWarning):
    """Warns of a loaded bundle that follows its source less closely than its precision should."""


def compared(agreement: float, kl: float, limits: Limits) -> str:
    """Returns both figures with their limits, in words."""
    return (
        f"agreement {100 * agreement:.1f} % ({100 * limits.agreement:g} % or more), KL {kl:.2g} ({limits.kl:g} or less)"
    )


def shortfall(manifest: Manifest) -> str | None:
    """Returns a warning for a bundle that misses the limits of its precision; None for others, and without a
    certificate."""
    certificate = manifest.certificate
    if certificate is None or certificate.within_limits:
        return None
    return (
        f"it follows its source less closely than {manifest.precision['target']} should: "
        f"{compared(certificate.agreement, certificate.kl, certificate.limits)}; this was accepted when it was exported"
    )
