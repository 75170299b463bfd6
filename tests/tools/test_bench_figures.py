"""The bench's arithmetic on numbers, its names, its rows on disk."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cuda_fake import FakeDriver
from eagle_runtime import EagleModel
from eagle_runtime.base.errors import RequestError
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec, read_manifest
from eagle_runtime.drafting.cost_prior import pass_bytes
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_runtime.trt.session import start_sessions
from eagle_tools.bench.charts import ticks
from eagle_tools.bench.contenders import BundleContender
from eagle_tools.bench.estimate import median_of, paired_ratio
from eagle_tools.bench.identity import agreement, difference_sentence, differing_rows, shared_start
from eagle_tools.bench.machine import physical_cores, read_bandwidth
from eagle_tools.bench.memory import Peak
from eagle_tools.bench.methods import check_names, offered, settings_of, sweep
from eagle_tools.bench.peers import Stored
from eagle_tools.bench.rows import Asked, Row, RowFile, Setup, by_setup, foreign_row, read_rows
from eagle_tools.bench.summary import alphas, category_markdown, markdown, memory_key, ratio_text, summarise
from eagle_tools.turns import by_turns
from trt_fake import fake_library, write_fake_engines


def row(method: str, prompt: int, tok_s: float, **changes: object) -> Row:
    """A row of 41 tokens, 20 passes."""
    made = Row(
        method=method,
        precision="int8",
        backend="cpu",
        bundle="b",
        prompt_id=prompt,
        category="",
        temperature=0.0,
        prompt_tokens=7,
        new_tokens=41,
        target_passes=20,
        prefill_s=0.01 * (prompt + 1),
        decode_s=40 / tok_s,
        tok_s=tok_s,
        tau=2.0,
        accepted_per_depth=(16, 4),
        draft_s=10 / tok_s,
        verify_s=28 / tok_s,
        host_s=1 / tok_s,
        token_ids=(1, 2, 3),
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    estimates = [median_of(rng.normal(10, 2, 40).tolist(), seed) for seed in range(400)]
    held = np.mean([estimate.low <= 10 <= estimate.high for estimate in estimates])
    assert 0.91 < held < 0.98
    assert all(estimate.low <= estimate.value <= estimate.high and estimate.count == 40 for estimate in estimates)
    width = np.mean([estimate.high - estimate.low for estimate in estimates])
    assert width == pytest.approx(2 * 1.96 * 1.2533 * 2 / np.sqrt(40), rel=0.15)  # a normal law's median


def test_the_median_of_one_value_is_certain_and_the_interval_the_same_twice() -> None:
    assert dataclasses.astuple(median_of([3.5])) == (3.5, 3.5, 3.5, 1)
    assert median_of([1.0, 2.0, 5.0]) == median_of([1.0, 2.0, 5.0])


def test_a_paired_ratio_does_not_see_what_prompts_differ_in() -> None:
    slow = {prompt: float(10 ** (prompt % 3)) for prompt in range(30)}
    fast = {prompt: 2.5 * speed for prompt, speed in slow.items()}
    ratio = paired_ratio(fast, slow)
    assert ratio is not None and ratio.value == ratio.low == ratio.high == 2.5 and ratio.count == 30


def test_a_paired_ratio_takes_what_both_have() -> None:
    ratio = paired_ratio({1: 4.0, 2: 9.0, 3: 5.0, 4: 0.0}, {1: 2.0, 2: 3.0, 4: 1.0, 5: 1.0, 3: 0.0})
    assert ratio is not None and (ratio.value, ratio.count) == (2.5, 2)
    assert paired_ratio({1: 4.0}, {2: 4.0}) is None
    assert ratio_text(None) == "-"


def test_alphas_are_shares_of_those_that_got_there() -> None:
    rows = [row("eagle", 0, 10), row("eagle", 1, 10, accepted_per_depth=(20, 16, 6, 3), target_passes=30)]
    assert alphas(rows) == pytest.approx((36 / 50, 20 / 36, 6 / 20, 3 / 6, 0 / 3))
    assert alphas([row("vanilla", 0, 10, accepted_per_depth=())]) == ()
    assert alphas([row("eager", 0, 10, accepted_per_depth=None)]) is None


def test_a_summary_by_hand() -> None:
    rows = [row("vanilla", p, 10 + p, draft_s=0.0, accepted_per_depth=(), target_passes=40) for p in range(3)]
    rows += [row("eagle", p, 30 + 3 * p) for p in range(3)]
    theirs = {"backend": "pytorch", "bundle": "t", "precision": "fp32", "draft_s": None, "verify_s": None}
    rows += [row("eager", p, 5 + p / 2, **theirs) for p in range(3)]
    rows[-1] = dataclasses.replace(rows[-1], token_ids=(1, 2, 4))
    key = memory_key(rows[3].setup)
    vanilla, eagle, eager = summarise(rows, {key: Peak(5_000_000, None)}, {key: 1000}, {"cpu": 2000.0})
    assert (eagle.tok_s.value, eagle.tau, eagle.ttft_s) == (33, 2, 0.02)
    assert vanilla.vs_vanilla is not None and vanilla.vs_vanilla.value == 1
    assert eagle.vs_vanilla is not None and eagle.vs_vanilla.value == pytest.approx(3)
    assert eagle.vs_pytorch is not None and eagle.vs_pytorch.value == pytest.approx(6)
    assert eager.vs_vanilla is None and eager.same == (2, 3)
    assert eagle.draft == pytest.approx(0.25) and eagle.verify == pytest.approx(0.7)
    assert eagle.host == pytest.approx(0.05)  # all the rest, not only what the rows report as host
    decode_s = sum(40 / (30 + 3 * p) for p in range(3))
    assert eagle.roofline == pytest.approx(1000 * 60 / decode_s / 2000)
    assert vanilla.peak is None and vanilla.roofline is None and eager.host is None
    text = markdown([vanilla, eagle, eager], rows)
    assert (
        "| b | int8 | cpu | eagle | 33.0 (30.0-36.0) | 3.00x (3.00-3.00) | 6.00x (6.00-6.00) | 2.00 | .80 .25 .00 |"
        in text
    )
    assert "| 20.0 | 25 / 70 / 5.0 | 5 |" in text
    assert "eagle int8 (b), runs at 6.00x (6.00-6.00) the speed of PyTorch's fastest mode, eager fp32." in text


def test_an_answer_of_one_pass_has_no_speed() -> None:
    """Its 0 would lower the median of all others; an answer may be an end-of-sequence token alone."""
    short = dataclasses.replace(row("vanilla", 2, 1), new_tokens=1, target_passes=0, tok_s=0.0, decode_s=0.0, tau=1.0)
    rows = [row("vanilla", 0, 10), row("vanilla", 1, 20), short]
    (one,) = summarise(rows, {}, {}, {})
    assert (one.tok_s.value, one.tok_s.count, one.tau) == (15, 2, 2)
    assert summarise(rows[2:], {}, {}, {})[0].tok_s.value == 0


def test_tau_counts_no_token_of_the_first_pass() -> None:
    """PyTorch's lookup drafts for the pass over the prompt too, which then gives several tokens."""
    setup, asked = Setup("prompt-lookup", "fp32", "pytorch", "t", 0.0), Asked(0, "", (1, 2))
    made = foreign_row(setup, asked, range(15), first=5, passes=10, prefill_s=1.0, decode_s=2.0)
    (one,) = summarise([made], {}, {}, {})
    assert (one.tau, one.tok_s.value) == (1, 5)


