"""eagle-doctor on sound bundles, and on bundles that are wrong in every way it should see."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import GOLDEN, put_tokenizer
from cuda_fake import FakeDriver
from eagle_calib.replay import replay
from eagle_export.checking.certificate import compare_with_source
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_runtime import EagleModel
from eagle_runtime.base.backend_names import on_cpu
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle_runtime.core.session import Session
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_runtime.ort import operators
from eagle_runtime.ort.buffers import OrtMemory
from eagle_runtime.ort.device_session import OrtDeviceSession
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.operators import Operators
from eagle_runtime.trt.session import start_sessions
from eagle_tools.doctor import _agreement_lost, _graphs, _lossless, _ties, main
from eagle_tools.engines import Finding, _imported, find_engines, nvidia_gpu
from eagle_tools.ties import NEAR
from trt_fake import fake_library, write_fake_engines


def write(bundle: Path, **changes: Any) -> None:
    """Change keys of the certificate."""
    data = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    data["certificate"].update(changes)
    (bundle / MANIFEST_NAME).write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture(scope="module")
def certified(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """precision -> a bundle of the golden pair with a tokenizer and a certificate."""
    base = tmp_path_factory.mktemp("doctor")

    def bundle(precision: str) -> Path:
        folder = base / precision
        if not folder.exists():
            shutil.copytree(bundle_of("eagle1", precision), folder)
            put_tokenizer(folder)
            manifest = read_manifest(folder)
            certificate = compare_with_source(open_checkpoint(GOLDEN / "target"), folder, manifest).certificate
            text = dataclasses.replace(manifest, certificate=certificate).to_json()
            (folder / MANIFEST_NAME).write_text(text, encoding="utf-8")
        return folder

    return bundle


def device_sessions(bundle: Path, manifest: Manifest) -> tuple[Session, ...]:
    """On the device "cpu"."""
    memory = OrtMemory()
    graphs = (model.graph for model in manifest.models.values())
    return tuple(
        OrtDeviceSession(open_graph(bundle / graph.file, threads=1), bundle / graph.file, graph, memory)
        for graph in graphs
    )


@pytest.fixture
def bundle(certified: Callable[[str], Path], tmp_path: Path) -> Path:
    """One to damage."""
    return Path(shutil.copytree(certified("fp32"), tmp_path / "bundle"))


def doctor(bundle: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit status, and name -> (word, sentence) of the printed lines."""
    status = main([str(bundle), *more])
    out, err = capsys.readouterr()
    assert err == ""
    lines = [re.split(" {2,}", line, maxsplit=2) for line in out.splitlines()]
    return status, {name: (word, says) for name, word, says in lines}


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_sound_bundle(
    precision: str,
    certified: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the engines that every machine with the package has."""
    missing = Operators(None, reason="eagle-edge-kernels is not installed")
    monkeypatch.setattr(operators, "native_operators", lambda: missing)
    bundle = certified(precision)
    status, lines = doctor(bundle, capsys)
    assert status == 0
    words = {name: word for name, (word, _) in lines.items()}
    fine = ["files", "limits", "engine", "lossless", "agreement", "tau", *(["rows"] if precision == "int8" else [])]
    assert words == dict.fromkeys(fine, "ok") | dict.fromkeys(
        ("logits", "cuda", "tensorrt", "tensorrt-rtx", "native"), "-"
    )
    assert precision == "fp32" or lines["rows"][1].startswith("rows are equal to the bit")
    assert lines["engine"][1].startswith("cpu: ") and lines["tensorrt"][1] == "the bundle has no engines for it"
    assert main([str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    checks = {check["name"]: check for check in report["checks"]}
    certificate = read_manifest(bundle).certificate
    assert certificate is not None and report["ok"] is True
    assert checks["agreement"]["measured"] == pytest.approx(certificate.agreement, abs=1e-6)
    assert checks["agreement"]["certified"] == certificate.agreement
    assert checks["tau"]["measured"] == pytest.approx(certificate.tau, abs=1e-3)
    error = checks["logits"]["measured"]
    assert (0 < error < 2e-4) if precision == "fp32" else (2e-3 < error < 2)


@pytest.mark.parametrize("name", ["target/model.onnx.data", "draft/model.onnx"])
def test_a_flipped_byte(name: str, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray((bundle / name).read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / name).write_bytes(content)
    status, lines = doctor(bundle, capsys)
    assert status == 1
    assert list(lines) == ["files"], "a changed file was run"
    assert lines["files"][0] == "differs" and lines["files"][1].startswith(f"{name} is not the file")


def test_every_changed_file_is_named(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("draft/model.onnx", "tokenizer_config.json"):
        (bundle / name).write_bytes(b"")
    assert main([str(bundle), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    (check,) = report["checks"]
    assert report["ok"] is check["ok"] is False
    assert "draft/model.onnx, tokenizer_config.json are not" in check["says"]


def test_a_certificate_that_claims_more(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The source is made to have said something else in one place of the first continuation."""
    data = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    golden = data["certificate"]["prompts"][0]
    golden["continuation"][-1] = golden["top"][-1]["token_ids"][1]
    rows = sum(len(each["continuation"]) for each in data["certificate"]["prompts"])
    given = 1 - 1 / rows
    write(bundle, prompts=data["certificate"]["prompts"], agreement=1.0)
    status, lines = doctor(bundle, capsys)
    assert status == 1
    assert lines["agreement"] == (
        "differs",
        f"{given:.1%} of the source's tokens are ranked first (certified: 100.0%)",
    )
    assert lines["lossless"][0] == lines["files"][0] == "ok"
    for claim, word in ((given + 0.004, "ok"), (given + 0.006, "differs"), (given - 0.1, "ok")):
        write(bundle, agreement=claim)
        status, lines = doctor(bundle, capsys)
        assert (status, lines["agreement"][0]) == (word == "differs", word)


@pytest.mark.parametrize("precision", ["int4", "auto"])
def test_a_quantised_bundle_may_lose_what_other_kernels_round_away(
    precision: str, certified: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source is made to have said something else at each end of the continuations. Of 115 tokens (two texts end
    early) it may lose two standard errors of the share, or 3 %."""
    bundle = Path(shutil.copytree(certified("int4"), tmp_path / "bundle"))
    manifest = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    manifest["precision"]["target"] = precision
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))
    data = manifest["certificate"]
    for golden in data["prompts"]:
        golden["continuation"][-1] = golden["top"][-1]["token_ids"][-1]
    write(bundle, prompts=data["prompts"], agreement=0.0)
    given = float(doctor(bundle, capsys)[1]["agreement"][1].split("%")[0]) / 100
    for claim, word in ((given + 0.025, "ok"), (1.0, "differs")):
        write(bundle, agreement=claim)
        status, lines = doctor(bundle, capsys)
        assert (status, lines["agreement"][0]) == (word == "differs", word)
    certified_now = read_manifest(bundle).certificate
    assert certified_now is not None
    for share, least in ((0.9, 0.844), (0.5, 0.407), (0.995, 0.965)):
        lost = _agreement_lost(dataclasses.replace(certified_now, agreement=share))
        assert share - lost == pytest.approx(least, abs=1e-3)


def test_a_bundle_below_its_limits_is_reported_but_usable(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who exported it accepted that; what it must not do is become worse."""
    assert doctor(bundle, capsys)[1]["limits"][0] == "ok"
    write(bundle, limits={"agreement": 1.0, "kl": 0})
    status, lines = doctor(bundle, capsys)
    assert status == 0 and lines["limits"][0] == "below"
    assert lines["limits"][1].startswith(
        "it follows its source less closely than fp32 should: agreement 100.0 % (100 %"
    )
    assert main([str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (check,) = (check for check in report["checks"] if check["name"] == "limits")
    assert report["ok"] is True and check["ok"] is False and check["measured"] > 0


def test_changed_logits_are_reported(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads((bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    data["certificate"]["prompts"][2]["top"][3]["logits"][4] += 0.75
    write(bundle, prompts=data["certificate"]["prompts"])
    assert doctor(bundle, capsys)[1]["logits"] == ("-", "the source's top logits are reproduced within 0.75")


def test_a_lower_tau_is_reported_but_usable(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(bundle, tau=5)
    status, lines = doctor(bundle, capsys)
    assert status == 0
    assert lines["tau"][0] == "differs" and "certified: 5.00" in lines["tau"][1]


def test_other_tokens_with_drafts_than_without_are_a_fault(model_of: Callable[..., EagleModel]) -> None:
    model = model_of("eagle1")
    plain = replay(model, [[5, 6, 7], [80, 90]], drafts=False)
    assert _lossless(plain, replay(model, [[5, 6, 7], [80, 90]], drafts=True)).ok is True
    check = _lossless(plain, replay(model, [[5, 6, 7], [80, 91]], drafts=True))
    assert check.ok is False and check.fatal and check.says.startswith("1 of 2 ")


def test_texts_that_part_at_a_tie_are_no_fault(
    model_of: Callable[..., EagleModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("eagle1")
    prompts = [[5, 6, 7], [80, 90]]
    plain = replay(model, prompts, drafts=False)
    parted = [dataclasses.replace(plain[0], token_ids=(1 ^ plain[0].token_ids[0], *plain[0].token_ids[1:])), plain[1]]
    assert _ties(model, prompts, plain, plain) == _ties(model, prompts, plain, parted) == 0
    monkeypatch.setitem(NEAR, "float32", 10.0)
    ties = _ties(model, prompts, plain, parted)
    assert ties == 1 and _lossless(plain, parted, ties).ok is True


def test_a_bundle_without_a_certificate(bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = doctor(bundle_of("eagle3"), capsys)
    assert status == 0
    assert {name: word for name, (word, _) in lines.items() if word == "ok"}.keys() == {"files", "engine", "lossless"}
    assert lines["certificate"][1].startswith("none") and lines["tau"][0] == "-"


def test_another_engine_is_held_against_the_cpu(
    certified: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime's own device sessions stand in for a GPU: the same numbers; then with noise on the logits."""

    def on_device(bundle: Path, manifest: Any, context: int, head_scratch: int) -> Any:
        return device_sessions(bundle, manifest)

    monkeypatch.setattr("eagle_runtime.ort.cuda.open_sessions", on_device)
    bundle = certified("fp32")
    assert main([str(bundle), "--backend", "cuda", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    compared = [check for check in checks if check["name"] == "vs cpu"]
    assert {check["backend"] for check in checks} == {None, "cuda"}
    assert [check["ok"] for check in compared] == [True] * 4 and max(check["measured"] for check in compared) < 1e-3
    assert compared[0]["says"].startswith("target's logits differ from the CPU's by up to ")
    assert compared[0]["says"].endswith("100.0% of the rows rank the same token first")
    wrong = OrtDeviceSession.run

    def noisy(self: Any, feeds: Any, cache: Any) -> Any:
        results = wrong(self, feeds, cache)
        if "logits" in results:
            logits = np.array(results["logits"])
            results["logits"] = logits + np.random.default_rng(0).normal(0, 3, logits.shape)
        return results

    monkeypatch.setattr(OrtDeviceSession, "run", noisy)
    status, lines = doctor(bundle, capsys, "--backend", "cuda")
    assert status == 1 and lines["lossless"][0] == "differs"
    assert main([str(bundle), "--backend", "cuda", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["ok"] for check in checks if check["name"] == "vs cpu"] == [False, True, True, True]


def missing_weights(bundle: Path) -> None:
    (bundle / "target/model.onnx.data").unlink()


def no_manifest(bundle: Path) -> None:
    (bundle / MANIFEST_NAME).unlink()


@pytest.mark.parametrize(
    ("damage", "argv", "says"),
    [
        (missing_weights, [], "target/model.onnx.data is missing"),
        (no_manifest, [], f"{MANIFEST_NAME} is missing"),
        (shutil.rmtree, [], "is not a folder"),
        (lambda bundle: None, ["--backend", "abacus"], "'abacus'"),
    ],
)
def test_wrong_input_takes_one_line(
    damage: Callable[[Path], object],
    argv: list[str],
    says: str,
    bundle: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(bundle)
    assert main([str(bundle), *argv, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("eagle-doctor: ") and says in err and err.index("\n") == len(err) - 1


def test_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["backends"]] == ["tensorrt-rtx", "tensorrt", "cuda", "native", "cpu"]
    *others, native, cpu = report["backends"]
    assert report["ok"] is cpu["works"] is True
    assert report["gpu"]["works"] or not any(row["works"] for row in others)
    assert cpu["says"].startswith("onnxruntime ") and "CPUExecutionProvider" in cpu["says"]
    assert native["says"].startswith("eagle-edge-kernels ")
    for row in others:
        assert (
            row["works"] or "is missing" in row["says"] or "pip install" in row["says"] or "nvidia-smi" in row["says"]
        )


@pytest.mark.parametrize("option", [["--backend", "native"], ["--context", "512"]])
def test_an_option_of_a_bundle_needs_one(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(option) == 2 and "say how a bundle is checked; name one" in capsys.readouterr().err


def test_the_machine_in_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gpu", "tensorrt-rtx", "tensorrt", "cuda", "native", "cpu"]
    assert lines[-1].startswith("cpu           works  onnxruntime ")


def test_no_gpu_engine_works_without_a_gpu() -> None:
    gpu = nvidia_gpu()
    for name, finding in find_engines().items():
        if not on_cpu(name) and not gpu.works:
            assert not finding.works


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "fake_engine is not installed: pip install 'eagle-edge[cuda]'"),
        ("import ctypes; ctypes.CDLL('libnowhere.so.7')", "fake_engine does not load (OSError: libnowhere.so.7"),
        ("import os; os.abort()", "fake_engine does not load (exit status -6)"),
    ],
)
def test_libraries_that_do_not_load(
    content: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "fake_engine.py").write_text(content, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = _imported("fake_engine", "[m.__version__]", "cuda")
    assert isinstance(finding, Finding) and not finding.works and finding.says.startswith(says)


def test_libraries_that_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_engine.py").write_text("print('hello'); __version__ = '7'", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert _imported("fake_engine", "[m.__version__]", "cuda") == ["7"]


def test_it_needs_no_more_than_decoding_does() -> None:
    """So that it runs on a device: a bundle is checked where it is used."""
    code = "import sys, eagle_tools.doctor; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "eagle_runtime" in loaded
    assert not loaded & {
        "torch",
        "transformers",
        "onnx",
        "onnx_ir",
        "safetensors",
        "rich",
        "matplotlib",
        "eagle_export",
    }


@pytest.mark.parametrize("library", ["tensorrt-rtx", "tensorrt"])
def test_graphs_that_cannot_be_captured_are_reported_but_usable(
    library: str, bundle_of: Callable[..., Path], tmp_path: Path
) -> None:
    """Only TensorRT for RTX tells; on a fake GPU here."""
    bundle = Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle"))
    driver, manifest = FakeDriver(), read_manifest(bundle)
    folder = write_fake_engines(bundle, library, 300)
    sessions = start_sessions(fake_library(driver, library), driver, folder, manifest, 300)
    with EagleModel(bundle_of_sessions(bundle, manifest, sessions, 300, backend=library)):
        for capturable in (True, False):
            driver.capturable = capturable
            graphs = list(_graphs(manifest, sessions))
            expected = [] if library == "tensorrt" else [(capturable, False, name) for name in ("target", "draft")]
            assert [(check.ok, check.fatal, check.says.split("'")[0].split()[1]) for check in graphs] == expected
