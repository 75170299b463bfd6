"""The table of what each part of a block head is worth, end to end on a head that has hardly learned."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle_export.graphs.pair import open_pair
from studies.block_ablation import Row, parameters_of, table, variants
from studies.harness import main

PAIR = Path(__file__).parents[2] / "tools" / "demo_pair"


def test_two_layers_hold_as_many_weights_as_one() -> None:
    config = json.loads((PAIR / "target" / "config.json").read_text(encoding="utf-8"))
    for kv_heads in (None, 4):
        options = variants(config, kv_heads)["two layers"]
        units = int(options[options.index("--mlp") + 1])
        attention = 2 * 256 * 64 * (4 + (kv_heads or 2))
        one, two = attention + 3 * 256 * 480, 2 * (attention + 3 * 256 * units)
        assert 0.99 < two / one <= 1
        assert "--mlp" not in variants(config, kv_heads, whole=True)["two layers"]


def test_the_table_has_a_line_per_row() -> None:
    row = Row("block", 1_234_567, "int8", "tree, coupled", 0.6, 3.456, 0.123)
    assert "| block | 1,234,567 | int8 | tree, coupled | 0.6 | 3.46 | 0.12 |" in table([row, row])


@pytest.mark.parametrize(
    "precisions", [["fp32"], pytest.param(["fp32", "int8", "int4"], marks=pytest.mark.slow)], ids=len
)
def test_heads_are_trained_exported_and_measured(
    precisions: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And taken as they are by a second run of the command."""
    prompts = [json.loads(line)["turns"][0] for line in (PAIR / "heldout.jsonl").read_text("utf-8").splitlines()]
    work = tmp_path / "work"
    work.mkdir()
    (work / "greedy.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts), "utf-8")
    arguments = [str(work), "--pair", str(PAIR), "--steps", "2", "--threads", "1", "--count", "1"]
    arguments += ["--max-new-tokens", "12", "--precisions", ",".join(precisions)]
    training = ["--", "--batch-size", "2", "--draft-vocab", "512"]
    assert main(["block_ablation", *arguments, "--only", "eagle3.1"]) == 2
    assert "not a head of the table" in capsys.readouterr().err
    assert main(["block_ablation", *arguments, "--only", "block", *training]) == 0
    printed = capsys.readouterr().out
    lines = [line.split("|")[1:-1] for line in (work / "ablation/table.md").read_text("utf-8").splitlines()]
    assert printed == (work / "ablation/table.md").read_text("utf-8")
    drafts = [(line[2].strip(), line[3].strip(), line[4].strip()) for line in lines[2:]]
    assert drafts[:2] == [("fp32", "chain", "0"), ("fp32", "tree", "0")]
    assert ("fp32", "tree, coupled", "0.6") in drafts and ("fp32", "tree", "1") in drafts
    assert {precision for precision, _, _ in drafts} == set(precisions)
    assert all(1 <= float(line[5]) <= 9 for line in lines[2:])
    head = work / "ablation" / "block"
    part = open_pair(PAIR / "target", head).head
    assert part is not None and f"{parameters_of(head):,}" == lines[2][1].strip()
    shutil.rmtree(head / "training")
    (work / "greedy.jsonl").unlink()  # so that nothing can be trained again
    assert main(["block_ablation", *arguments, "--only", "block", *training]) == 0
