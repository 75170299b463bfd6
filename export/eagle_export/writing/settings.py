"""The settings of an export, and what follows from them before anything of the models is read.

export(target, draft, bundle, Settings(precision="int4", max_kl=0.1))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eagle_calib.calibration import Calibration, read_calibration
from eagle_export.base.errors import ExportError
from eagle_export.checking.limits import LIMITS, RequiredFidelity, required_fidelity
from eagle_export.recipes.blocks import Grid
from eagle_export.recipes.plan import (
    AUTO,
    RECIPES,
    Observations,
    Plan,
    check_runs,
    default_draft_precision,
    plan,
)
from eagle_export.writing.automatic import check_budget


@dataclass(frozen=True, slots=True)
class Settings:
    """How a bundle is made.

    backend, precision: keys of recipes.plan.RECIPES. draft_precision: precision of the head, None for the default next
    to the target's. calibration: folder that eagle-calib wrote for these models. draft_vocab: number of most frequent
    tokens that the head keeps, None for all. draft_top_k: the top k that the head's graph returns per row, which is the
    most children that a tree's node may have; None for bundle.TOP_K. certify: compare the finished bundle with the
    source and write the result into its manifest; if this machine cannot do that, a warning is returned. min_agreement,
    max_kl (nats): limits beyond which the bundle is refused; None for those of its precision (limits.LIMITS). keep:
    patterns of names of the target's weights that stay as traced. cache_precision: "int8" for a quantised target on a
    CPU that keeps its keys and values in bytes; None for the type in which it computes them. calibrate: a text file (or
    JSONL as eagle-calib reads it) on which inputs are recorded where there is no calibration; None for text that the
    target itself generates. record: whether inputs are recorded at all where there is no calibration. size: bytes of
    all weights to which precision "auto" widens layers; without it, it widens them until it should reach min_agreement,
    and the bundle is refused only below its precision's own limit."""

    precision: str = "fp32"
    draft_precision: str | None = None
    backend: str = "cpu"
    calibration: Path | None = None
    draft_vocab: int | None = None
    draft_top_k: int | None = None
    certify: bool = True
    min_agreement: float | None = None
    max_kl: float | None = None
    keep: Sequence[str] = ()
    cache_precision: str | None = None
    calibrate: Path | None = None
    record: bool = True
    size: int | None = None

    @property
    def aim(self) -> float | None:
        """The agreement that precision "auto" widens layers for, if it does."""
        return self.min_agreement if self.precision == AUTO and self.size is None else None

    def check(self, head: bool) -> None:
        """Raises ExportError for settings that contradict each other. head: whether there is one."""
        check_runs(self.backend, self.precision)
        if self.draft_top_k is not None and self.draft_top_k < 1:
            raise ExportError(f"draft top-k is {self.draft_top_k}, but must be 1 or more")
        if self.draft_vocab is not None and self.draft_vocab < 1:
            raise ExportError(f"draft vocabulary is {self.draft_vocab}, but must be 1 or more")
        if not head and (self.draft_precision, self.draft_vocab, self.draft_top_k) != (None, None, None):
            raise ExportError(
                "draft precision, vocabulary and top-k are settings of a head; give a head, or leave them out"
            )
        if self.calibrate is not None and not RECIPES[self.backend][self.precision].self_calibrated:
            raise ExportError(f"{self.precision} for backend {self.backend} records no inputs; leave the text out")
        if self.precision == AUTO and self.calibration is not None:
            raise ExportError(
                f"precision {AUTO} measures the source itself; give it a text, not a folder of eagle-calib"
            )
        if not self.record and (self.calibrate is not None or self.precision == AUTO):
            what = "a text" if self.calibrate is not None else AUTO
            raise ExportError(f"{what} needs recorded inputs; let them be recorded")
        if self.calibrate is not None and self.calibration is not None:
            raise ExportError("a calibration and a text to record one on were given; leave one of them out")


@dataclass(frozen=True, slots=True)
class Order:
    """Settings that were checked. precisions: of graph "target" and, if there is a head, "draft". required: what the
    bundle must reach. observed: what the calibration holds, None without one."""

    settings: Settings
    precisions: Mapping[str, str]
    required: RequiredFidelity
    observed: Calibration | None

    @classmethod
    def of(cls, settings: Settings, head: bool) -> Order:
        """Reads the calibration. head: whether there is one. Raises ExportError, CalibrationError."""
        settings.check(head)
        backend, precision, aim = settings.backend, settings.precision, settings.aim
        precisions = {"target": precision}
        if head:
            precisions["draft"] = settings.draft_precision or default_draft_precision(backend, precision)
        check_budget(precision, aim, settings.size)
        least = settings.min_agreement if aim is None else min(aim, LIMITS[AUTO].agreement)
        calibrated = settings.calibration is not None
        required = required_fidelity(
            backend, precision, least, settings.max_kl, calibrated=calibrated, recorded=settings.record
        )
        required = replace(required, aims=aim is not None)
        if required.explicit and not settings.certify:
            raise ExportError("an agreement or a KL is asked for, but the export is to go without the comparison")
        observed = None if settings.calibration is None else read_calibration(settings.calibration)
        order = cls(settings, precisions, required, observed)
        order.plan()  # which checks that the precisions go together
        return order

    @property
    def records(self) -> bool:
        """Whether the export records inputs of the source."""
        settings = self.settings
        recipe = RECIPES[settings.backend][settings.precision]
        return settings.record and self.observed is None and recipe.self_calibrated

    def plan(self, recorded: Observations | None = None, grids: Mapping[str, Grid] | None = None) -> Plan:
        """Returns the passes for the graphs. recorded: inputs of their layers; grids: of the target's weights in
        precision "auto", by name. Raises ExportError."""
        settings, draft = self.settings, self.precisions.get("draft")
        return plan(
            settings.backend, settings.precision, draft, self.observed, settings.draft_vocab, settings.keep,
            settings.cache_precision, recorded, grids,
        )  # fmt: skip
