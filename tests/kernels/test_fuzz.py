"""Inputs of operators that do not fit end in errors, not in the end of the process: a few of the cases of
tests/operator_fuzz.py, whose docstring says how to run as many as one likes."""

from __future__ import annotations

from conftest import needs_operators
from operator_fuzz import main, run

pytestmark = needs_operators
CASES = 3000  # five seconds with sanitizers


def test_inputs_that_do_not_fit() -> None:
    ends = run(0, CASES, seed=0).ends
    assert {name for name, _ in ends} == {
        *(
            "product",
            "gated",
            "normed",
            "norm",
            "attention",
            "attention over rows",
            "steps",
            "experts",
            "convolution",
            "delta",
            "scan",
        ),
    }
    for end in ("not opened", "refused", "computed"):
        assert all(ends[name, end] > 0 for name, _ in ends), end


def test_the_command_watches_a_process() -> None:
    assert main(["--cases", "30", "--seed", "1"]) == 0