def test_peers_are_compared_with_pytorch_and_not_with_vanilla() -> None:
    theirs = {"backend": "pytorch", "bundle": "t", "precision": "fp32", "draft_s": None, "verify_s": None}
    rows = [row("eager", p, 5, **theirs, token_ids=(1, 2, 3, 4)) for p in range(2)]
    rows += [row("vanilla", p, 10, token_ids=(1, 2, 9, 4)) for p in range(2)]
    peer = {**theirs, "backend": "llama.cpp", "precision": "q4_0"}
    rows += [row("plain", p, 20, **peer, token_ids=(1, 2, 3, 4) if p else (8, 2, 3, 4)) for p in range(2)]
    sizes = {memory_key(rows[4].setup): Stored(4_500_000, 4.5)}
    eager, vanilla, plain = summarise(rows, {}, {}, {}, sizes)
    assert (eager.shared, vanilla.shared, plain.shared) == (1, 0.5, 0.5)
    assert plain.vs_vanilla is None and plain.same is None and vanilla.same == (2, 2)
    assert list(differing_rows(rows)) == []
    text = markdown([eager, vanilla, plain], rows)
    assert "| llama.cpp | q4_0 | plain | 50.0 | 4.00x (4.00-4.00) | 50 % | 4 | 4.5 |" in text
    assert text.index("| llama.cpp | q4_0 | plain | 50.0") < text.index("| ours, b | int8 | vanilla | 100.0")
    assert "The fastest here, vanilla int8 (b), runs at 2.00x" in text
    assert "before the first difference" not in markdown(summarise(rows, {}, {}, {}), rows)


