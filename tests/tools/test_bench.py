"""eagle-bench on bundles of the golden pair: from prompts to rows, tables and the page."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import time
from collections.abc import Callable, Generator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conftest import GOLDEN, put_listed, put_tokenizer
from eagle_runtime import EagleModel
from eagle_tools.bench import contenders, main, memory, run
from eagle_tools.bench.contenders import bundle_contenders, first_turns, interleave, turns
from eagle_tools.bench.cycles import Recorder
from eagle_tools.bench.memory import JobError, MemoryRun, Peak, peak_of
from eagle_tools.bench.plan import SPARE, Plan, check_length
from eagle_tools.bench.rows import Asked, Row, Setup, read_rows, row_of
from eagle_tools.peers import worker
from eagle_tools.questions import Question
from eagle_tools.ties import NEAR
from eagle_tools.turns import by_turns

QUESTIONS = (
    Question(0, ("Q: Ann has 3 apples and gets 4 more.",), "apples"),
    Question(7, ("Q: Bob has 5 pens. </script><!--",), "pens"),
)
BYTES = 3  # id of the byte tokenizer's first byte
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp32 bundle with a tokenizer."""
    folder = tmp_path_factory.mktemp("bench") / "pair"
    shutil.copytree(bundle_of("eagle1"), folder)
    put_tokenizer(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "set.jsonl"
    rows = [{"question_id": q.id, "category": q.category, "turns": q.turns} for q in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def bench(bundle: Path, prompts: Path, *more: object) -> int:
    return main([str(bundle), "--prompts", str(prompts), "--threads", "1", *map(str, more)])


def test_rows_tables_and_page(bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("jsonl", "md", "html")}
    outputs = ["--output", files["jsonl"], "--markdown", files["md"], "--html", files["html"]]
    methods = "vanilla,eagle,chain,static,8/2/4"
    assert bench(bundle, prompts, "--max-new-tokens", 20, "--methods", methods, "--temperature", 0, 1, *outputs) == 0
    printed, errors = capsys.readouterr()
    assert errors == "" and printed == files["md"].read_text(encoding="utf-8")

    rows = read_rows(files["jsonl"])
    assert len(rows) == 5 * 2 * 2
    with EagleModel.load(bundle, threads=1) as model:
        for row in rows:
            question = QUESTIONS[[q.id for q in QUESTIONS].index(row.prompt_id)]
            settings: dict[str, Any] = {"max_new_tokens": 20, "temperature": row.temperature, "seed": 0}
            plain = model.generate(question.turns[0], method="vanilla", **settings)
            assert row.token_ids == plain.token_ids and row.new_tokens == len(row.token_ids)
            assert row.category == question.category and row.prompt_tokens == plain.usage.prompt_tokens
            assert row.tau == pytest.approx((row.new_tokens - 1) / row.target_passes)
            assert row.tok_s == pytest.approx((row.new_tokens - 1) / row.decode_s)
            assert sum(filter(None, (row.draft_s, row.verify_s, row.host_s))) < row.decode_s
            assert row.prefill_s > 0 and (row.precision, row.backend, row.bundle) == ("fp32", "cpu", "pair")
    assert {row.tau > 1 for row in rows if row.method == "vanilla"} == {False}

    for temperature in (0, 1):
        assert f"Temperature {temperature}:" in printed
    lines = re.findall(r"^\| pair \| fp32 \| cpu \| ([\w-]+) \| [\d.]+ \([\d.]+-[\d.]+\) \| ([\d.]+)x", printed, re.M)
    assert [line[0] for line in lines] == ["vanilla", "eagle", "chain", "static"] * 2
    assert lines[0][1] == lines[4][1] == "1.00"
    peaks = re.findall(r"\| (\d+) \| \d+ % \| 2/2 \|$", printed, re.M)
    assert len(peaks) == 8 and all(50 < int(peak) < 2000 for peak in peaks)
    assert "| 8/2/4 | **" in printed and "| pair | fp32 | eagle | 0 |" in printed

    page = files["html"].read_text(encoding="utf-8")
    viewed = cycles_in(page)
    shown = [run["setup"] for run in viewed["runs"]]
    assert len(shown) == len(set(shown)) * 2 == 3 * 2 * 2 and "pair · fp32 · static · T = 1" in shown
    for cycles in viewed["runs"]:
        row = next(
            r
            for r in rows
            if (f"{r.bundle} · {r.precision} · {r.method} · T = {r.temperature:g}") == cycles["setup"]
            and r.prompt_id == cycles["prompt_id"]
        )
        emitted = [t for c in cycles["cycles"] for t in (*(c["tokens"][n] for n in c["path"][1:]), c["next"])]
        assert tuple(emitted[: row.new_tokens - 1]) == row.token_ids[1:]
        assert cycles["cycles"][0]["tokens"][0] == row.token_ids[0]
        assert len(cycles["cycles"]) == row.target_passes
        assert cycles["prompt"] == QUESTIONS[[q.id for q in QUESTIONS].index(row.prompt_id)].turns[0]
    namespace = "http://www.w3.org/2000/svg"  # a name, which nothing is loaded from
    assert not re.search(r"(src|href)=|url\(|@import|https?://", page.replace(namespace, ""))
    assert page.count("<svg") >= 5 and "prefers-color-scheme: dark" in page
    check_nesting(page)


def cycles_in(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(page.partition('id="cycles">')[2].partition("</script>")[0])
    return data


def check_nesting(page: str) -> None:
    """Every element that is opened is closed, in order."""
    void = {"meta", "input", "br"}

    class Nesting(HTMLParser):
        open: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: object) -> None:
            if tag not in void:
                self.open.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    parser = Nesting()
    parser.feed(page)
    assert parser.open == []


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the processes that measure memory."""
    monkeypatch.setattr(run, "peak_of", lambda job: Peak(10**8, None))


@pytest.mark.usefixtures("without_memory")
def test_json_has_the_figures_of_the_table(bundle: Path, prompts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(bundle, prompts, "--max-new-tokens", 12, "--count", 1, "--methods", "vanilla,eagle", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["lossless"] is True and report["differing"] == []
    vanilla, eagle = report["setups"]
    assert (vanilla["method"], eagle["method"], eagle["temperature"]) == ("vanilla", "eagle", 0)
    assert eagle["tok_s"]["count"] == 1 and eagle["vs_vanilla"]["value"] == pytest.approx(
        eagle["tok_s"]["value"] / vanilla["tok_s"]["value"]
    )
    assert any("1 questions as plain text" in fact for fact in report["facts"])


@pytest.mark.usefixtures("without_memory")
def test_a_different_token_is_reported(
    bundle: Path,
    bundle_of: Callable[..., Path],
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One wrong token of one method on one prompt is an error; in fp16 it may be a tie."""

    def doctored(setup: Setup, asked: Asked, result: Any) -> Row:
        row = row_of(setup, asked, result)
        if (setup.method, asked.id) != ("chain", 7):
            return row
        return dataclasses.replace(row, token_ids=(*row.token_ids[:3], row.token_ids[3] ^ 1, *row.token_ids[4:]))

    monkeypatch.setattr("eagle_tools.bench.contenders.row_of", doctored)
    assert bench(bundle, prompts, "--max-new-tokens", 8, "--methods", "vanilla,eagle,chain") == 1
    printed, errors = capsys.readouterr()
    assert errors.startswith("eagle-bench: NOT LOSSLESS: chain on pair (fp32, cpu, T = 0), prompt 7: token 3 is ")
    assert errors.count("\n") == 1 and re.search(r"\| chain \|.* \| 1/2 \|$", printed, re.M)

    monkeypatch.setitem(NEAR, "float32", 10.0)  # only fp16 may have ties
    assert bench(bundle, prompts, "--max-new-tokens", 8, "--methods", "vanilla,eagle,chain") == 1
    assert capsys.readouterr().err == errors

    fp16 = tmp_path / "pair"
    shutil.copytree(bundle_of("eagle1", "fp16"), fp16)
    put_tokenizer(fp16)
    argv = (fp16, prompts, "--max-new-tokens", 8, "--methods", "vanilla,chain", "--backend", "cpu")
    sentence = "chain on pair (fp16, cpu, T = 0), prompt 7: token 3 is "
    assert bench(*argv) == 1
    assert f"eagle-bench: NOT LOSSLESS: {sentence}" in capsys.readouterr().err
    monkeypatch.setitem(NEAR, "float16", 10.0)  # as if the two tokens differed only by rounding
    assert bench(*argv) == 0
    printed, errors = capsys.readouterr()
    assert not errors and f"- equal up to rounding: {sentence}" in printed


def test_wrong_input_is_refused_before_the_work(
    bundle: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(bundle, other)
    put_listed(other, "tokenizer.json", (bundle / "tokenizer.json").read_bytes() + b"\n")
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"question_id": 1, "turns": ["a"]}\n' * 2)
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    cases: list[tuple[list[object], str]] = [
        (["--prompts", tmp_path / "none.jsonl"], "none.jsonl cannot be read"),
        (["--prompts", tmp_path / "empty.jsonl"], "empty.jsonl is empty"),
        (["--prompts", twice], "question_id 'twice/1' occurs twice"),
        (["--count", 0], "number of questions is 0"),
        (["--max-new-tokens", 1], "max_new_tokens is 1"),
        (["--max-new-tokens", 5000], "the context of"),
        (["--methods", "vanilla,egale"], "method 'egale' is unknown; there is vanilla"),
        (["--methods", "eagle,eagle"], "name one twice"),
        (["--methods", "vanilla,60/3/99"], "method 60/3/99, prompt 0: the tree asks for 99 children"),
        (["--temperature", -1], "temperatures are"),
        (["--threads", 0], "threads is 0"),
        (["--backend", "abacus"], "abacus"),
        (["--output", tmp_path / "rows.jsonl"], "holds rows already"),
        (["--output", tmp_path], "is a folder"),
        (["--html", tmp_path / "none" / "x.html"], "none does not exist"),
        (["--vs-pytorch", tmp_path], "has no config.json"),
        (["--vs-pytorch", GOLDEN / "target", "--temperature", 1], "add temperature 0"),
        (["--vs-pytorch", GOLDEN / "target", "--pytorch-methods", "eager,jit"], "PyTorch method 'jit' is unknown"),
        (["--vs-pytorch", GOLDEN / "target", "--pytorch-methods", "assisted"], "an assistant need each other"),
        (["--peers"], "give --vs-pytorch TARGET too"),
        (["--peer-formats", "llama.cpp/q9", "--vs-pytorch", GOLDEN / "target"], "peer 'llama.cpp/q9' is unknown"),
        (["--peers", "--vs-pytorch", tmp_path / "none"], "none has no config.json"),
    ]
    for more, says in cases:
        assert bench(bundle, prompts, *more) == 2, more
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("eagle-bench: ") and err.count("\n") == 1 and says in err, err
    for bundles, says in (
        ([bundle, other], f"{other} has another vocabulary than {bundle}"),
        ([bundle, bundle], "is given twice"),
        ([tmp_path / "none"], "none is not a folder"),
    ):
        assert main([*map(str, bundles), "--prompts", str(prompts)]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and says in err
    assert main([str(bundle)]) == 2 and "give --prompts" in capsys.readouterr().err
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == "{}\n"


def text_of(model: EagleModel, asked: Asked) -> str:
    return bytes(token - BYTES for token in asked.token_ids).decode()


class Logged:
    """A contender that only logs its calls."""

    pass_bytes = 0

    def __init__(self, name: str, log: list[tuple[str, int | str, int]]) -> None:
        self.setup = Setup(name, "fp32", "cpu", "b", 0.0)
        self._log = log

    def run(self, asked: Asked, max_new_tokens: int, place: int = 0) -> Generator[int, None, Row]:
        self._log.append((self.setup.method, asked.id, max_new_tokens))
        text = tuple(byte + BYTES for byte in f"answer to {asked.id}".encode())
        figures = (len(asked.token_ids), len(text), 1, 0.1, 0.1, 1.0, 1.0)
        yield len(text)
        return Row(*self.setup[:4], asked.id, asked.category, 0.0, *figures, text, (), 0.1, 0.1, 0.1)  # type: ignore[arg-type]


def test_all_answer_a_prompt_before_any_gets_the_next_and_a_different_one_begins(bundle: Path) -> None:
    log: list[tuple[str, int | str, int]] = []
    with EagleModel.load(bundle, threads=1) as model:
        three = [Question(number, ("text",)) for number in range(4)]
        rows = [row for _, row in interleave([Logged(name, log) for name in "abc"], model, three, 30)]
    assert log[:3] == [(name, 0, 8) for name in "abc"]  # the warm-up
    order = ["abc", "bca", "cab", "abc"]
    assert log[3:] == [(name, number, 30) for number, names in enumerate(order) for name in names]
    assert [(row.method, row.prompt_id) for row in rows] == [entry[:2] for entry in log[3:]]


def test_it_is_the_turn_of_the_run_with_the_fewest_tokens() -> None:
    log = []

    def run(name: str, counts: tuple[int, ...]) -> Generator[int, None, Row]:
        for count in counts:
            log.append(name)
            yield count
        return None  # type: ignore[return-value]

    ended = [which for which, _ in by_turns([run("a", (1, 2, 3, 4)), run("b", (1, 3, 4)), run("c", (4,))], 0)]
    assert "".join(log) == "abcabaab" and sorted(ended) == [0, 1, 2]


def test_methods_on_the_cpu_take_turns_and_keep_their_own_time(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "by_turns", partial(by_turns, turn=0))
    order: list[str] = []
    with EagleModel.load(bundle, threads=1) as model:
        ours = bundle_contenders(
            model, "pair", ["vanilla", "dynamic"], [0.0], 0, True, lambda setup, _: lambda _: order.append(setup.method)
        )
        two = [Question(number, (f"Q: {number} apples",)) for number in range(2)]
        started = time.perf_counter()
        rows = [row for _, row in interleave(ours, model, two, 24, together=2)]
        wall = time.perf_counter() - started
        for row in rows:
            alone = model.generate(
                two[int(row.prompt_id)].turns[0], max_new_tokens=24, method="vanilla", ignore_eos=True
            )
            assert row.token_ids == alone.token_ids and row.new_tokens == 24
    cycles = "".join(method[0] for method in order[-sum(row.target_passes for row in rows) :])
    fewest = min(row.target_passes for row in rows if row.method == "dynamic")
    assert len(re.findall("v+d+", cycles)) >= fewest > 3
    assert all(row.decode_s >= row.draft_s + row.verify_s + row.host_s for row in rows)  # type: ignore[operator]
    assert sum(row.prefill_s + row.decode_s for row in rows) < wall


def test_a_chat_continues_from_the_first_contenders_answer(bundle: Path, tmp_path: Path) -> None:
    chat = tmp_path / "chat"
    shutil.copytree(bundle, chat)
    put_listed(chat, "chat_template.jinja", TEMPLATE.encode())
    question = Question("q", ("one", "two", "three"))
    with EagleModel.load(chat, threads=1) as model:
        answers: list[str] = []
        said = []
        for asked in turns(model, question, answers):
            said.append((asked.id, text_of(model, asked)))
            answers.append(f"re {asked.id}")
        assert said == [
            ("q", "[user]one[assistant]"),
            ("q/2", "[user]one[assistant]re q[user]two[assistant]"),
            ("q/3", "[user]one[assistant]re q[user]two[assistant]re q/2[user]three[assistant]"),
        ]
        log: list[tuple[str, int | str, int]] = []
        rows = [row for _, row in interleave([Logged(name, log) for name in "ab"], model, [question], 30)]
        # b begins the second turn, which still follows a's answer.
        assert [(row.method, row.prompt_id) for row in rows][2:4] == [("b", "q/2"), ("a", "q/2")]
        assert (
            rows[2].prompt_tokens == rows[3].prompt_tokens == len("[user]one[assistant]answer to q[user]two[assistant]")
        )
        ours = bundle_contenders(model, "chat", ["vanilla", "eagle"], [0.0, 1.0], 0, False)
        real = [row for _, row in interleave(ours, model, [Question("q", ("one", "two"))], 12)]
        assert len(real) == 8 and len({row.token_ids for row in real}) <= 4


def test_the_room_of_a_chat_counts_each_turn_once(bundle: Path, tmp_path: Path) -> None:
    chat = Path(shutil.copytree(bundle, tmp_path / "chat"))
    put_listed(chat, "chat_template.jinja", TEMPLATE.encode())
    plan = Plan(((chat, ()),), (Question("q", ("one" * 20, "two")),), max_new_tokens=10)
    with EagleModel.load(chat, threads=1) as model:
        said = f"[user]{'one' * 20}[assistant][user]two[assistant]"
        assert check_length(plan, [model]) == len(said) + 2 * 10 + SPARE


def test_without_a_template_only_the_first_turn_is_asked(bundle: Path) -> None:
    with EagleModel.load(bundle, threads=1) as model:
        question = Question(3, ("ab", "cd"))
        assert [asked.id for asked in turns(model, question, [])] == [3]
        assert first_turns(model, [question])[0].token_ids == tuple(model.text.encode("ab"))


def test_the_recorder_keeps_the_first_prompts_last_generation(bundle: Path) -> None:
    recorder = Recorder()
    with EagleModel.load(bundle, threads=1) as model:
        ours = bundle_contenders(model, "pair", ["vanilla", "eagle", "8/2/4"], [0.0], 0, False, recorder)
        questions = [Question(number, (f"Q: {number}",)) for number in range(4)]
        rows = [row for _, row in interleave(ours, model, questions, 16)]
        data = recorder.data(model.text)
    assert [(run["setup"], run["prompt_id"]) for run in data["runs"]] == [
        ("pair · fp32 · eagle · T = 0", n) for n in (0, 1)
    ]
    passes = [row.target_passes for row in rows if row.method == "eagle"]
    assert [len(run["cycles"]) for run in data["runs"]] == passes[:2]


def test_memory_is_measured_in_a_process_of_its_own(bundle: Path) -> None:
    peak = peak_of(MemoryRun(str(bundle), "cpu", 1, "eagle", "fp32", tuple(b"Q: Ann has 3 apples")))
    assert 5e7 < peak.host < 1e9 and peak.device is None
    with pytest.raises(JobError, match=r"none was not measured \(.*is not a folder"):
        peak_of(MemoryRun(str(bundle / "none"), "cpu", 1, "eagle", "fp32", (1,)))


def test_each_mode_of_another_engine_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process that had served all modes, and their timing, would have a higher peak than a bundle's."""
    asked = [Asked(0, "", (1, 2)), Asked(1, "", (1, 2, 3))]
    keys = [(mode, "q4_0", "llama.cpp", "target") for mode in ("plain", "lookup")]
    measured = run.Outcome(asked, False, {}, {}, {}, peers={("q4_0", "llama.cpp"): tmp_path / "model.gguf"})
    jobs: list[MemoryRun] = []

    def peak(job: MemoryRun) -> Peak:
        jobs.append(job)
        return Peak(len(jobs), None)

    monkeypatch.setattr(run, "peak_of", peak)
    plan = Plan((), (), pytorch=tmp_path)
    assert run.measure_peaks(plan, keys, measured, run.Reporter()) == {keys[0]: Peak(1, None), keys[1]: Peak(2, None)}
    assert [(job.folder, job.backend, job.method, job.token_ids) for job in jobs] == [
        (str(tmp_path / "model.gguf"), "llama.cpp", mode, (1, 2, 3)) for mode in ("plain", "lookup")
    ]


def test_another_engine_decodes_as_many_tokens_as_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Decoding:
        passes = 0

        def advance(self) -> list[int]:
            self.passes += 1
            return [0, 0]

    decoding = Decoding()
    engine = SimpleNamespace(decoding=lambda *order: decoding if order == ("lookup", [1, 2], memory.TOKENS) else None)
    order = ("llama.cpp", Path("m.gguf"), 2, 2 + memory.TOKENS)
    monkeypatch.setattr(worker, "open_engine", lambda *how: engine if how == order else None)
    assert memory.run_job(MemoryRun("m.gguf", "llama.cpp", 2, "lookup", "q4_0", (1, 2))).host > 0
    assert decoding.passes == memory.TOKENS // 2
