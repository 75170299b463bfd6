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
from eagle_runtime.errors import RequestError
from eagle_runtime.text.tokenizer import Text
from eagle_tools.bench import run
from eagle_tools.bench.memory import Peak
from eagle_tools.bench.plan import Plan
from eagle_tools.bench.rows import Row
from eagle_tools.bench.run import Reporter
from eagle_tools.questions import Question
from eagle_tools.results import main, pairs
from eagle_tools.results.command import ROOT, _parser
from eagle_tools.results.pairs import HEADS, PRECISIONS, Pair, bundle_of, drop_older, grown, shipped
from eagle_tools.results.stages import (
    LONG,
    MORE,
    Finished,
    Sizes,
    Stage,
    finish,
    long_questions,
    repeating,
    signature_of,
    stages_of,
)
from eagle_tools.results.tables import results_page

EDITS = [Question(n, (f"x = {n}\n\ny = {n}\n",), "edit") for n in range(9)]
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


def test_what_was_made_from_an_earlier_shipped_pair_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    for name in ("target", *HEADS):
        (source / name).mkdir(parents=True)
        (source / name / "model.safetensors").write_bytes(name.encode())
    monkeypatch.setattr(pairs, "shipped", lambda: Pair("demo", source, "", ""))
    made = [tmp_path / "grown" / "target", tmp_path / "bundles" / "demo-eagle1-int8"]
    kept = tmp_path / "rows" / "demo-pytorch.jsonl"

    def make() -> None:
        for folder in (*made, kept.parent):
            folder.mkdir(parents=True, exist_ok=True)
        kept.touch()

    make()
    drop_older(tmp_path, print)
    assert not any(folder.parent.exists() for folder in made) and capsys.readouterr().out.count("removing") == 2
    make()
    drop_older(tmp_path, print)
    assert all(folder.exists() for folder in made)
    (source / "eagle3" / "model.safetensors").write_bytes(b"another round")
    drop_older(tmp_path, print)
    assert not any(folder.parent.exists() for folder in made) and kept.exists()
    mine = tmp_path / "bundles" / "mine"
    make()
    mine.mkdir()
    (tmp_path / "shipped_pair.sha256").unlink()
    drop_older(tmp_path, print)
    assert mine.exists() and not any(folder.exists() for folder in made)


def test_a_finished_stage_is_not_run_again_and_another_is(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "peak_of", lambda job: Peak(10**8, None))
    question = Question(1, ("Q: Ann has 3 apples and gets 4 more.",))
    plan = Plan(((bundle, ("vanilla", "eagle")),), (question,), max_new_tokens=8, threads=1, backend="cpu")
    stage, listener = Stage("demo-x", "demo", plan), Listener()
    (tmp_path / "demo-x.part.jsonl").write_text("rows of a run that was stopped\n")
    first = finish(stage, tmp_path, listener)
    assert [row.method for row in first.rows] == ["vanilla", "eagle"] and listener.steps
    assert first.differing == [] and first.facts
    listener.steps.clear()
    assert finish(stage, tmp_path, listener) == first and listener.steps == []
    assert not (tmp_path / "demo-x.part.jsonl").exists()
    longer = dataclasses.replace(stage, plan=dataclasses.replace(plan, max_new_tokens=9))
    assert finish(longer, tmp_path, listener).rows[0].new_tokens == 9 and listener.steps
    assert finish(stage, tmp_path, Reporter()).rows[0].new_tokens == 8


def test_a_bundle_exported_anew_is_another_plan(bundle: Path) -> None:
    plan = Plan(((bundle, ("vanilla",)),), (Question(1, ("a",)),))
    before = signature_of(plan)
    manifest = json.loads((bundle / "eagle_config.json").read_text())
    (bundle / "eagle_config.json").write_text(json.dumps({**manifest, "tools": {}}))
    assert signature_of(plan) != before


def test_stages_of_a_pair(bundle: Path, tmp_path: Path) -> None:
    pair = Pair("demo", GOLDEN, "Golden", "")
    for head in ("eagle1", "eagle3"):
        for precision in ("fp32", "int8", "int4"):
            folder = tmp_path / "work" / "bundles" / f"demo-{head}-{precision}"
            shutil.copytree(bundle, folder)
    sizes = Sizes(3, 2, 16, 1)
    stages = {stage.name: stage.plan for stage in stages_of(pair, tmp_path / "work", WORDS, EDITS, sizes, print)}
    methods = [f"demo-methods-{p}" for p in ("fp32", "int8", "int4")]
    sweeps = [f"demo-sweep-{p}" for p in ("fp32", "int8", "int4")]
    assert list(stages) == [
        *methods,
        "demo-pytorch",
        *sweeps,
        "demo-repeat",
        "demo-edit",
    ]  # the context is too short for "long"
    for plan in stages.values():
        assert (plan.max_new_tokens, plan.threads, plan.backend) == (16, 1, "cpu")
    assert stages["demo-methods-int8"].temperatures == (0.0, 1.0)
    assert [q.id for q in stages["demo-sweep-int4"].questions] == [0, 1]
    assert [len(stages[f"demo-{name}"].questions) for name in ("methods-int4", "pytorch", "repeat")] == [3, 6, 6]
    assert stages["demo-edit"].questions == tuple(EDITS[:6])
    assert "no-value" in stages["demo-methods-int8"].bundles[0][1]
    assert "no-value" not in stages["demo-methods-fp32"].bundles[0][1]
    assert stages["demo-pytorch"].pytorch == GOLDEN / "target"


