"""Engines that TensorRT for RTX builds from a bundle, without a GPU: files written, errors, interruptions, the
command."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import HEADS
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.commands.cli import LIBRARIES, main
from eagle_export.tensorrt import build as module
from eagle_export.tensorrt.build import build_engines, profiles_of
from eagle_export.tensorrt.network import listen
from eagle_export.writing.settings import Settings
from eagle_runtime import BackendError
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.listed_files import verify_hashes
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.trt import library as trt_library
from eagle_runtime.trt.engine_file import find_engines
from eagle_runtime.trt.fixed_shapes import (
    HEAD_ROWS,
    PAST_STEP,
    TARGET_ROWS,
    Steps,
    pass_shape,
    past_steps,
    rows_up_to,
    shapes_of,
)
from eagle_tools.grow.shape import Shape
from eagle_tools.toy_demo import PAIR
from grow import grow
from patience import PATIENCE_S
from systems import posix_only

pytest_plugins = ("trt_bundles",)

if sys.platform == "linux" and platform.machine() == "x86_64":
    import tensorrt_rtx as trt
else:  # not every platform has the wheel
    trt = pytest.importorskip("tensorrt_rtx")

FILES = {"target.engine", "draft.engine", "keep.engine", "target-embedding.table", "engine.json"}
LARGE = Shape(16, 2048, 32, 8, 64, 8192)  # Llama-3.2-1B but for the vocabulary


@pytest.fixture
def bundle(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    """The golden pair in fp16, without engines."""
    return Path(shutil.copytree(bundle_of("eagle1", "fp16"), tmp_path / "bundle"))


@pytest.fixture(params=sorted(HEADS))
def built(
    request: pytest.FixtureRequest, engines_of: Callable[[str], tuple[Path, module.Built]]
) -> tuple[Path, module.Built]:
    """A bundle, and the engines that were built in it for three compute capabilities."""
    return engines_of(request.param)


def test_engines_and_sidecar(built: tuple[Path, module.Built]) -> None:
    bundle, done = built
    manifest = read_manifest(bundle)
    verify_hashes(bundle, manifest)  # the bundle is unchanged
    assert done.folder == bundle / "engines" / "tensorrt-rtx-sm86-sm89-sm120"
    known = {"draft-known.table"} if done.engines.draft is not None and "known" in done.engines.draft.tables else set()
    assert (known != set()) == (manifest.head is not None and manifest.head.kind == "eagle3")
    assert {path.name for path in done.folder.iterdir()} == FILES | known
    assert [path.name for path in done.folder.parent.iterdir()] == [done.folder.name]
    for capability in ("8.6", "8.9", "12.0"):
        device = DeviceInfo("any", capability, "13.0", 0, 0)
        fitting = find_engines(bundle, manifest, "tensorrt-rtx", trt.__version__, device, 1000)
        assert fitting.folder == done.folder and fitting.engines == done.engines
    for name, spec in done.engines.specs.items():
        assert file_sha256(done.folder / spec.file) == spec.sha256
        assert spec.graph == {file: digest for file, digest in manifest.files.items() if file.startswith(f"{name}/")}
        assert len(spec.graph) == (0 if name == "keep" else 2)
        assert spec.scratch is not None and 0 <= spec.scratch < 100e6
    assert done.engines.draft is not None
    tables = [done.engines.target.tables["embedding"], done.engines.draft.tables["embedding"]]
    assert tables[0] == tables[1], "stored once"
    assert (done.folder / tables[0].file).stat().st_size == 2 * 256 * 64
    for name, spec in done.engines.models.items():
        stored = (bundle / name / "model.onnx.data").stat().st_size
        most = 1.2 * stored + 200_000  # with the masks and indices of unrolled levels, which weigh in a graph of 0.2 MB
        assert spec.weights is not None and 0.6 * stored < spec.weights < most, "GPU memory of the weights"


def test_attention_is_fused_in_every_layer(built: tuple[Path, module.Built]) -> None:
    """And the number of kernels per decoder layer is limited, the LM head's included."""
    bundle, done = built
    manifest = read_manifest(bundle)
    target, draft, keep = done.built
    assert target.spec.fused_attention == target.layers == manifest.target.num_layers
    assert draft.spec.fused_attention == 6 and draft.layers == 1, "one call: the rows, and five levels"
    assert keep.spec.kernels is not None and keep.spec.kernels <= 2
    assert target.spec.kernels is not None and draft.spec.kernels is not None
    assert (target.spec.kernels - 5) / target.layers <= 13, "five are of the candidates"
    assert draft.spec.kernels <= 150