def test_the_shared_start_is_the_mean_over_prompts_that_both_have() -> None:
    one = [row("a", p, 1, token_ids=ids) for p, ids in enumerate([(1, 2, 3, 4), (1, 2, 3, 4), (5, 5, 5, 5)])]
    other = [row("b", p, 1, token_ids=ids) for p, ids in enumerate([(1, 2, 3, 9), (9, 2, 3, 4)])]
    assert shared_start(one, other) == pytest.approx((3 / 4 + 0) / 2)
    assert shared_start(one, []) is None


def test_markdown_keeps_sizes_apart_and_tells_categories() -> None:
    rows = [row("vanilla", p, 10, category="ab"[p % 2]) for p in range(4)]
    rows += [
        row(size, p, speed, category="ab"[p % 2]) for size, speed in (("8/2/4", 20), ("16/3/4", 30)) for p in range(4)
    ]
    text = markdown(summarise(rows, {}, {}, {}), rows)
    assert "| 8/2/4 | 20.0 tok/s, tau 2.00 |" in text and "| 16/3/4 | **30.0 tok/s, tau 2.00** |" in text
    assert "| b | int8 | cpu | 8/2/4" not in text
    assert "| b | int8 | 16/3/4 | 0 | 3.00x, 2.00 | 3.00x, 2.00 |" in category_markdown(rows)
    assert category_markdown(rows[:1]) == ""


def test_a_different_output_is_reported_with_its_position() -> None:
    rows = [row(method, p, 10, token_ids=(1, 2, 3)) for p in range(2) for method in ("eagle", "vanilla")]
    rows += [
        row("eager", 0, 10, backend="pytorch", token_ids=(9,)),
        row("eagle", 0, 10, precision="int4", token_ids=(9,)),
    ]

    def faults(rows: list[Row]) -> list[str]:
        return [difference_sentence(row, reference, tie=False) for row, reference in differing_rows(rows)]

    assert faults(rows) == []
    rows[2] = dataclasses.replace(rows[2], token_ids=(1, 7, 3))
    assert faults(rows) == ["NOT LOSSLESS: eagle on b (int8, cpu, T = 0), prompt 1: token 1 is 7, vanilla has 2"]
    shorter = [row("vanilla", 0, 10), row("chain", 0, 10, token_ids=(1, 2))]
    assert [line.partition("0: ")[2] for line in faults(shorter)] == ["token 2 is missing, vanilla has 3"]
    without = [row("chain", 0, 10), row("static", 0, 10, token_ids=(1, 2, 4))]
    assert [line.partition("0: ")[2] for line in faults(without)] == ["token 2 is 4, chain has 3"]


def test_agreement_counts_whole_outputs() -> None:
    rows = [row("eager", p, 10, token_ids=(p, 1)) for p in range(3)]
    others = [row("vanilla", p, 10, token_ids=(min(p, 1), 1)) for p in range(5)]
    assert agreement(rows, others) == (2, 3)


