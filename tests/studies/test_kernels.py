"""The table of what a linear layer costs per way of storing it."""

from __future__ import annotations

import pytest

from studies.harness import main
from studies.kernels import ROWS, WAYS


def test_every_way_has_a_line_with_a_time_per_number_of_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--shape", "128", "96", "--layers", "2", "--threads", "1"]) == 0
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[0] for line in lines] == list(WAYS)
    for line in lines:
        assert all(float(cell) > 0 for cell in line[1 : len(ROWS) + 1])
        assert str(max(ROWS)) in line[-1] or line[-1] == "all", "the largest run is compared with itself"


def test_no_threads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--threads", "0"]) == 2
    assert "must be 1 or more" in capsys.readouterr().err