def test_the_library_reads_the_engine_file(built: tuple[Path, module.Built]) -> None:
    """Through the same buffer as with a GPU. Its only error is the missing driver."""
    _, done = built
    messages = listen(trt)
    runtime = trt.Runtime(messages.logger)
    runtime.error_recorder = messages.recorder
    engine = runtime.deserialize_cuda_engine(np.memmap(done.folder / "draft.engine", np.uint8, "r"))
    assert engine is not None or "CUDA" in messages.cause or "driver" in messages.cause, messages.errors
    content = bytearray((done.folder / "draft.engine").read_bytes())
    content[:8] = b"\0" * 8
    messages.begin()
    assert runtime.deserialize_cuda_engine(bytes(content)) is None and messages.errors


# Sizes.


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("context", [2, 100, 1000, 2048])
def test_profiles_serve_every_forward_pass_of_decoding(kind: str, context: int, bundle_of: Callable[..., Path]) -> None:
    """Padded forward passes fit a profile at any past; trees of up to 64 rows fit the first."""
    profiles = profiles_of(read_manifest(bundle_of(kind)), context)
    for name, rows_of in (("target", TARGET_ROWS), ("draft", HEAD_ROWS)):
        widest = profiles[name][-1].sizes
        rows = rows_up_to(rows_of, widest["T"][-1])
        steps = Steps(rows, past_steps(context), widest["R"][-1] if "R" in widest else 0)
        for past in {0, 1, context // 2, context - 1}:
            for count in {1, 2, 16, 17, 48, 60, 64, 65, 128, 256, 512} & set(range(1, min(rows[-1], context) + 1)):
                for wanted in {1, min(count, 128)}:
                    shape = pass_shape(steps, count, past, wanted).sizes
                    serving = [index for index, profile in enumerate(profiles[name]) if profile.serves(shape)]
                    assert serving and (serving[0] == 0) == (count <= 64), (count, past, wanted)
        assert all(any(profile.serves(shape.sizes) for profile in profiles[name]) for shape in shapes_of(steps))
    assert not profiles["target"][-1].serves({"T": 1, "P": context + PAST_STEP, "R": 1})
    tuned = [limit for part in profiles.values() for item in part for limit in item.sizes.values()]
    assert all(least <= 1 and middle == most for least, middle, most in tuned)


# Errors.


def test_a_build_that_needs_more_memory_than_is_free_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any work. An unknown amount is no reason."""
    files = [path.stat().st_size for path in (bundle / "target").iterdir()]
    needed = int(module.PER_BYTE_OF_WEIGHTS * sum(files)) + module.PROCESS_BYTES
    monkeypatch.setattr(module, "free_memory", lambda: needed - 1)
    with pytest.raises(ExportError, match=r"building the engine of .*target/model\.onnx takes about 0\.\d GB") as error:
        build_engines(bundle, "tensorrt-rtx")
    assert "GB are free; end other programs, export in int8 or int4" in str(error.value) and "\n" not in str(
        error.value
    )
    assert not (bundle / "engines").exists()
    for free in (needed, None):
        monkeypatch.setattr(module, "free_memory", lambda free=free: free)
        module.check_memory(bundle / "target/model.onnx")


def test_the_memory_of_an_engine_is_read_from_the_log() -> None:
    lines = [
        "Total Activation Memory: 100 bytes",
        "Total Activation Memory: 300 bytes",
        "Total Weights Memory: 7 bytes",
    ]
    assert module.read_memory(lines) == (7, 300)
    assert module.read_memory(["Total Host Persistent Memory: 80 bytes"]) == (None, None)


def test_fp32_is_refused(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle"))
    with pytest.raises(ExportError, match=r"computes in float32.*export it with fp16 .* for the backend tensorrt-rtx"):
        build_engines(bundle, "tensorrt-rtx")
    assert not (bundle / "engines").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--compute-capability", "9.0"],
            r"does not compile for compute capability 9\.0; choose from 7\.5, 8\.0, 8\.6",
        ),
        (["--compute-capability", "89"], "does not compile for compute capability 89;"),
        (["--context", "1"], "context is 1, but this model serves 2 to 2048 tokens"),
        (["--context", "4096"], "context is 4096, but this model serves 2 to 2048 tokens"),
        (["--backend", "tensorrt", "--compute-capability", "8.9"], "tensorrt builds for the GPU that is present"),
    ],
)
def test_wrong_arguments_are_refused_before_a_build(
    bundle: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engines", str(bundle), "--backend", "tensorrt-rtx", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("eagle-export engines: ") and printed.count("\n") == 1
    assert re.search(message, printed), printed
    assert not (bundle / "engines").exists()


def test_a_changed_graph_is_refused(bundle: Path) -> None:
    with (bundle / "target/model.onnx.data").open("r+b") as file:
        file.write(b"\1\2\3")
    with pytest.raises(Exception, match=r"model\.onnx\.data does not match its SHA-256"):
        build_engines(bundle, "tensorrt-rtx")


def test_the_error_names_a_library_that_is_not_installed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(BackendError, match=r"tensorrt.*pip install 'eagle-edge\[tensorrt\]'"):
        build_engines(bundle, "tensorrt")


# Interruptions.


def test_a_failed_build_leaves_the_older_engines(
    engines_of: Callable[[str], tuple[Path, module.Built]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older, done = engines_of("eagle3")
    bundle = Path(shutil.copytree(older, tmp_path / "bundle"))
    (bundle / "engines" / done.folder.name).rename(bundle / "engines/tensorrt-rtx-sm89")
    files = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}

    def fail(path: Path) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "file_sha256", fail)
    with pytest.raises(ExportError, match=r"the disk is full\); no files were left"):
        build_engines(bundle, "tensorrt-rtx", ["8.9"], context=128)
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == files


@posix_only
def test_an_interrupted_build_leaves_no_files(bundle: Path) -> None:
    """The library is at work, so Python handles no signal in the main thread."""
    code = (
        "import sys, threading, os, signal, time\n"
        "from eagle_export.tensorrt import network\n"
        "monitor = network.progress_monitor\n"
        "def watched(trt, report, stop):\n"
        "    def stop_at_three(phase, done, steps):\n"
        "        if done == 3: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return monitor(trt, stop_at_three, stop)\n"
        "network.progress_monitor = watched\n"
        "from eagle_export.commands.cli import main\n"
        f"sys.exit(main(['engines', {str(bundle)!r}, '--backend', 'tensorrt-rtx']))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=PATIENCE_S)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stderr == "eagle-export engines: interrupted; no files were left\n"
    assert not (bundle / "engines").exists()


# The command.


def test_the_command_reports_as_json_and_replaces_older_engines(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older = bundle / "engines/tensorrt-rtx-sm89"
    older.mkdir(parents=True)
    (older / "older.engine").touch()
    arguments = ["--compute-capability", "8.9", "--context", "64", "--weight-streaming", "--json"]
    assert main(["engines", str(bundle), "--backend", "tensorrt-rtx", *arguments]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["compute_capabilities"] == ["8.9"] and report["context"] == 64 and report["weight_streaming"]
    assert report["engines"]["target"]["fused_attention"] == 8
    assert {path.name for path in older.iterdir()} == FILES
    assert set(LIBRARIES) == set(trt_library.LIBRARIES)


def test_the_command_prints_a_line_per_engine(
    built: tuple[Path, module.Built], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, done = built
    monkeypatch.setattr(module, "build_engines", lambda *arguments, **settings: done)
    assert main(["engines", str(bundle), "--backend", "tensorrt-rtx"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(done.folder / f"{n}.engine") for n in done.engines.specs]
    assert re.search(r" s, \d+\.\d MB, \d+ kernels for 8 decoder layers, attention fused in 8$", lines[0])
    assert re.search(r" s, \d+\.\d MB, \d+ kernels$", lines[2])


def test_only_the_first_argument_selects_the_engines_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([str(tmp_path / "engines"), str(tmp_path), "-o", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("eagle-export: ")


@pytest.mark.slow
def test_a_billion_parameters_are_built_in_eight_gigabytes(tmp_path: Path) -> None:
    """16 layers of width 2048, in fp16, for three compute capabilities at once."""
    grow(PAIR / "target", [PAIR / "eagle1"], tmp_path / "grown", LARGE, "fp16")
    export(
        tmp_path / "grown/target",
        tmp_path / "grown/eagle1",
        tmp_path / "bundle",
        Settings(precision="fp16", backend="tensorrt-rtx", certify=False),
    )
    shutil.rmtree(tmp_path / "grown")
    code = (
        "import resource, sys; from eagle_export.commands.cli import main; "
        f"assert main(['engines', {str(tmp_path / 'bundle')!r}, '--backend', 'tensorrt-rtx', '--json']) == 0; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    report, peak = done.stdout.splitlines()
    engines = json.loads(report)["engines"]
    print(f"{int(peak) / 1e9:.1f} GB: {engines}")
    assert engines["target"]["fused_attention"] == 16 and engines["target"]["kernels"] <= 13 * 16
    assert engines["target"]["bytes"] < 1.1 * (tmp_path / "bundle/target/model.onnx.data").stat().st_size
    assert int(peak) < 8e9
    shutil.rmtree(tmp_path)
