"""make bench: its stages, which go on where they stopped, and docs/results.md."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import GOLDEN, put_tokenizer
from eagle_runtime.base.errors import RequestError
from eagle_runtime.text.tokenizer import Text
from eagle_tools.bench import run
from eagle_tools.bench.memory import Peak
from eagle_tools.bench.plan import Plan
from eagle_tools.bench.rows import Row
from eagle_tools.bench.run import Reporter
from eagle_tools.peers.engine import FORMATS
from eagle_tools.questions import Question, read_questions
from eagle_tools.results import main, pairs
from eagle_tools.results.command import ROOT, _parser
from eagle_tools.results.pairs import (
    ALONE,
    HEADS,
    MEASURED,
    NAMES,
    PRECISIONS,
    QUESTIONS,
    Pair,
    bundle_of,
    drop_older,
    grown,
)
from eagle_tools.results.stages import LONG, Finished, Sizes, Stage, finish, long_questions, signature_of, stages_of
from eagle_tools.results.tables import results_page

WORDS = [Question(n, (f"def word_{n}(a, b):\n    return a + {n} * b\n" * 9,)) for n in range(40)]


@pytest.fixture
def bundle(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "demo-eagle1-int8"
    shutil.copytree(bundle_of("eagle1"), folder)
    put_tokenizer(folder)
    return folder


class Listener(Reporter):
    def __init__(self) -> None:
        self.steps: list[str] = []

    def step(self, what: str) -> None:
        self.steps.append(what)


def test_what_was_made_from_earlier_heads_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    for name in HEADS[:2]:
        (source / name).mkdir(parents=True)
        (source / name / "model.safetensors").write_bytes(name.encode())
    work = tmp_path / "work"
    made = [work / "smollm2-grown" / "target", work / "bundles" / "smollm2-eagle1-int8"]
    kept = work / "rows" / "smollm2-engines.jsonl"

    def make() -> None:
        for folder in (*made, kept.parent):
            folder.mkdir(parents=True, exist_ok=True)
        kept.touch()

    make()
    drop_older(work, print, source)
    assert not any(folder.parent.exists() for folder in made) and capsys.readouterr().out.count("removing") == 2
    make()
    drop_older(work, print, source)
    assert all(folder.exists() for folder in made)
    with monkeypatch.context() as patch:  # the page would name recipes that did not make these bundles
        patch.setattr(pairs, "recipes_line", lambda precisions: "recipes: other")
        drop_older(work, print, source)
    assert not any(folder.parent.exists() for folder in made)
    make()
    drop_older(work, print, source)
    make()
    (source / "eagle3" / "model.safetensors").write_bytes(b"another round")
    drop_older(work, print, source)
    assert not any(folder.parent.exists() for folder in made) and kept.exists()
    mine = work / "bundles" / "mine"
    make()
    mine.mkdir()
    (work / "shipped_heads.sha256").unlink()
    drop_older(work, print, source)
    assert mine.exists() and not any(folder.exists() for folder in made)


def test_a_finished_stage_is_not_run_again_and_another_is(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "peak_of", lambda job: Peak(10**8, None))
    question = Question(1, ("Q: Ann has 3 apples and gets 4 more.",))
    plan = Plan(((bundle, ("vanilla", "eagle")),), (question,), max_new_tokens=8, threads=1, backend="cpu")
    stage, listener = Stage("smollm2-x", "smollm2", plan), Listener()
    (tmp_path / "smollm2-x.part.jsonl").write_text("rows of a run that was stopped\n")
    first = finish(stage, tmp_path, listener)
    assert [row.method for row in first.rows] == ["vanilla", "eagle"] and listener.steps
    assert first.differing == [] and first.facts
    listener.steps.clear()
    assert finish(stage, tmp_path, listener) == first and listener.steps == []
    assert not (tmp_path / "smollm2-x.part.jsonl").exists()
    longer = dataclasses.replace(stage, plan=dataclasses.replace(plan, max_new_tokens=9))
    assert finish(longer, tmp_path, listener).rows[0].new_tokens == 9 and listener.steps
    assert finish(stage, tmp_path, Reporter()).rows[0].new_tokens == 8


def test_a_bundle_exported_anew_is_another_plan(bundle: Path) -> None:
    plan = Plan(((bundle, ("vanilla",)),), (Question(1, ("a",)),))
    before = signature_of(plan)
    manifest = json.loads((bundle / "eagle_config.json").read_text(encoding="utf-8"))
    (bundle / "eagle_config.json").write_text(json.dumps({**manifest, "tools": {}}))
    assert signature_of(plan) != before


def test_stages_of_a_pair(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("smollm2", golden_pair(tmp_path), "Golden", "")
    assert pair.heads == ("eagle3", "eagle1")
    for head in pair.heads:
        for precision in MEASURED:
            shutil.copytree(bundle, tmp_path / "work" / "bundles" / f"smollm2-{head}-{precision}")
    sizes = Sizes(9, 2, 16, 1)
    listed = stages_of(pair, tmp_path / "work", WORDS, FORMATS[:1], sizes, print)
    stages = {stage.name.removeprefix("smollm2-"): stage.plan for stage in listed}
    # The context is too short for "long".
    assert list(stages) == ["engines", "methods-fp32", "methods-int8", "methods-int4", "sweep"]
    for plan in stages.values():
        assert (plan.max_new_tokens, plan.threads, plan.backend) == (16, 1, "cpu")
    assert stages["methods-int8"].temperatures == (0.0, 1.0)
    assert [q.id for q in stages["sweep"].questions] == [0, 20]
    assert (stages["engines"].pytorch, stages["engines"].peers) == (pair.target, FORMATS[:1])
    made: list[str] = []

    def one_of(pair: Pair, head: str, precision: str, *_: object) -> Path:
        made.append(precision)
        return bundle

    monkeypatch.setattr("eagle_tools.results.stages.bundle_of", one_of)
    (one,) = stages_of(pair, tmp_path / "work", WORDS, (), sizes, print, "methods-int8")
    assert one.name == "smollm2-methods-int8" and made == ["int8"] * 2  # no bundle that it does not need
    monkeypatch.undo()
    alone = dataclasses.replace(pair, folder=tmp_path)
    assert alone.heads == (ALONE,)
    for precision in MEASURED:
        shutil.copytree(bundle, tmp_path / "work" / "bundles" / f"smollm2-alone-{precision}")
    listed = stages_of(alone, tmp_path / "work", WORDS, (), sizes, print)
    assert [stage.name for stage in listed] == ["smollm2-engines", *(f"smollm2-methods-{p}" for p in PRECISIONS)]
    assert "recycling" in listed[0].plan.bundles[0][1]


def golden_pair(folder: Path) -> Path:
    """A folder with the golden pair's parts under the names of a measured pair."""
    place = folder / "pair"
    place.mkdir()
    for name, source in (("target", "target"), ("eagle1", "head_eagle1"), ("eagle3", "head_eagle3_dv44")):
        shutil.copytree(GOLDEN / source, place / name)
    return place


