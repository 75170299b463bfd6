"""Acceptance figures: counted by hand on small trees, and compared with the statistics of real generations."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import put_listed, put_tokenizer
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.generate import Cycle
from eagle_tools.acceptance import BINS, Acceptance, main, measure, table, verified_nodes
from eagle_tools.questions import Question

PNG = b"\x89PNG\r\n\x1a\n"
QUESTIONS = [Question(0, ("Q: Ann has 3 apples and gets 4 more.",)), Question(1, ("Once", "more"))]


def cycle(parents: list[int], probabilities: list[float], path: list[int]) -> Cycle:
    """A cycle whose tree has these probabilities of each node given its parent, and this accepted path."""
    scores = np.zeros(len(parents), np.float32)
    for node in range(1, len(parents)):
        scores[node] = scores[parents[node]] + np.log(probabilities[node])
    tree = Tree(np.arange(len(parents)), np.array(parents), scores)
    return Cycle(tree, Step(np.array(path), np.zeros(len(path), np.int64)), 0.0, 0.0, 0.0)


def test_children_of_accepted_nodes_are_the_tested_ones() -> None:
    #       0 -> 1 (.6), 2 (.3);  1 -> 3 (.5), 4 (.4);  2 -> 5 (.9);  accepted: 0, 1, 4
    confidence, accepted = verified_nodes(cycle([-1, 0, 0, 1, 1, 2], [1, 0.6, 0.3, 0.5, 0.4, 0.9], [0, 1, 4]))
    np.testing.assert_allclose(confidence, [0.6, 0.3, 0.5, 0.4], rtol=1e-6)
    assert accepted.tolist() == [True, False, False, True]


def test_n_alpha_counts_the_drafts_that_reached_each_depth() -> None:
    counts = Acceptance("pair", "chain", 0.0)
    chain = ([-1, 0, 1, 2], [1, 0.9, 0.5, 0.5])
    for path in ([0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]):
        counts.add(cycle(*chain, path))
    assert counts.reached.tolist() == [4, 3, 2, 0, 0]  # three drafts: nothing was tried at depth 4
    assert counts.accepted.tolist() == [3, 2, 2, 0, 0]
    np.testing.assert_allclose(counts.n_alpha, [3 / 4, 2 / 3, 1, 0, 0])


def test_calibration_of_a_head_whose_confidence_is_the_chance_of_acceptance() -> None:
    rng = np.random.default_rng(0)
    confidence = rng.random(200_000, np.float32)
    counts = Acceptance("pair", "dynamic", 1.0)
    counts.confidences, counts.outcomes = [confidence], [rng.random(200_000) < confidence]
    means, share, count = counts.calibration()
    assert len(means) == BINS and count.sum() == 200_000
    np.testing.assert_allclose(share, means, atol=0.02)
    counts.confidences, counts.outcomes = [np.array([0.05, 1.0], np.float32)], [np.array([False, True])]
    means, share, count = counts.calibration()  # empty intervals are left out, 1 belongs to the last
    assert (means.round(3).tolist(), share.tolist(), count.tolist()) == ([0.05, 1.0], [0.0, 1.0], [1, 1])


@pytest.fixture(scope="module")
def bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the golden pair with a tokenizer."""
    folder = tmp_path_factory.mktemp("acceptance") / "pair"
    shutil.copytree(bundle_of("eagle3"), folder)
    put_tokenizer(folder)
    return folder


def test_tau_is_that_of_the_generations(bundle: Path) -> None:
    with EagleModel.load(bundle, threads=1) as model:
        counts = measure(model, "pair", QUESTIONS, "dynamic", 0.0, 40)
        stats = [model.generate(q.turns[0], tree="dynamic", max_new_tokens=40).usage for q in QUESTIONS]
        chain = measure(model, "pair", QUESTIONS[:1], "chain", 0.0, 40)
    assert counts.tau == sum(s.new_tokens - 1 for s in stats) / sum(s.target_passes for s in stats)
    assert counts.tau > 2 and len(counts.calibration()[0]) >= 5
    assert chain.tau > 1.5 and chain.reached[0] == chain.passes and 0 < chain.n_alpha[0] <= 1


def test_chat_models_are_asked_turn_by_turn(bundle: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(bundle, chat)
    template = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"
    put_listed(chat, "chat_template.jinja", template.encode())
    with EagleModel.load(chat, threads=1) as model:
        one = measure(model, "chat", [Question(0, ("Q: hi",))], "dynamic", 0.0, 8)
        two = measure(model, "chat", [Question(0, ("Q: hi", "Q: ho"))], "dynamic", 0.0, 8)
    assert two.new_tokens > one.new_tokens


def test_command_prints_the_table_and_writes_it_with_the_plot(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "set.jsonl"
    questions.write_text("".join(json.dumps({"turns": q.turns}) + "\n" for q in QUESTIONS), encoding="utf-8")
    out = tmp_path / "out"
    arguments = [str(bundle), "--prompts", str(questions), "--max-new-tokens", "24", "--threads", "1"]
    assert main([*arguments, "--temperature", "0", "-o", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed == (out / "acceptance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| pair \| 0 \| (chain|static|dynamic) \| (\d\.\d\d) \|", printed, re.M)
    assert [tree for tree, _ in rows] == ["chain", "static", "dynamic"] and float(rows[2][1]) > 1.5
    assert (out / "calibration.png").read_bytes().startswith(PNG)


def test_wrong_input_is_refused(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "set.jsonl").write_text('{"turns": ["a"]}', encoding="utf-8")
    prompts = ["--prompts", str(tmp_path / "set.jsonl")]
    assert main([str(bundle), *prompts, "-o", str(tmp_path / "none" / "out")]) == 2
    assert main([str(bundle), "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert main([str(tmp_path), *prompts]) == 2
    assert main([str(bundle), *prompts, "--temperature", "-1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("eagle_tools.acceptance: ") for line in lines)


def test_table_shows_n_alpha_of_chains_only() -> None:
    counts = Acceptance("e", "chain", 1.0, new_tokens=30, passes=10)
    counts.reached[:], counts.accepted[:] = 8, [6, 4, 2, 1, 0]
    tree = Acceptance("e", "dynamic", 0.0, new_tokens=40, passes=10)
    lines = table([counts, tree]).splitlines()
    assert lines[2] == "| e | 1 | chain | 3.00 | 0.75 | 0.50 | 0.25 | 0.12 | 0.00 |"
    assert lines[3] == "| e | 0 | dynamic | 4.00 |  |  |  |  |  |"
