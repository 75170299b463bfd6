"""The PyTorch side of the bench, really run on the golden target."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import GOLDEN, put_tokenizer
from eagle_runtime import EagleModel
from eagle_tools.bench import main, run
from eagle_tools.bench.memory import Peak
from eagle_tools.bench.pytorch import PytorchContender, PytorchModel, pytorch_contenders
from eagle_tools.bench.rows import Asked, read_rows

TARGET = GOLDEN / "target"
TEXT = "Q: Ann has 3 apples and gets 4 more. How many apples?\nA: 3 + 4 = 7.\n" * 2
REPEATED = tuple(byte + 3 for byte in TEXT.encode())  # as the byte tokenizer writes it


@pytest.fixture(scope="module")
def model() -> PytorchModel:
    return PytorchModel(TARGET, "fp32", 1, 200, TARGET)


def test_modes_emit_the_same_tokens_as_ours(model: PytorchModel, model_of: Callable[..., EagleModel]) -> None:
    ours = model_of("eagle1").generate(list(REPEATED), method="vanilla", max_new_tokens=32, ignore_eos=True)
    assert len(ours.token_ids) == 32
    for mode in ("eager", "prompt-lookup", "assisted"):
        row = PytorchContender(model, TARGET, mode).answer(Asked(5, "c", REPEATED), 32)
        assert row.token_ids == ours.token_ids
        assert (row.new_tokens, row.prompt_tokens, row.prompt_id) == (32, len(REPEATED), 5)
        assert row.prefill_s > 0 and row.tok_s * row.decode_s == pytest.approx(row.tau * row.target_passes)
        if mode == "eager":
            assert (row.target_passes, row.tau) == (31, 1)
        else:
            assert row.target_passes < 31 and row.tau > 1
        assert (row.backend, row.precision, row.draft_s) == ("pytorch", "fp32", None)


def test_the_clock_sees_every_pass_and_what_it_gave(model: PytorchModel) -> None:
    for mode in ("eager", "prompt-lookup", "assisted"):
        new, passes = model.generate(mode, REPEATED, 40)
        assert sum(passes.counts) == len(new) == 40 and len(passes.times) == len(passes.counts)
        assert [passes.started, *passes.times] == sorted([passes.started, *passes.times])
        assert (set(passes.counts) == {1}) == (mode == "eager")
    # A target that drafts for itself gives many tokens with the prompt's pass; they are no speed of decoding.
    row = PytorchContender(model, TARGET, "assisted").answer(Asked(5, "c", REPEATED), 40)
    assert passes.counts[0] > 1 and row.tau == pytest.approx((40 - passes.counts[0]) / (len(passes.counts) - 1))


def test_weights_read_by_a_pass(model: PytorchModel) -> None:
    """All that the file holds, less the embedding if another matrix is the LM head."""
    from safetensors import safe_open

    with safe_open(TARGET / "model.safetensors", "np") as file:
        sizes = {name: file.get_tensor(name).size for name in file.keys()}  # noqa: SIM118
    tied = "lm_head.weight" not in sizes
    expected = sum(sizes.values()) - (0 if tied else sizes["model.embed_tokens.weight"])
    assert model.pass_bytes() == 4 * expected


def test_what_does_not_compile_is_left_out_in_one_line(model: PytorchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = PytorchModel.generate

    def failing(self: PytorchModel, mode: str, *rest: object) -> object:
        if mode == "compiled":
            raise RuntimeError("no C++ compiler\nsecond line")
        return sound(self, mode, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(PytorchModel, "generate", failing)
    said: list[str] = []
    contenders = pytorch_contenders(model, TARGET, ("eager", "compiled"), Asked(0, "", REPEATED), said.append)
    assert [contender.setup.method for contender in contenders] == ["eager"]
    assert said == ["PyTorch compiled, fp32: skipped, torch.compile failed (no C++ compiler)"]


def test_command_compares_in_one_table(
    bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "pair"
    shutil.copytree(bundle_of("eagle1"), bundle)
    put_tokenizer(bundle)
    prompts, rows = tmp_path / "set.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"question_id": n, "turns": [TEXT[n:]]}) + "\n" for n in (0, 3)))
    monkeypatch.setattr(
        run, "peak_of", lambda job: Peak(10**8, None)
    )  # takes a process each; the bundles' is tested elsewhere
    argv = [str(bundle), "--prompts", str(prompts), "--methods", "vanilla,eagle", "--max-new-tokens", "16"]
    more = ["--vs-pytorch", str(TARGET), "--pytorch-methods", "eager,prompt-lookup", "--output", str(rows)]
    assert main([*argv, *more, "--threads", "1"]) == 0
    printed = capsys.readouterr().out
    results = read_rows(rows)
    assert [r.method for r in results[:6]] == ["vanilla", "eagle", "eager", "prompt-lookup", "eager", "prompt-lookup"]
    assert [r.precision for r in results[:6]] == ["fp32"] * 4 + ["bf16"] * 2
    assert [r.method for r in results[6:8]] == ["eagle", "eager"]  # another begins
    assert {r.new_tokens for r in results} == {16}
    assert "16 new tokens, end-of-sequence ignored" in printed
    assert re.search(r"^\| target \| fp32 \| pytorch \| eager \| [^|]+ \| - \| 1.00x .* \| 2/2 \|$", printed, re.M)
    assert re.search(r"^\| pair \| fp32 \| cpu \| eagle \| [^|]+ \| [\d.]+x [^|]+ \| [\d.]+x ", printed, re.M)
    assert re.search(r"The fastest here, \w+ fp32 \(pair\), runs at [\d.]+x \(.*\) the speed of PyTorch", printed)
    assert main([*argv, *more]) == 2 and "holds rows already" in capsys.readouterr().err


def test_another_model_is_refused(
    bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 7}))
    (tmp_path / "set.jsonl").write_text('{"turns": ["a"]}')
    argv = [str(bundle_of("eagle1")), "--prompts", str(tmp_path / "set.jsonl"), "--vs-pytorch", str(other)]
    assert main(argv) == 2
    assert "has a vocabulary of 7, the bundles one of 256" in capsys.readouterr().err
    (other / "config.json").write_text("{}")
    assert main(argv) == 2
    assert f"transformers cannot read {other}" in capsys.readouterr().err


@pytest.mark.slow
def test_compiled_emits_the_same_and_compiles_once() -> None:
    import torch

    model = PytorchModel(TARGET, "fp32", 1, 200, None)
    said: list[str] = []
    (compiled,) = pytorch_contenders(model, TARGET, ("compiled",), Asked(0, "", REPEATED), said.append)
    assert "ready after" in said[0]
    eager = PytorchContender(model, TARGET, "eager")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for prompt in (REPEATED, REPEATED[:20], REPEATED + REPEATED[:9]):
        asked = Asked(0, "", prompt)
        assert compiled.answer(asked, 24).token_ids == eager.answer(asked, 24).token_ids
    assert graphs > 0 and torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
def test_a_missing_compiler_is_reported(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from eagle_tools.bench.pytorch import PytorchModel, pytorch_contenders; "
        f"from eagle_tools.bench.rows import Asked; target = Path({str(TARGET)!r}); "
        "model = PytorchModel(target, 'fp32', 1, 64, None); "
        "contenders = pytorch_contenders(model, target, ('eager', 'compiled'), Asked(0, '', (1, 2, 3)), print); "
        "print([contender.setup.method for contender in contenders])"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    env = {**os.environ, "PYTHONPATH": path, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    said, names = done.stdout.splitlines()
    assert said.startswith("PyTorch compiled, fp32: skipped, torch.compile failed (") and names == "['eager']"