def test_prompts_that_are_long(bundle: Path) -> None:
    text = Text(bundle)
    questions = long_questions(text, WORDS, 3)
    assert [q.category for q in questions] == [f"{length} tokens" for length in LONG] * 3
    assert len({q.id for q in questions}) == len({q.turns for q in questions}) == 6
    for q, length in zip(questions, LONG * 3, strict=True):
        assert len(text.encode(q.turns[0])) == pytest.approx(length, rel=0.02)
    assert all(
        long.turns[0].endswith(short.turns[0]) for short, long in zip(questions[::2], questions[1::2], strict=True)
    )
    assert len(long_questions(text, WORDS[:2], 2)[1].turns[0]) > 1000  # two questions are repeated


def test_the_questions_that_are_asked_by_default_are_shipped() -> None:
    questions = read_questions(QUESTIONS)
    assert len({question.turns for question in questions}) == len(questions) >= 30


def test_what_cannot_be_made_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair("smollm2", golden_pair(tmp_path), "", "")
    with pytest.raises(RequestError, match=r"eagle_export.commands.cli failed: eagle-export: .*invalid choice: 'fp31'"):
        bundle_of(pair, "eagle1", "fp31", tmp_path, print)
    monkeypatch.setattr(pairs, "GROWN_BYTES", 1 << 60)
    with pytest.raises(RequestError, match="GB free; make room"):
        grown(tmp_path, print)


