"""Which backend is chosen, and the reasons reported for the others."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from conftest import needs_operators
from eagle_runtime import BackendError, BundleError, EagleModel
from eagle_runtime.base.backend_names import AUTO, BACKENDS, NATIVE
from eagle_runtime.bundle.graph import IN_FP32
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Manifest, read_manifest
from eagle_runtime.commands.cli import main
from eagle_runtime.core.row_padding import RowPadding
from eagle_runtime.core.session import Session
from eagle_runtime.opening.backends import (
    check_name,
    choose,
    graph_of,
    library_version,
    open_sessions,
    reasons_text,
    unfit,
)
from eagle_runtime.opening.exact_rows import RowCheck
from eagle_runtime.ort.operators import native_operators
from insides import sessions_of

OF_FP16 = tuple(name for name in BACKENDS if name != NATIVE)  # those that bundles in fp16 may be made for
REASONS = {**{name: f"no {name} here" for name in OF_FP16}, NATIVE: "the bundle has no graph for it"}


@pytest.fixture
def fp16_bundle(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    """A bundle in fp16 that also has engine folders of both libraries."""
    bundle = tmp_path / "bundle"
    shutil.copytree(bundle_of("eagle1", "fp16"), bundle)
    for name in ("tensorrt-rtx-sm89", "tensorrt-sm86"):
        (bundle / "engines" / name).mkdir(parents=True)
        (bundle / "engines" / name / "engine.json").touch()
    return bundle


def test_without_the_package_the_portable_graph_runs(bundle_of: Callable[..., Path]) -> None:
    code = (
        "import sys; sys.modules['eagle_edge_kernels'] = None; from eagle_runtime import EagleModel\n"
        f"with EagleModel.load({str(bundle_of('alone', 'int8'))!r}, context=64) as model:\n"
        "    print(model.backend, model.passed_over[-1])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("cpu ('native', \"eagle-edge-kernels is not installed; ")


@needs_operators
def test_where_it_is_installed_native_graphs_run(bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of("alone", "int8")
    with EagleModel.load(bundle, context=64) as model:
        assert model.backend == NATIVE and model.row_check == RowCheck(RowPadding())
        assert "operators" in library_version(NATIVE) and library_version(NATIVE) != library_version("cpu")


@needs_operators
@pytest.mark.parametrize(("precision", "row"), [("int8", 2 * 16), ("int8+int8 cache", 16 + 4)])
def test_what_a_token_takes_in_a_native_cache(bundle_of: Callable[..., Path], precision: str, row: int) -> None:
    """row: bytes of one head's key or value, in fp16 or in bytes with a scale."""
    with EagleModel.load(bundle_of("alone", precision), backend=NATIVE, context=64) as model:
        spec = model.manifest.target
        assert (spec.num_kv_heads, spec.head_dim) == (2, 16)
        expected = 2 * spec.num_layers * spec.num_kv_heads * row
        cache = sessions_of(model)[0].new_cache(64)
        assert cache.token_bytes == expected and cache.nbytes == 64 * expected
        assert 2 * spec.num_layers * graph_of(spec.graph, NATIVE).kv_row_bytes == expected