def test_prompts_that_repeat_and_prompts_that_are_long(bundle: Path) -> None:
    question = Question(1, ("abcdef" * 10,), "python")
    assert repeating(question) == Question(1, ("abcdef" * 10 + "\n\n\n" + ("abcdef" * 10)[:20],), "repeats itself")
    text = Text(bundle)
    questions = long_questions(text, WORDS, 3)
    assert [q.category for q in questions] == [f"{length} tokens" for length in LONG] * 3
    assert len({q.id for q in questions}) == len({q.turns for q in questions}) == 6
    for q, length in zip(questions, LONG * 3, strict=True):
        assert len(text.encode(q.turns[0])) == pytest.approx(length, rel=0.02)
    assert all(
        long.turns[0].endswith(short.turns[0]) for short, long in zip(questions[::2], questions[1::2], strict=True)
    )


def test_what_cannot_be_made_is_reported_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"eagle_export.cli failed: eagle-export: .*invalid choice: 'fp31'"):
        bundle_of(shipped(), "eagle1", "fp31", tmp_path, print)
    monkeypatch.setattr(pairs, "GROWN_BYTES", 1 << 60)
    with pytest.raises(RequestError, match="GB free; make room"):
        grown(tmp_path, print)
    assert (shipped().target / "config.json").is_file()


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
    peaks = {"eager fp32 pytorch target": 10**9}
    return Finished(list(rows), ["A machine"], notes or [], differing or [], peaks, "2026-01-02 by eagle-edge 0.1.0")


def test_the_page_has_the_papers_tables() -> None:
    one, three = "demo-eagle1-int8", "demo-eagle3-int8"
    speeds = {"vanilla": 10, "lookup:chain": 12, "static": 20, "dynamic": 25, "no-value": 22, "cost-aware": 30}
    both = [
        row(bundle, method, prompt, speed * (1 + prompt) * (2 if bundle == three and speed > 10 else 1), temperature=t)
        for t in (0.0, 1.0)
        for bundle in (one, three)
        for method, speed in speeds.items()
        for prompt in (0, 1)
    ]
    theirs = {"backend": "pytorch", "precision": "fp32"}
    compared = [row(one, "cost-aware", 0, 40), row(one, "vanilla", 0, 10), row("target", "eager", 0, 5, **theirs)]
    compared.append(row("target", "prompt-lookup", 0, 8, **theirs))
    sweep = [row(one, method, 0, s) for method, s in (("vanilla", 9), ("dynamic", 10), ("cost-aware", 21))]
    sweep += [row(one, "8/2/4", 0, 20), row(one, "16/2/4", 0, 15)]
    repeat = [row(one, m, 0, s) for m, s in (("vanilla", 9), ("dynamic", 10), ("cost-aware", 20), ("eagle+lookup", 30))]
    long = [
        row(one, "vanilla", f"{length}-{place}", speed, category=f"{length} tokens")
        for place, speeds_there in enumerate(((10, 8), (40, 20), (20, 18)))
        for length, speed in zip(LONG, speeds_there, strict=True)
    ]
    stages = {
        "demo-methods-int8": finished(*both),
        "demo-pytorch": finished(*compared, notes=["PyTorch compiled, fp32: skipped"]),
        "demo-sweep-int8": finished(*sweep),
        "demo-repeat": finished(*repeat),
        "demo-edit": finished(*repeat),
        "demo-long": finished(*long, differing=["NOT LOSSLESS: x"]),
    }
    page = results_page([Pair("demo", GOLDEN, "The shipped pair", "Model: small.")], stages, "python -m x")
    assert page.count("\n\nModel: small.\n\n") == page.count("\n### ") == 7
    for line in (
        "- measured on 2026-01-02 by eagle-edge 0.1.0",
        "- command: `python -m x`",
        "- A machine",
        "### Compared with PyTorch (1 prompts)",
        "### Long context (int8, 3 prompts of each length)",
        "### Text that repeats itself (int8, 1 prompts)",
        "### Code that is written again with an edit (int8, 1 prompts)",
        "- NOT LOSSLESS: x",
        "| 0 | EAGLE-2 | 2.50x (2.50-2.50) | 2.00 |",
        "| 1 | EAGLE-3 | 5.00x (5.00-5.00) | 2.00 |",
        "| 0 | EAGLE-1, chain | - | - |",
        "| w/o value | 2.20x (2.20-2.20) | 2.00 | 2.20x (2.20-2.20) | 2.00 |",
        "| eagle-edge, EAGLE-1 head | int8 | cost-aware | 40.0 (40.0-40.0) | 8.00x (8.00-8.00) | 5.00x (5.00-5.00) | "
        "2.00 | 500 | - | 1/1 |",
        "| PyTorch | fp32 | eager | 5.0 (5.0-5.0) | 1.00x (1.00-1.00) | 0.62x (0.62-0.62) | 2.00 | 500 | 1000 | 1/1 |",
        "- PyTorch compiled, fp32: skipped",
        "| int8 | 2 | 8/2/4 | 20.0 (20.0-20.0) | 10.0 (10.0-10.0) | 21.0 (21.0-21.0) | 1.05x (1.05-1.05) | "
        "2.10x (2.10-2.10) | 2.33x (2.33-2.33) |",
        "| eagle+lookup | 30.0 (30.0-30.0) | 2.00 | 3.33x (3.33-3.33) | 3.00x (3.00-3.00) | 1.50x (1.50-1.50) |",
        "| vanilla | 20.0 (10.0-40.0) | 18.0 (8.0-20.0) | 0.80x (0.50-0.90) | 2.00 | 2.00 | 100.0 | 111.1 | "
        "1.25x (1.11-2.00) |",
    ):
        assert line in page.splitlines(), line


