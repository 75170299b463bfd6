"""Collections of garbage stop while an export imports its libraries, and go on afterwards."""

from __future__ import annotations

import gc
from contextlib import suppress

from eagle_export.base.memory import without_collection


def test_collection_goes_on_after_an_error_too() -> None:
    assert gc.isenabled()
    during = []
    with suppress(ValueError), without_collection():
        during.append(gc.isenabled())
        raise ValueError
    assert during == [False]
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