def row(bundle: str, method: str, prompt: int | str, tok_s: float, **changes: object) -> Row:
    """A row of 41 tokens, 20 passes."""
    made = Row(
        method=method,
        precision="int8",
        backend="cpu",
        bundle=bundle,
        prompt_id=prompt,
        category="",
        temperature=0.0,
        prompt_tokens=7,
        new_tokens=41,
        target_passes=20,
        prefill_s=0.5,
        decode_s=40 / tok_s,
        tok_s=tok_s,
        tau=2.0,
        accepted_per_depth=(20,),
        draft_s=0.0,
        verify_s=0.0,
        host_s=0.0,
        token_ids=(1, 2),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def finished(*rows: Row, notes: list[str] | None = None, differing: list[str] | None = None) -> Finished:
    peaks, bits = {"eager fp32 pytorch target": 10**9}, {"plain q4_0 llama.cpp target": 5.36}
    now = "2026-01-02 by eagle-edge 0.1.0"
    return Finished(list(rows), ["A machine"], notes or [], differing or [], peaks, now, bits)


def test_the_page_has_the_papers_tables() -> None:
    one, three = "smollm2-eagle1-int8", "smollm2-eagle3-int8"
    speeds = {"vanilla": 10, "static": 20, "dynamic": 25, "cost-aware": 30}
    both = [
        row(
            bundle,
            method,
            prompt,
            speed * (1 + prompt) * (2 if bundle == three and speed > 10 else 1),
            temperature=t,
            prompt_set=("qa", "chat")[prompt],
        )
        for t in (0.0, 1.0)
        for bundle in (one, three)
        for method, speed in speeds.items()
        for prompt in (0, 1)
    ]
    theirs = {"backend": "pytorch", "precision": "fp32"}
    compared = [row(three, "cost-aware", 0, 40), row(three, "vanilla", 0, 10), row("target", "eager", 0, 5, **theirs)]
    compared.append(row("target", "prompt-lookup", 0, 8, **theirs))
    compared.append(row("target", "plain", 0, 7, backend="llama.cpp", precision="q4_0"))
    sweep = [row(three, method, 0, s) for method, s in (("vanilla", 9), ("dynamic", 10), ("cost-aware", 21))]
    sweep += [row(three, "8/2/4", 0, 20), row(three, "16/2/4", 0, 15)]
    long = [
        row(three, "vanilla", f"{length}-{place}", speed, category=f"{length} tokens")
        for place, speeds_there in enumerate(((10, 8), (40, 20), (20, 18)))
        for length, speed in zip(LONG, speeds_there, strict=True)
    ]
    stages = {
        "smollm2-engines": finished(*compared, notes=["PyTorch compiled, fp32: skipped"]),
        "smollm2-methods-int8": finished(*both),
        "smollm2-sweep": finished(*sweep),
        "smollm2-long": finished(*long, differing=["NOT LOSSLESS: x"]),
    }
    page = results_page([Pair("smollm2", GOLDEN, "A model", "Model: small.")], stages, "python -m x")
    assert page.count("\n\nModel: small.\n\n") == page.count("\n### ") == 5
    for line in (
        "- measured on 2026-01-02 by eagle-edge 0.1.0",
        "- command: `python -m x`",
        "- A machine",
        "### Compared with other engines (greedy, 1 prompts)",
        "### Long context (int8, 3 prompts of each length)",
        "- NOT LOSSLESS: x",
        "| 0 | EAGLE-2 | 2.50x (2.50-2.50) | 2.00 |",
        "| 1 | EAGLE-3 | 5.00x (5.00-5.00) | 2.00 |",
        "| T | method | qa | chat |",
        "| 0 | EAGLE-2 | 2.00, 2.50x | 2.00, 2.50x |",
        "| eagle-edge | int8 | cost-aware | 40.0 (40.0-40.0) | 8.00x (8.00-8.00) | 2.00 | 500 | 100 % | - | - |",
        "| pytorch | fp32 | eager | 5.0 (5.0-5.0) | 1.00x (1.00-1.00) | 2.00 | 500 | 100 % | - | 1000 |",
        "| llama.cpp | q4_0 | plain | 7.0 (7.0-7.0) | 1.40x (1.40-1.40) | 2.00 | 500 | 100 % | 5.4 | - |",
        "- PyTorch compiled, fp32: skipped",
        "| int8 | 2 | 8/2/4 | 20.0 (20.0-20.0) | 10.0 (10.0-10.0) | 21.0 (21.0-21.0) | 1.05x (1.05-1.05) | "
        "2.10x (2.10-2.10) | 2.33x (2.33-2.33) |",
        "| vanilla | 20.0 (10.0-40.0) | 18.0 (8.0-20.0) | 0.80x (0.50-0.90) | 2.00 | 2.00 | 100.0 | 111.1 | "
        "1.25x (1.11-2.00) |",
    ):
        assert line in page.splitlines(), line
    assert "EAGLE-1, chain" not in page  # nobody measured it


def test_the_page_in_docs_names_its_command_version_and_machine() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^- command: `(.*)`$", page, re.M)
    assert command.startswith("python -m eagle_tools.results ")
    args = _parser().parse_args(shlex.split(command)[3:])
    assert re.search(r"^- measured on \d{4}-\d\d-\d\d by eagle-edge [\d.]+, commit [0-9a-f]{7,}$", page, re.M)
    facts = re.findall(r"^- (.*)$", page.partition("\n## ")[0], re.M)
    for fact in (r".*, \d+ threads", "Linux, .*", r"onnxruntime [\d.]+", r"(cpu|native): memory read at [\d.]+ GB/s"):
        assert any(re.fullmatch(fact, line) for line in facts), fact
    assert f"- {args.max_new_tokens} new tokens" in page
    assert page.count("\n## ") == len(args.pairs) and set(args.pairs) <= set(NAMES)
    assert "Outputs that differ" not in page


def test_wrong_input_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, says in (
        (["--count", "0"], "must be 1 or more"),
        (["-o", str(tmp_path / "none" / "x.md")], "none does not exist"),
        (["--pairs", "big"], "'big' is not one of smollm2, "),
        (["--only", "motors", "--work", str(tmp_path / "w")], "no stage has 'motors' in its name; there is smoll"),
        (["--prompts", str(tmp_path / "none.jsonl"), "-o", str(tmp_path / "x.md")], "none.jsonl"),
        (["--work", str(GOLDEN / "byte_tokenizer.json" / "x"), "-o", str(tmp_path / "x.md")], "cannot be made"),
    ):
        try:
            status = main(argv)
        except SystemExit as stop:
            status = int(str(stop.code))
        err = capsys.readouterr().err
        assert status == 2 and err.count("\n") == 1 and says in err