def test_rows_are_on_disk_as_soon_as_added(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = RowFile(path)
    rows = [row("vanilla", 0, 10), row("eager", 1, 20, prompt_id="7/2", accepted_per_depth=None, draft_s=None)]
    for count, each in enumerate(rows, 1):
        file.add(each)
        assert read_rows(path) == rows[:count]
    with path.open("a") as cut:
        cut.write('{"method": "van')
    assert read_rows(path) == rows
    assert list(by_setup(rows)) == [Setup("vanilla", "int8", "cpu", "b", 0.0), Setup("eager", "int8", "cpu", "b", 0.0)]


def test_rows_are_never_mixed_with_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("kept\n")
    with pytest.raises(RequestError, match="holds rows already"):
        RowFile(path)
    assert path.read_text(encoding="utf-8") == "kept\n"
    with pytest.raises(RequestError, match="line 1 is not a row"):
        read_rows(path)
    with pytest.raises(RequestError, match="cannot be written"):
        RowFile(tmp_path / "none" / "rows.jsonl")


def test_names_of_methods() -> None:
    assert {"vanilla", "eagle", "dynamic", "static", "chain"} <= set(offered())
    assert offered()[0] == "vanilla"
    check_names(["vanilla", "16/3/4", "eagle:chain"])
    for wrong in (["egale"], ["eagle:none"], ["none:chain"], ["16/3"], [""]):
        with pytest.raises(RequestError, match="is unknown; there is vanilla, "):
            check_names(wrong)
    with pytest.raises(RequestError, match="name one twice"):
        check_names(["eagle", "eagle"])
    check_names(list(sweep()))
    assert "60/5/10" in sweep() and "60/2/4" not in sweep()  # 4 + 2 * 16 nodes are all there could be


def test_settings_of_names_that_need_no_bundle() -> None:
    assert settings_of("vanilla") == {"method": "vanilla"}
    assert settings_of("chain") == {"method": "eagle", "tree": "chain"}
    assert settings_of("eagle:chain") == {"method": "eagle", "tree": "chain"}
    sizes = {"total_token": 16, "depth": 3, "draft_top_k": 4}
    assert settings_of("16/3/4") == {"method": "eagle", "tree": "dynamic", **sizes}


def test_bytes_of_a_pass_leave_out_a_table_that_is_only_gathered() -> None:
    def read(**weights: TensorSpec) -> int:
        names = {name.replace("__", "."): spec for name, spec in weights.items()}
        return pass_bytes(GraphSpec("m", {}, {}, names, {}))

    layer, table = TensorSpec("int8", (10, 10)), TensorSpec("float16", (50, 10))
    assert read(layer=layer, model__embed_tokens__weight=table) == 100 + 1000  # tied: the LM head reads it whole
    assert read(layer=layer, model__embed_tokens__weight=table, lm_head__weight=table) == 100 + 1000
    fp16 = {"model__embed_tokens__weight__fp16": table}
    assert read(**fp16, model__embed_tokens__weight__int8=TensorSpec("int8", (10, 50))) == 500
    assert read(layer=TensorSpec("int4", (10, 10)), other=TensorSpec("bfloat16", (3,))) == 50 + 6


def test_the_machine_answers() -> None:
    assert 1 <= physical_cores() <= 4096
    assert 1e8 < read_bandwidth(1) < 1e13
    code = "import numpy as np; from eagle_tools.bench.memory import host_peak as peak; before = peak(); "
    code += "sum(np.ones(1 << 24)[::4096]); print(before, peak())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    before, after = map(int, done.stdout.split())
    assert 1e7 < before < 3e8 and 0.9 < (after - before) / (1 << 27) < 1.5  # and is no longer held, yet counted


@pytest.mark.parametrize("top", [0.003, 0.7, 1, 3.2, 9.9, 10, 47, 132.1, 1999, 0])
def test_ticks_are_few_round_and_within(top: float) -> None:
    positions = ticks(top)
    assert (positions[0] == 0 and max(positions) <= top * (1 + 1e-9)) or top == 0
    assert top == 0 or 3 <= len(positions) <= 12
    steps = np.diff(positions)
    assert len(steps) == 0 or np.allclose(steps, steps[0])


def test_counters_are_given_per_forward_pass_of_the_target(tmp_path: Path) -> None:
    """Where every row of a setup has them; rows keep them in their file."""
    rows = [row("eagle", number, 10.0, counters={"bytes_up": 400 * number, "uploads": 40}) for number in (1, 2)]
    (summary,) = summarise(rows, {}, {}, {})
    assert summary.counters == {"bytes_up": 30.0, "uploads": 2.0}
    (summary,) = summarise([*rows, row("eagle", 3, 10.0)], {}, {}, {})
    assert summary.counters is None
    file = RowFile(tmp_path / "rows.jsonl")
    for one in rows:
        file.add(one)
    assert read_rows(tmp_path / "rows.jsonl") == rows


def test_a_bench_on_a_gpu_counts_its_work(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a fake one."""
    bundle = Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle"))
    folder = write_fake_engines(bundle, "tensorrt", 300)
    driver, manifest = FakeDriver(), read_manifest(bundle)
    sessions = start_sessions(fake_library(driver, "tensorrt"), driver, folder, manifest, 300)
    with EagleModel(bundle_of_sessions(bundle, manifest, sessions, 300, backend="tensorrt")) as model:
        setup = Setup("eagle", "fp32", "tensorrt", "bundle", 0.0)
        contender = BundleContender(model, setup, {"method": "eagle"}, 0, ignore_eos=True)
        asked, before = Asked(1, "", (5, 6, 7)), model.counters()
        ((_, made),) = by_turns([contender.run(asked, 8)])
        now = model.counters()
    assert before is not None and now is not None
    assert made.counters == dataclasses.asdict(now.since(before)) and made.counters["engine_calls"] > made.target_passes
