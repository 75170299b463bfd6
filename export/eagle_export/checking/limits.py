"""How closely an export must follow its source: the limits per precision, and the error for a bundle outside of them.

The limit on the KL divergence was chosen first, because the KL varies less from text to text. Over the models and
precisions that were measured, the share of tokens that rank differently is about half the square root of the KL in
nats. The limit on the agreement is 100 % less that share at the KL's limit, less three standard deviations of a share
that is counted over 128 rows (docs/dev/precision.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from eagle_export.base.errors import ExportError
from eagle_export.base.resume import REFUSED
from eagle_export.checking.worst_layers import LayerError
from eagle_export.recipes.plan import RECIPES
from eagle_runtime.base.files import rename
from eagle_runtime.bundle.fidelity import compared
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Certificate, Limits, Manifest, read_manifest

LIMITS = {
    "fp32": Limits(0.99, 1e-5),
    "fp16": Limits(0.95, 1e-3),
    "int8": Limits(0.91, 0.005),
    "int8-token": Limits(0.82, 0.04),
    "int8-static": Limits(0.82, 0.04),
    "int8-weight": Limits(0.91, 0.005),
    "fp8": Limits(0.82, 0.04),
    "int4": Limits(0.66, 0.2),
    "stored": Limits(0.91, 0.005),
    "int4-int8": Limits(0.82, 0.04),
    "auto": Limits(0.66, 0.2),
}
LEAST_DIGIT = -12  # power of ten, of a KL that is advised as a limit; what is less is rounding
# Precision -> what to try instead: the first that the backend has, if it needs a calibration only where one was given.
WIDER = {
    "int4": ("int4-int8", "int8", "int8-weight", "fp16"),
    "auto": ("int8",),
    "stored": ("int8",),
    "int4-int8": ("int8", "int8-weight", "fp16"),
    "int8-token": ("int8", "int8-weight", "fp32"),
    "int8-static": ("int8", "fp32"),
    "int8": ("int8-weight", "fp32", "fp16"),
    "int8-weight": ("fp32", "fp16"),
    "fp8": ("int8", "int8-weight", "fp16"),
    "fp16": ("fp32",),
}
CALIBRATION_OPTIONAL = ("int4", "int4-int8")  # they need no calibration and are closer to the source with one


@dataclass(frozen=True, slots=True)
class Advice:
    """A way out of a refusal: a verb, and values for fields of eagle_export.writing.settings.Settings."""

    verb: str
    settings: dict[str, str | float | list[str]] = field(default_factory=dict)

    @property
    def as_arguments(self) -> str:
        """As in a call from Python: accept it with max_kl=1.4"""
        return " ".join([self.verb, *(f"{name}={value!r}" for name, value in self.settings.items())])

    @property
    def as_options(self) -> str:
        """As on the command line: accept it with --max-kl 1.4"""
        words = [self.verb]
        for name, value in self.settings.items():
            values = value if isinstance(value, list) else [f"{value:g}" if isinstance(value, float) else value]
            words += [f"--{name.replace('_', '-')} {each}" for each in values]
        return " ".join(words)


class FidelityError(ExportError):
    """A bundle follows its source less closely than it must, so it is not written. str() names parameters of `export`,
    `with_options` those of the command."""

    def __init__(self, reason: str, advice: Sequence[Advice], certificate: Certificate | None = None) -> None:
        """certificate: of the bundle; None if its logits are not finite."""
        self.certificate = certificate
        super().__init__(f"{reason}; {'; or '.join(each.as_arguments for each in advice)}")
        self.with_options = f"{reason}; {'; or '.join(each.as_options for each in advice)}"


@dataclass(frozen=True, slots=True)
class RequiredFidelity:
    """What an export must reach. explicit: whether the user asked for these limits; else they are the precision's.
    backend, precision, calibrated (whether a calibration was given), recorded (whether inputs are recorded without it),
    aims (whether layers were widened for an agreement, so that another one asks for another bundle): the export, used
    to say what else to try."""

    limits: Limits
    explicit: bool
    backend: str
    precision: str
    calibrated: bool
    recorded: bool = True
    aims: bool = False


def required_fidelity(
    backend: str,
    precision: str,
    min_agreement: float | None,
    max_kl: float | None,
    *,
    calibrated: bool,
    recorded: bool = True,
) -> RequiredFidelity:
    """The limits that were asked for, and the precision's own for None. Raises ExportError for impossible figures."""
    default = LIMITS[precision]
    if min_agreement is not None and not 0 <= min_agreement <= 1:  # also false for NaN
        raise ExportError(f"the least agreement is {min_agreement:g}, but must be 0 to 1")
    if max_kl is not None and not 0 <= max_kl < math.inf:
        raise ExportError(f"the largest KL is {max_kl:g}, but must be a number of nats, 0 or more")
    limits = Limits(
        default.agreement if min_agreement is None else min_agreement, default.kl if max_kl is None else max_kl
    )
    explicit = (min_agreement, max_kl) != (None, None)
    return RequiredFidelity(limits, explicit, backend, precision, calibrated, recorded)


