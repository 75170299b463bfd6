"""Digests of what a bundle computes: the same for any number of threads, others for another bundle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_tools.bits import main


def test_lines_of_bundles(bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    bundles = [str(bundle_of("eagle1", precision)) for precision in ("int8", "int4")]
    printed = []
    for threads in ("1", "2"):
        assert main([*bundles, "--backend", "cpu", "--rows", "40", "--tokens", "6", "--threads", threads]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    first, second = printed[0].splitlines()
    assert first != second and first.startswith("cpu, logits ") and "T=0 " in first and ", T=1 " in first


@pytest.mark.parametrize("counts", [("0", "6"), ("40", "0"), ("100000", "6")])
def test_counts_that_do_not_fit(
    counts: tuple[str, str], bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    rows, tokens = counts
    assert main([str(bundle_of("eagle1", "int8")), "--rows", rows, "--tokens", tokens]) == 2
    assert f"rows are {rows} and tokens {tokens}, but must be 1 or more, together" in capsys.readouterr().err
