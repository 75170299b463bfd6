"""Bundles outside the limits of their precision: the export refuses them, or marks them if they are accepted.

The checkpoint here is hard to quantise for the usual reason: a few channels of a layer's input are far larger than all
others, which costs nothing in floats."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from conftest import GOLDEN, HEADS
from eagle_calib.folder import KEPT, work_folder
from eagle_export.base import memory
from eagle_export.base.errors import ExportError
from eagle_export.base.resume import REFUSED
from eagle_export.bundle import export
from eagle_export.checking.limits import (
    CALIBRATION_OPTIONAL,
    LIMITS,
    Advice,
    FidelityError,
    RequiredFidelity,
    accepting,
    refusal,
    required_fidelity,
    what_to_try,
)
from eagle_export.checking.worst_layers import Layer, LayerError
from eagle_export.commands.cli import BACKENDS, PRECISIONS, main
from eagle_export.recipes.plan import RECIPES
from eagle_export.writing.settings import Order, Settings
from eagle_runtime import EagleModel, FidelityWarning
from eagle_runtime.bundle.manifest import Certificate, Limits, read_manifest
from eagle_runtime.commands.cli import main as run_main
from eagle_tools.doctor import main as doctor_main
from export_workplace import LAYERS, make_target
from systems import read_tensors

DOWN, LM_HEAD = "model.layers.1.mlp.down_proj.weight", "lm_head.weight"


def outlier(tensors: dict[str, Tensor]) -> None:
    """Enlarges two channels that the LM head reads; their weights are zero, so the logits stay the same."""
    for channel in (7, 40):
        tensors["model.norm.weight"][channel] *= 300
        tensors[LM_HEAD][:, channel] = 0


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("gate") / "target", outlier)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("gate") / "target")


@pytest.fixture(scope="module")
def refused(hard: Path, plain: Path, tmp_path_factory: pytest.TempPathFactory) -> FidelityError:
    """The error of exporting the hard target in int8. The older bundle at the destination must stay."""
    bundle = tmp_path_factory.mktemp("gate") / "bundle"
    export(plain, None, bundle, Settings(certify=False))

    def snapshot() -> dict[Path, bytes | None]:
        paths = [path for path in bundle.parent.rglob("*") if work_folder(bundle) not in (path, *path.parents)]
        return {path: path.read_bytes() if path.is_file() else None for path in paths}

    before = snapshot()
    with pytest.raises(FidelityError) as caught:
        export(hard, None, bundle, Settings(precision="int8"))
    assert len(before) > 4 and snapshot() == before
    return caught.value


def test_the_sentence_says_what_is_wrong_and_what_to_try(refused: FidelityError) -> None:
    sentence = refused.with_options
    assert "\n" not in sentence
    match = re.fullmatch(
        r"the bundle follows its source less closely than int8 should: "
        r"agreement ([\d.]+) % \(91 % or more\), KL ([\d.]+) \(0\.005 or less\); "
        r"worst layers: lm_head\.weight \(output off by ([\d.]+) %, KL from ([\d.]+) to ([\de.-]+) if exact\).*; "
        r"try --keep lm_head\.weight; or try --precision int8-weight; or accept it, which takes seconds, with (--.*)",
        sentence,
    )
    assert match is not None, sentence
    kl, error, unchanged, exact = map(float, match.groups()[1:5])
    assert kl > 0.04 and error > 2 and unchanged > 0.04
    assert exact < 0.01 < unchanged / 5, "the layer was not identified"


def test_a_layer_alone_is_advised_only_where_the_kl_is_too_large(refused: FidelityError) -> None:
    """Where too few tokens agree and the KL is small enough, "exact" is below its limit for any layer."""
    certificate, required = refused.certificate, required_fidelity("cpu", "int8", None, None, calibrated=False)
    assert certificate is not None
    layers = [
        LayerError(Layer(name, "x", "y", lambda: np.zeros((2, 2), np.float32), False), 0.1, 0.004, 0.003)
        for name in ("a", "b")
    ]
    for kl, kept in ((0.02, "try --keep a;"), (0.004, "try --keep a --keep b;")):
        assert kept in refusal(replace(certificate, agreement=0.5, kl=kl), required, layers).with_options


def test_the_library_names_parameters_and_no_options(refused: FidelityError) -> None:
    ways = "try keep=['lm_head.weight']; or try precision='int8-weight'; or accept it, which takes seconds, with "
    assert ways in str(refused)
    assert "--" not in str(refused)
    assert Advice("try", {"keep": ["a", "b"]}).as_options == "try --keep a --keep b"


def test_a_bundle_that_was_accepted_is_marked(
    refused: FidelityError, hard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accepted with the options that the refusal names."""
    bundle, flags = (
        tmp_path / "bundle",
        refused.with_options.rpartition("accept it, which takes seconds, with ")[2].split(),
    )
    assert main([str(hard), "-o", str(bundle), "-p", "int8", *flags, "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)["certificate"]
    assert report["limits"] == {"agreement": 0.91, "kl": 0.005} and report["within_limits"] is False
    assert err.startswith("eagle-export: warning: the bundle is marked: it follows its source less closely than int8")
    certificate = read_manifest(bundle).certificate
    assert certificate is not None and not certificate.within_limits and certificate.limits == LIMITS["int8"]

    with pytest.warns(FidelityWarning, match=f"^{re.escape(str(bundle))}: it follows its source less closely") as seen:
        EagleModel.load(bundle, threads=1).close()
    assert len(seen) == 1 and Path(seen[0].filename).name == Path(__file__).name, (
        "it does not name the line that loads it"
    )
    assert run_main([str(bundle), "--prompt", "one two", "--max-new-tokens", "2", "--threads", "1"]) == 0
    warning, *_note_on_backend, _figures = capsys.readouterr().err.splitlines()
    assert warning.startswith(
        f"eagle-run: warning: {bundle}: it follows its source less closely than int8 should: agree"
    )
    assert warning.endswith("; this was accepted when it was exported")

    assert doctor_main([str(bundle), "--backend", "cpu"]) == 0
    out, err = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if line.startswith("limits"))
    assert err == "" and re.match(r"limits +below +it follows its source less closely than int8 should: agree", line)
    assert doctor_main([str(bundle), "--backend", "cpu", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["limits"]["ok"] is False and checks["limits"]["measured"] == certificate.kl


def test_a_refused_bundle_is_kept_for_other_limits(hard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call makes nothing; a call without a comparison takes it too; other settings begin anew."""
    bundle = tmp_path / "bundle"
    with pytest.raises(FidelityError) as first:
        export(hard, None, bundle, Settings(precision="int8"))
    data = work_folder(bundle) / KEPT / REFUSED / "target" / "model.onnx.data"
    made = data.stat().st_ino, data.read_bytes()
    with monkeypatch.context() as patched:
        for name in ("build_graphs", "certified", "recorded_inputs"):
            patched.setattr(f"eagle_export.bundle.{name}", None)
        with pytest.raises(FidelityError, match="less closely than was asked for") as second:
            export(hard, None, bundle, Settings(precision="int8", max_kl=1e-6))
        assert second.value.certificate == first.value.certificate and not bundle.exists()
        done = export(hard, None, bundle, Settings(precision="int8", max_kl=100, min_agreement=0))
    assert (done.manifest.certificate, read_manifest(bundle)) == (first.value.certificate, done.manifest)
    data = bundle / "target" / "model.onnx.data"
    assert (data.stat().st_ino, data.read_bytes()) == made
    assert done.warnings[-1].startswith("the bundle is marked") and not work_folder(bundle).exists()


def test_the_precisions_that_are_named_lead_to_a_bundle(
    refused: FidelityError, hard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """int8-weight may be refused too; its error then names fp32."""
    bundle, error, tried = tmp_path / "b", refused.with_options, ["int8"]
    while not bundle.exists():
        tried += re.findall(r"try --precision ([\w-]+)", error)
        assert len(tried) == len(set(tried)) <= 3
        status = main([str(hard), "-o", str(bundle), "-p", tried[-1]])
        out, error = capsys.readouterr()
        assert status == (0 if bundle.exists() else 2)
    assert error == "" and re.search(r"; agreement with the source \d+\.\d %, KL 0\.0\d+, tau ", out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EagleModel.load(bundle, threads=1).close()
    assert doctor_main([str(bundle), "--backend", "cpu"]) == 0
    line = rf"^limits +ok +it follows its source as closely as {tried[-1]} should: agreement "
    assert re.search(line, capsys.readouterr().out, re.M)


def test_a_layer_that_is_kept_wide_is_exact(hard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept as the refusal advises. Drafts change no output next to a layer whose sums are floats either."""
    assert main([str(hard), "-o", str(tmp_path / "b"), "-p", "int8", "--keep", LM_HEAD]) == 0
    manifest = read_manifest(tmp_path / "b")
    certificate, graph = manifest.certificate, manifest.target.graph
    assert certificate is not None and certificate.within_limits and certificate.kl < 0.01
    assert graph.recipe[LM_HEAD] == "kept in fp32" and graph.weights[LM_HEAD].dtype == "float32"
    assert graph.recipe[DOWN].startswith("int8 ") and DOWN not in graph.weights
    assert capsys.readouterr().err == ""
    assert doctor_main([str(tmp_path / "b"), "--backend", "cpu", "--json"]) == 0
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["lossless"]["ok"] and checks["limits"]["ok"]


@pytest.mark.parametrize("backend", ["cpu", "tensorrt"])
def test_layers_are_kept_by_pattern(backend: str, plain: Path, tmp_path: Path) -> None:
    patterns = ["*.0.self_attn.[kv]_proj.*", "*.gate_proj.weight"]
    done = export(
        plain, None, tmp_path / "b", Settings(precision="int4", backend=backend, keep=patterns, certify=False)
    )
    wide = "kept in fp32" if backend == "cpu" else "kept in fp16"
    kept = {name for name, what in done.manifest.target.graph.recipe.items() if what == wide}
    layers = [f"model.layers.{layer}.mlp.gate_proj.weight" for layer in range(LAYERS)]
    assert kept == {*layers, *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "kv")}
    assert kept <= set(done.manifest.target.graph.weights)


def test_the_lm_head_alone_may_be_rounded(plain: Path, tmp_path: Path) -> None:
    """No norm before the layers that are left can absorb a factor."""
    done = export(plain, None, tmp_path / "b", Settings(precision="int8", keep=["*.layers.*"], certify=False))
    assert done.manifest.target.graph.recipe[LM_HEAD].endswith("errors compensated")


def test_layers_that_cannot_be_kept(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for precision, pattern, says in (
        ("int8", "*.mlp.dwon_proj.*", "no linear layer of the target is named '*.mlp.dwon_proj.*', so that none"),
        ("int8", "model.norm.weight", "no linear layer of the target is named 'model.norm.weight'"),
        ("int8", "*", "no layer is left for pass 'smoothing'; keep fewer, or choose a wider precision"),
        ("fp32", "*", "fp32 keeps every layer as it is; name layers to keep with a narrower precision"),
    ):
        assert main([str(plain), "-o", str(tmp_path / "b"), "-p", precision, "--keep", pattern]) == 2
        err = capsys.readouterr().err
        assert says in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_more_may_be_asked_for_than_is_usual(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(plain), "-o", str(tmp_path / "b"), "-p", "int4", "--max-kl", "1e-9"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == [".b.eagle-work"]
    assert err.startswith("eagle-export: the bundle follows its source less closely than was asked for: agreement ")
    assert (
        "(1e-09 or less)" in err
        and "give the folder that eagle-calib wrote as calibration; or" in err
        and "--min-agreement" not in err
    )


def test_what_cannot_be_compared_cannot_be_held_to_figures(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(ExportError, match="cannot be held to an agreement or a KL: comparing takes"):
        export(plain, None, tmp_path / "bundle", Settings(max_kl=1.0))
    assert list(tmp_path.iterdir()) == []


def test_a_bundle_whose_logits_are_not_finite_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that fp32 holds and fp16 does not."""

    def overflow(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.v_proj.weight"] *= 1e5
        tensors["model.layers.1.self_attn.o_proj.weight"] /= 1e5

    target = make_target(tmp_path / "target", overflow)
    options = ["--max-kl", "1000", "--min-agreement", "0"]
    assert main([str(target), "-o", str(tmp_path / "b"), "-p", "fp16", *options]) == 2
    assert "in fp16 the bundle's logits are not finite; use a wider precision" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--min-agreement", "1.01"], "the least agreement is 1.01, but must be 0 to 1"),
        (["--min-agreement", "-0.5"], "the least agreement is -0.5, but must be 0 to 1"),
        (["--min-agreement", "nan"], "the least agreement is nan, but must be 0 to 1"),
        (["--max-kl", "-1"], "the largest KL is -1, but must be a number of nats, 0 or more"),
        (["--max-kl", "nan"], "the largest KL is nan, but must be"),
        (["--max-kl", "inf"], "the largest KL is inf, but must be"),
        (["--max-kl", "0.5", "--no-certificate"], "but the export is to go without the comparison"),
        (["--min-agreement", "0", "--no-certificate"], "but the export is to go without the comparison"),
    ],
)
def test_figures_that_cannot_be(
    options: list[str], says: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(plain), "-o", str(tmp_path / "b"), *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_every_precision_has_limits_and_ways_out_that_exist() -> None:
    assert set(LIMITS) == set(PRECISIONS) and set(RECIPES) == set(BACKENDS)
    for backend, recipes in RECIPES.items():
        for precision in recipes:
            for calibrated in (False, True):
                ways = what_to_try(required_fidelity(backend, precision, None, None, calibrated=calibrated))
                named = [str(way.settings["precision"]) for way in ways if "precision" in way.settings]
                widest = precision == "fp32" or (precision, "fp32" in recipes) == ("fp16", False)
                assert len(named) == (0 if widest else 1), (backend, precision)
                for name in named:
                    assert calibrated or not recipes[name].calibrated
                    assert LIMITS[name].kl <= LIMITS[precision].kl and name != precision
                assert any("calibration" in way.verb for way in ways) == (
                    precision in CALIBRATION_OPTIONAL and not calibrated
                )


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_a_nearest_rounding_is_told_to_record_first(precision: str) -> None:
    required = Order.of(Settings(precision=precision, record=False), False).required
    first, *others = what_to_try(required)
    assert first.as_options == "let inputs be recorded (without --no-recording, in Python record=False)"
    assert not any("eagle-calib" in way.verb for way in others)


figures = st.floats(0, 1), st.floats(0, 1e6), st.floats(0, 1), st.floats(0, 1e6)


@given(*figures)
@example(0.0, 5e-324, 0.0, 0.0)
def test_the_options_that_are_named_accept(agreement: float, kl: float, least: float, most: float) -> None:
    wanted, certificate = Limits(least, most), Certificate((), agreement, kl, 1.0, Limits(least, most))
    if wanted.met(agreement, kl):
        return
    options = accepting(certificate, wanted).as_options.removeprefix("accept it, which takes seconds, with ").split()
    given: dict[str, Any] = dict(zip(options[::2], map(float, options[1::2]), strict=True))
    asked = required_fidelity("cpu", "int8", given.get("--min-agreement"), given.get("--max-kl"), calibrated=False)
    assert Limits(
        given.get("--min-agreement", least), given.get("--max-kl", most)
    ).met(agreement, kl) and asked.explicit  # fmt: skip


def test_layers_that_are_not_known_are_left_out() -> None:
    certificate = Certificate((), 0.5, 1.0, 1.0, LIMITS["int8"])
    sentence = refusal(certificate, RequiredFidelity(LIMITS["int8"], False, "cpu", "int8", False), []).with_options
    assert (
        "worst" not in sentence
        and "; try --precision int8-weight; or accept it, which takes seconds, with --min-agreement" in sentence
    )


def test_an_agreement_that_layers_were_chosen_for_accepts_nothing() -> None:
    """With a lower one the same command chooses narrower layers."""
    required = Order.of(Settings(precision="auto", min_agreement=0.9), False).required
    assert Order.of(Settings(precision="auto", min_agreement=0.9, size=10**9), False).required.aims is False
    few, far = (
        refusal(Certificate((), agreement, kl, 1.0, LIMITS["auto"]), required, [])
        for agreement, kl in ((0.5, 0.1), (0.7, 1.0))
    )
    assert str(few).endswith("; ask for more agreement, for which layers are widened; or try precision='int8'")
    assert str(far).endswith("; or accept it, which takes seconds, with max_kl=1.0")


def test_a_pair_is_held_to_the_limits_too(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(GOLDEN / "target", target)
    tensors = read_tensors(target / "model.safetensors")
    outlier(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    with pytest.raises(FidelityError, match=r"worst layers: lm_head\.weight \("):
        export(target, GOLDEN / HEADS["eagle3"], tmp_path / "b", Settings(precision="int4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".b.eagle-work", "target"]
