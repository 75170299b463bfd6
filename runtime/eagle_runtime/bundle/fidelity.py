"""How closely a bundle follows its source, in words."""

from __future__ import annotations

from eagle_runtime.bundle.manifest import Limits, Manifest
from eagle_runtime.errors import EagleWarning


class FidelityWarning(EagleWarning):
    """A bundle that was loaded follows its source less closely than bundles of its precision should."""


def compared(agreement: float, kl: float, limits: Limits) -> str:
    """What was found, and what it should be."""
    return (
        f"agreement {100 * agreement:.1f} % ({100 * limits.agreement:g} % or more), KL {kl:.2g} ({limits.kl:g} or less)"
    )


def shortfall(manifest: Manifest) -> str | None:
    """What is wrong with a bundle that was exported below the limits of its precision; None if nothing is, or if it was
    never compared."""
    certificate = manifest.certificate
    if certificate is None or certificate.within_limits:
        return None
    return (
        f"it follows its source less closely than {manifest.precision['target']} should: "
        f"{compared(certificate.agreement, certificate.kl, certificate.limits)}; this was accepted when it was exported"
    )