def test_a_bundle_for_other_operators_is_refused(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    bundle = shutil.copytree(bundle_of("alone", "int8"), tmp_path / "bundle")
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    data["target"]["graph"]["native"]["operators"] = "0"
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with pytest.raises(BundleError, match="native operators of version 0, and this runtime has"):
        EagleModel.load(bundle, backend=NATIVE, context=64)
    with EagleModel.load(bundle, context=64) as model:
        assert model.backend == "cpu"


@needs_operators
def test_a_bundle_for_older_operators_runs(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    bundle = shutil.copytree(bundle_of("alone", "int8"), tmp_path / "bundle")
    data = json.loads((bundle / MANIFEST_NAME).read_text())
    native = data["target"]["graph"]["native"]
    native["operators"] = IN_FP32[-1]
    file = bundle / native["file"]  # whose cache was in fp32
    graph = onnx.load(file, load_external_data=False)
    for value in graph.graph.input:
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16:
            value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    onnx.save(graph, file)
    data["files"][native["file"]] = hashlib.sha256(file.read_bytes()).hexdigest()
    (bundle / MANIFEST_NAME).write_text(json.dumps(data))
    with EagleModel.load(bundle, context=64) as model:
        assert model.backend == NATIVE


def opening(*works: str) -> tuple[list[str], Callable[[str], str]]:
    """Returns a list that records the backends tried, and a function `open_on` that opens those in `works`."""
    asked = []

    def open_on(name: str) -> str:
        asked.append(name)
        if name not in works:
            raise (BundleError if name == "tensorrt" else BackendError)(f"no {name} here")
        return f"open on {name}"

    return asked, open_on


@pytest.mark.parametrize("first", range(len(OF_FP16)))
def test_auto_takes_the_first_backend_that_works(first: int, fp16_bundle: Path) -> None:
    asked, open_on = opening(*OF_FP16[first:])
    chosen = choose(AUTO, fp16_bundle, read_manifest(fp16_bundle), open_on)
    assert (chosen.backend, chosen.opened) == (OF_FP16[first], f"open on {OF_FP16[first]}")
    before = BACKENDS[: BACKENDS.index(OF_FP16[first])]
    assert chosen.passed_over == tuple((name, REASONS[name]) for name in before)
    assert asked == list(OF_FP16[: first + 1])


def test_the_error_has_every_reason_if_no_backend_works(fp16_bundle: Path) -> None:
    with pytest.raises(BackendError) as error:
        choose(AUTO, fp16_bundle, read_manifest(fp16_bundle), opening()[1])
    assert str(error.value) == f"no backend runs {fp16_bundle}: " + "; ".join(
        f"{name}: {REASONS[name]}" for name in BACKENDS
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_given_by_name_is_the_only_one_tried(name: str, fp16_bundle: Path) -> None:
    manifest = read_manifest(fp16_bundle)
    asked, open_on = opening(name)
    assert choose(name, fp16_bundle, manifest, open_on).passed_over == () and asked == [name]
    asked, open_on = opening()
    with pytest.raises((BackendError, BundleError), match=f"no {name} here"):
        choose(name, fp16_bundle, manifest, open_on)
    assert asked == [name]


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_bundle_for_cpus_tries_no_other_backend(precision: str, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of("eagle1", precision)
    asked, open_on = opening("cpu")
    chosen = choose(AUTO, bundle, read_manifest(bundle), open_on)
    native = unfit(NATIVE, bundle, read_manifest(bundle)) is None
    assert native is (precision == "int8" and native_operators().library is not None)
    assert asked == [*([NATIVE] if native else []), "cpu"]
    assert [name for name, _ in chosen.passed_over] == list(BACKENDS[:-1])
    with pytest.raises(BackendError, match=r"^no cpu here$"):
        choose(AUTO, bundle, read_manifest(bundle), opening()[1])


def test_engines_fit_one_library(fp16_bundle: Path) -> None:
    manifest = read_manifest(fp16_bundle)
    assert [unfit(name, fp16_bundle, manifest) for name in BACKENDS] == [
        None,
        None,
        None,
        "the bundle has no graph for it",
        None,
    ]
    shutil.rmtree(fp16_bundle / "engines" / "tensorrt-sm86")
    assert unfit("tensorrt", fp16_bundle, manifest) == "the bundle has no engines for it"
    assert unfit("tensorrt-rtx", fp16_bundle, manifest) is None
    (fp16_bundle / "engines" / "tensorrt-rtx-sm89").rename(fp16_bundle / "engines" / "tensorrt-sm89")
    assert unfit("tensorrt-rtx", fp16_bundle, manifest) is not None and unfit("tensorrt", fp16_bundle, manifest) is None


def test_cuda_passes_over_block_heads(bundle_of: Callable[..., Path]) -> None:
    bundle, block = bundle_of("eagle1", "fp16"), read_manifest(bundle_of("deepspec")).head
    manifest = replace(read_manifest(bundle), head=block)
    assert unfit("cuda", bundle, manifest) == "the bundle has a block head, which does not run on it"
    with pytest.raises(
        BackendError, match=f"{re.escape(str(bundle))} has a block head, which does not run on cuda; build engines"
    ):
        open_sessions("cuda", bundle, manifest, 100, 10, 1)


@pytest.mark.parametrize("name", ["abacus", "", "CUDA", "gpu"])
def test_unknown_backends_are_refused(name: str) -> None:
    with pytest.raises(BackendError, match=f"backend {name!r} is unknown; choose auto or one of tensorrt-rtx, "):
        check_name(name)


def test_a_model_reports_its_backend(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("eagle1"), context=64) as model:
        assert model.backend == "cpu" and [name for name, _ in model.passed_over] == list(BACKENDS[:-1])
        assert reasons_text(model.passed_over).startswith("tensorrt-rtx: the bundle has no engines for it; tensorrt: ")
    with EagleModel.load(bundle_of("eagle1"), context=64, backend="cpu") as model:
        assert model.backend == "cpu" and model.passed_over == ()


def test_a_bundle_for_cpus_imports_no_gpu_library(bundle_of: Callable[..., Path]) -> None:
    """The bundle's files alone show that GPU backends do not apply."""
    code = (
        "import sys, json; from eagle_runtime import EagleModel; "
        f"EagleModel.load({str(bundle_of('eagle1'))!r}).close(); print(json.dumps(sorted(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    loaded = set(json.loads(done.stdout))
    assert "eagle_runtime.ort.session" in loaded
    others = ("ort.cuda", "ort.device_session", "trt.session", "trt.library", "trt.driver")
    sessions = {f"eagle_runtime.session.{name}" for name in others}
    assert not loaded & (sessions | {"tensorrt", "tensorrt_rtx", "cuda", "eagle_runtime.machine.nvidia"})


def test_the_command_prints_the_choice_of_backend_auto(
    bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(bundle_of("eagle1")), "--prompt-ids", "5,6,7", "--max-new-tokens", "3", "--json"]
    for more, lines in (([], 0), (["--backend", "cpu"], 0), (["--backend", "auto"], 1)):
        assert main([*argv, *more]) == 0
        err = capsys.readouterr().err
        assert err.count("\n") == lines
    assert err.startswith("eagle-run: on cpu (tensorrt-rtx: the bundle has no engines for it; tensorrt: ")


@pytest.mark.parametrize("asked", [AUTO, "tensorrt-rtx"])
def test_auto_warns_of_the_bundles_engine_files(
    fp16_bundle: Path, asked: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A backend given by name is the user's choice and gives no warning. The sessions are the CPU's here, since the
    warning depends on the choice alone."""

    def on_cpu(name: str, *arguments: Any) -> tuple[Session, ...]:
        return open_sessions("cpu", *arguments)

    monkeypatch.setattr("eagle_runtime.opening.loading.open_sessions", on_cpu)
    with (
        caplog.at_level(logging.INFO, "eagle_runtime"),
        EagleModel.load(fp16_bundle, context=64, backend=asked) as model,
    ):
        warnings = [record.getMessage() for record in caplog.records if record.name.startswith("eagle_runtime")]
        assert model.backend == "tensorrt-rtx"
        if asked == AUTO:
            assert model.notice is not None and warnings == [model.notice]
            assert f"tensorrt-rtx runs the engine files in {fp16_bundle / 'engines'}" in model.notice
        else:
            assert model.notice is None and warnings == []


@pytest.mark.parametrize("argv", [[], ["--backend", "auto"]])
def test_the_command_warns_of_engine_files(
    fp16_bundle: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def on_cpu(name: str, *arguments: Any) -> tuple[Session, ...]:
        return open_sessions("cpu", *arguments)

    monkeypatch.setattr("eagle_runtime.opening.loading.open_sessions", on_cpu)
    assert main([str(fp16_bundle), "--prompt-ids", "5,6,7", "--max-new-tokens", "3", "--json", *argv]) == 0
    assert "eagle-run: tensorrt-rtx runs the engine files in " in capsys.readouterr().err


def test_the_library_leaves_logging_to_the_application(bundle_of: Callable[..., Path]) -> None:
    """An application that configures no logging sees no messages of the library."""
    handlers = logging.getLogger("eagle_runtime").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)


def test_an_fp16_bundle_without_engines_tries_cuda(bundle_of: Callable[..., Path]) -> None:
    manifest: Manifest = read_manifest(bundle_of("eagle3", "fp16"))
    asked, open_on = opening("cpu")
    chosen = choose(AUTO, bundle_of("eagle3", "fp16"), manifest, open_on)
    assert asked == ["cuda", "cpu"] and chosen.passed_over[-2] == ("cuda", "no cuda here")