def refusal(certificate: Certificate, required: RequiredFidelity, worst: Sequence[LayerError]) -> FidelityError:
    """The error for an export that does not reach what is required. worst: its worst layers, worst first, if known."""
    than = "was asked for" if required.explicit else f"{required.precision} should"
    figures = compared(certificate.agreement, certificate.kl, required.limits)
    reason = f"the bundle follows its source less closely than {than}: {figures}"
    if worst:
        reason += f"; worst layers: {', '.join(layer.summary for layer in worst)}"
    ways = what_to_try(required, worst, kl_met=certificate.kl <= required.limits.kl)
    if not required.aims or certificate.agreement >= required.limits.agreement:
        ways.append(accepting(certificate, required.limits))
    return FidelityError(reason, ways, certificate)


def what_to_try(required: RequiredFidelity, worst: Sequence[LayerError] = (), *, kl_met: bool = False) -> list[Advice]:
    """Settings that may bring a bundle closer to its source. worst: as for `refusal`. kl_met: whether too few
    tokens agree although the KL is small enough, so that it does not tell how many layers are to blame."""
    recipes, precision = RECIPES[required.backend], required.precision
    wider = [name for name in WIDER.get(precision, ()) if name in recipes]
    wider = [name for name in wider if required.calibrated or not recipes[name].calibrated]
    ways = []
    if recipes[precision].self_calibrated and not (required.recorded or required.calibrated):
        ways.append(Advice("let inputs be recorded (without --no-recording, in Python record=False)"))
    if worst and precision not in ("fp32", "fp16"):
        # The worst layer alone if keeping it may be enough, else all that are named.
        enough = worst[:1] if worst[0].exact <= required.limits.kl and not kl_met else worst
        ways.append(Advice("try", {"keep": [each.layer.name for each in enough]}))
    if required.aims:
        ways.append(Advice("ask for more agreement, for which layers are widened"))
    if wider:
        ways.append(Advice("try", {"precision": wider[0]}))
    if precision in CALIBRATION_OPTIONAL and required.recorded and not required.calibrated:
        ways.append(Advice("give the folder that eagle-calib wrote as calibration"))
    if precision == "fp32":
        ways.append(Advice("report this as a bug, since fp32 rounds nothing away"))
    return ways


def accepting(certificate: Certificate, limits: Limits) -> Advice:
    """The settings with which this very export would be written."""
    advice = Advice("accept it, which takes seconds, with")
    if certificate.agreement < limits.agreement:
        advice.settings["min_agreement"] = math.floor(100 * certificate.agreement) / 100
    if certificate.kl > limits.kl:
        step = 10.0 ** max(math.floor(math.log10(certificate.kl)) - 1, LEAST_DIGIT)
        advice.settings["max_kl"] = float(f"{math.ceil(certificate.kl / step) * step:.2g}")
    return advice


def keep_refused(bundle: Path, certificate: Certificate, manifest: Manifest, finished: Path) -> None:
    """Moves a bundle that was refused to the finished work of its export (resume.py), with its certificate in its
    manifest: the same command with other limits writes it without making it again."""
    (bundle / MANIFEST_NAME).write_text(replace(manifest, certificate=certificate).to_json(), encoding="utf-8")
    rename(bundle, finished / REFUSED)


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
    rename(kept, bundle)
    return manifest