def page_of(prompts: int, sweep_prompts: int, names: list[str]) -> tuple[list[Pair], dict[str, Finished]]:
    """The pairs of these names, and invented stages with these numbers of prompts."""
    every = [shipped(), Pair("grown", Path(), "", "")]
    stages: dict[str, Finished] = {}
    for name in names:
        bundle = f"{name}-eagle1-int8"
        three = ("vanilla", "dynamic", "cost-aware")
        many = [row(bundle, method, prompt, 9) for method in three for prompt in range(MORE * prompts)]
        theirs = [dataclasses.replace(r, backend="pytorch", method="eager") for r in many if r.method == "vanilla"]
        few = [dataclasses.replace(r, temperature=t) for t in (0.0, 1.0) for r in many if int(r.prompt_id) < prompts]
        sweep = [row(bundle, method, n, 9) for method in (*three, "8/2/4") for n in range(sweep_prompts)]
        long = [
            row(bundle, "vanilla", f"{length}-{n}", 9, category=f"{length} tokens")
            for length in LONG
            for n in range(MORE * prompts)
        ]
        stages |= {f"{name}-methods-{precision}": finished(*few) for precision in PRECISIONS}
        stages |= {f"{name}-sweep-{precision}": finished(*sweep) for precision in PRECISIONS}
        stages |= {f"{name}-{stage}": finished(*many) for stage in ("repeat", "edit")}
        stages |= {f"{name}-pytorch": finished(*many, *theirs), f"{name}-long": finished(*long)}
    return [pair for pair in every if pair.name in names], stages


def test_the_page_in_docs_is_that_of_the_command_version_and_machine_that_it_names(tmp_path: Path) -> None:
    """All but figures and notes is what the generator writes for that command."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^- command: `(.*)`$", page, re.M)
    assert command.startswith("python -m eagle_tools.results ")
    args = _parser().parse_args(shlex.split(command)[3:])
    (version,) = re.findall(r"^- measured on \d{4}-\d\d-\d\d by (eagle-edge [\d.]+), commit [0-9a-f]{7,}$", page, re.M)
    facts = re.findall(r"^- (.*)$", page.partition("\n## ")[0], re.M)
    for fact in (version, r".*, \d+ threads", "Linux, .*", r"onnxruntime [\d.]+", r"cpu: memory read at [\d.]+ GB/s"):
        assert any(re.fullmatch(fact, line) for line in facts), fact
    assert re.search(rf"^- {args.count} questions (as plain text|through the chat template)", page, re.M)
    assert f"- {args.max_new_tokens} new tokens" in page
    of_command, stages = page_of(args.count, args.sweep_count, args.pairs)
    if "grown" in args.pairs:
        (tmp_path / "grown").mkdir()
        of_command[-1] = grown(tmp_path, print)

    def without_figures(text: str) -> list[str]:
        table_rows = re.sub(r"(?<=\n\|)---.*\n(\|.*\n)+", "", text)  # titles of columns stay
        return [line for line in table_rows.splitlines() if line and not line.startswith(("- ", "The fastest here"))]

    assert without_figures(results_page(of_command, stages, command)) == without_figures(page)


def test_wrong_input_is_refused_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, says in (
        (["--count", "0"], "must be 1 or more"),
        (["-o", str(tmp_path / "none" / "x.md")], "none does not exist"),
        (["--pairs", "big"], "invalid choice"),
        (["--work", str(GOLDEN / "byte_tokenizer.json" / "x"), "-o", str(tmp_path / "x.md")], "cannot be made"),
    ):
        try:
            status = main(argv)
        except SystemExit as stop:
            status = int(str(stop.code))
        err = capsys.readouterr().err
        assert status == 2 and err.count("\n") == 1 and says in err
