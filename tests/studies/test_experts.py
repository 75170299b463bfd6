"""The cost of a mixture of experts in both forms, at small widths."""

from __future__ import annotations

import pytest

from studies import experts
from studies.harness import main


@pytest.mark.parametrize("shape", experts.SHAPES)
def test_both_forms_are_measured(
    shape: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    heads = {"head_dim": 16, "moe_intermediate_size": 32}
    heads |= {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2}
    wide = experts.SHAPES[shape]
    monkeypatch.setitem(experts.SHAPES, shape, {key: (small | heads).get(key, value) for key, value in wide.items()})
    options = ["--layers", "1", "--rows", "1,3", "--runs", "2", "--precision", "int8"]
    assert main(["experts", "--shape", shape, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].startswith("| int8 | 1 | 2.0 of 5 |")


def test_experts_that_are_read() -> None:
    assert experts.experts_read(8, 2, 1) == pytest.approx(2)
    assert experts.experts_read(8, 2, 2) == pytest.approx(3.5)  # 2, and 6/8 of 2 others
    assert experts.experts_read(64, 8, 1000) == pytest.approx(64)


def test_too_many_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["experts", "--rows", "65"]) == 2
    assert "measure 64 at most" in capsys.readouterr().err
