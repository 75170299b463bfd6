"""What a loaded model is made of, for tests that look inside."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_runtime import EagleModel
from eagle_runtime.app.turns import Turns
from eagle_runtime.core.session import Session
from eagle_runtime.opening.opened import OpenBundle
from eagle_runtime.ort.session import OrtSession


def turns_of(model: EagleModel) -> Turns:
    """What makes the model's turns; its `bundle` may be replaced."""
    return model._turns


def bundle_in(model: EagleModel) -> OpenBundle:
    """The opened bundle."""
    return turns_of(model).bundle


def sessions_of(model: EagleModel) -> tuple[Session, ...]:
    """The session of the target and, if there is one, of the head. Raises ClosedError."""
    return turns_of(model).engines.sessions


def shared_passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A list that grows by every pass of several texts from now on: the rows that each text has in it."""
    rows: list[list[int]] = []
    together = OrtSession.run_together

    def counted(session: OrtSession, passes: Any) -> Any:
        rows.append([len(feeds["input_ids"]) for feeds, _ in passes])
        return together(session, passes)

    monkeypatch.setattr(OrtSession, "run_together", counted)
    return rows
