"""What an export must reach to be written: limits per precision, and what is said of one that stays below.

A precision's limits come from its KL, the steadier figure. Over the models and precisions that were measured the share
of tokens that are ranked otherwise is about half the root of the KL in nats. The agreement's limit leaves room for that
share at the KL's limit, and for three standard deviations of a share counted over 128 rows (docs/precision.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_export.blame import LayerError
from eagle_export.errors import ExportError
from eagle_export.recipes.plan import RECIPES
from eagle_runtime.bundle.fidelity import compared
from eagle_runtime.bundle.manifest import Certificate, Limits

LIMITS = {
    "fp32": Limits(0.99, 1e-5),
    "fp16": Limits(0.95, 1e-3),
    "int8": Limits(0.82, 0.04),
    "int8-static": Limits(0.82, 0.04),
    "int8-weight": Limits(0.82, 0.04),
    "int4": Limits(0.70, 0.15),
}
# Precision -> what to try in its place, the first that the backend has and that needs no calibration but a given one.
WIDER = {
    "int4": ("int8", "int8-weight", "fp16"),
    "int8-static": ("int8", "fp32"),
    "int8": ("int8-weight", "fp32", "fp16"),
    "int8-weight": ("fp32", "fp16"),
    "fp16": ("fp32",),
}
CALIBRATED = ("int4",)  # precisions that do without a calibration, but come closer with one


class FidelityError(ExportError):
    """A bundle that follows its source less closely than it must, so that it is not written."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What an export must reach. asked: whether that was asked for, in place of what the precision states. backend,
    precision, calibrated (whether with a calibration): of the export, to say what else to try."""

    wanted: Limits
    asked: bool
    backend: str
    precision: str
    calibrated: bool


def demanded(
    backend: str, precision: str, min_agreement: float | None, max_kl: float | None, *, calibrated: bool
) -> Demand:
    """What is asked for, or else what the precision states. Raises ExportError for figures that cannot be."""
    stated = LIMITS[precision]
    if min_agreement is not None and not 0 <= min_agreement <= 1:  # nor is NaN
        raise ExportError(f"the least agreement is {min_agreement:g}, but must be 0 to 1")
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise ExportError(f"the largest KL is {max_kl:g}, but must be a number of nats, 0 or more")
    wanted = Limits(
        stated.agreement if min_agreement is None else min_agreement, stated.kl if max_kl is None else max_kl
    )
    return Demand(wanted, (min_agreement, max_kl) != (None, None), backend, precision, calibrated)


def refusal(certificate: Certificate, demand: Demand, blamed: Sequence[LayerError]) -> str:
    """The sentence that ends an export which does not reach what is demanded. blamed: its worst layers, worst first,
    or none where they are not known."""
    wanted = demand.wanted
    than = "was asked for" if demand.asked else f"{demand.precision} should"
    figures = compared(certificate.agreement, certificate.kl, wanted)
    sentence = f"the bundle follows its source less closely than {than}: {figures}"
    if blamed:
        sentence += f"; worst layers: {', '.join(each.says for each in blamed)}"
    ways = [*what_to_try(demand, blamed), accepting(certificate, wanted)]
    return f"{sentence}; {'; or '.join(ways)}"


def what_to_try(demand: Demand, blamed: Sequence[LayerError] = ()) -> list[str]:
    """Options of eagle-export that may bring a bundle closer to its source. blamed: as for `refusal`."""
    recipes, precision = RECIPES[demand.backend], demand.precision
    wider = [name for name in WIDER.get(precision, ()) if name in recipes]
    wider = [name for name in wider if demand.calibrated or not recipes[name].calibrated]
    ways = [f"try {_keeping(demand, blamed)}"] if blamed and precision not in ("fp32", "fp16") else []
    ways += [f"try --precision {wider[0]}"] if wider else []
    if precision in CALIBRATED and not demand.calibrated:
        ways.append("give the folder of eagle-calib with --calibration")
    if precision == "fp32":
        ways.append("report this as a bug, since fp32 rounds nothing away")
    return ways


def _keeping(demand: Demand, blamed: Sequence[LayerError]) -> str:
    """The worst layer alone where that may be enough, else all that are named."""
    enough = blamed[:1] if blamed[0].exact <= demand.wanted.kl else blamed
    return " ".join(f"--keep {each.layer.name}" for each in enough)


def accepting(certificate: Certificate, wanted: Limits) -> str:
    """The options with which this very export would be written."""
    flags = []
    if certificate.agreement < wanted.agreement:
        flags.append(f"--min-agreement {math.floor(100 * certificate.agreement) / 100:g}")
    if certificate.kl > wanted.kl:
        step = 10.0 ** (math.floor(math.log10(certificate.kl)) - 1)
        flags.append(f"--max-kl {math.ceil(certificate.kl / step) * step:.2g}")
    return f"accept it with {' '.join(flags)}"
