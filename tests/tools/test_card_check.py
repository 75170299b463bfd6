"""eagle-doctor --card: the kit, each step of the check on a fake GPU, and what it reports without a card."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from conftest import GOLDEN, HEADS
from cuda_fake import FakeDriver
from eagle_runtime import BackendError, EagleModel, RequestError
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_runtime.trt.engine_file import find_engines
from eagle_runtime.trt.session import start_sessions
from eagle_tools import card_kit, doctor
from eagle_tools.card import check as checks
from eagle_tools.card import command
from eagle_tools.card.check import BACKEND, NODES, TEMPERATURES, Machine, Step, check_card
from eagle_tools.card.command import report_of, run_check
from eagle_tools.card.kit import KIT, Kit, read_kit, read_references, write_references
from trt_fake import VERSION, fake_library, write_fake_engines

pytest_plugins = ["trt_bundles"]

CONTEXT = 320
SCHEMA = json.loads((Path(command.__file__).with_name("report.schema.json")).read_text(encoding="utf-8"))
RTX = DeviceInfo("NVIDIA GeForce RTX 4090", "8.9", "13.0", 24_000_000_000, None, "580.1")
STEPS = ["load", "logits", *(f"identity T={temperature:g}" for temperature in TEMPERATURES), "cycle"]


@pytest.fixture(scope="session")
def golden_kit(made_once: Callable[[str, Callable[[Path], object]], Path]) -> Path:
    """A kit of the golden pair in fp16, with real engines."""

    def make(folder: Path) -> None:
        card_kit.make_kit(folder / "kit", GOLDEN / "target", GOLDEN / HEADS["eagle3"], ["fp16"], CONTEXT)

    return made_once("card_kit", make) / "kit"


@pytest.fixture
def kit(golden_kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it whose engines are for the fake library. Checks decode few tokens, and time one run."""
    monkeypatch.setattr(checks, "NEW_TOKENS", 16)
    monkeypatch.setattr(checks, "RUNS", 1)
    folder = tmp_path / "kit"
    shutil.copytree(golden_kit, folder)
    shutil.rmtree(folder / "fp16" / "engines")
    write_fake_engines(folder / "fp16", BACKEND, CONTEXT)
    return _listed(folder)


def _listed(folder: Path) -> Path:
    """Lists the files of a kit anew; returns the folder."""
    kit = read_kit(folder)
    (folder / KIT).write_text(dataclasses.replace(kit, files=card_kit.hashes(folder)).to_json(), encoding="utf-8")
    return folder


class FakeMachine:
    """A machine with a fake GPU, or with none."""

    def __init__(self, *, gpu: bool = True) -> None:
        self.has_gpu = gpu
        self.driver = FakeDriver()
        self.built: list[str] = []

    @property
    def machine(self) -> Machine:
        return Machine(self.gpu, self.open, self.build)

    def gpu(self) -> DeviceInfo:
        if not self.has_gpu:
            raise BackendError("no NVIDIA driver is installed")
        return dataclasses.replace(RTX, free=self.driver.total - self.driver.used)

    def open(self, bundle: Path, backend: str) -> EagleModel:
        if backend == "cpu":
            return EagleModel.load(bundle, backend="cpu", context=CONTEXT)
        manifest = read_manifest(bundle)
        card = self.driver.describe()
        folder = find_engines(bundle, manifest, BACKEND, VERSION, card, CONTEXT)
        sessions = start_sessions(fake_library(self.driver, BACKEND), self.driver, folder, manifest, CONTEXT)
        return EagleModel(bundle_of_sessions(bundle, manifest, sessions, CONTEXT, backend=BACKEND))

    def build(self, bundle: Path, capability: str) -> None:
        self.built.append(capability)
        shutil.rmtree(bundle / "engines", ignore_errors=True)
        write_fake_engines(bundle, BACKEND, CONTEXT, capability=capability)


def check(folder: Path, machine: FakeMachine) -> dict[str, Step]:
    """The outcomes by name."""
    return {step.name: step for step in check_card(folder, read_kit(folder), machine.machine)}


def on_card(name: str) -> str:
    """The full name of a step of the golden kit on the GPU."""
    first, _, rest = name.partition(" ")
    return f"{first} fp16 on {BACKEND} {rest}".strip()


def test_everything_is_checked_on_a_card(
    kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "out.json"
    assert run_check(Path("kit"), read_kit(kit), FakeMachine().machine, output, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(output.read_text(encoding="utf-8"))
    jsonschema.validate(report, SCHEMA)
    steps = {step["name"]: step for step in report["steps"]}
    assert list(steps) == ["card", "kit", "load fp16 on cpu", "logits fp16 on cpu", *map(on_card, STEPS)]
    assert report["ok"] and all(step["ok"] for step in steps.values())
    assert [line.split("  ")[0] for line in lines[:-1]] == list(steps) and "docs/backends.md" in lines[-1]
    assert steps["card"]["figures"]["name"] == RTX.name
    assert steps[on_card("load")]["figures"]["gpu_bytes"] > 0
    # The fake computes with the CPU's kernels, whose rows depend on the padding by no more than rounding.
    logits = steps[on_card("logits")]["figures"]
    assert logits["largest_difference"] <= 0.01 * logits["scale"] and logits["same_first"] > 0.9
    for temperature in TEMPERATURES:
        figures = steps[on_card(f"identity T={temperature:g}")]["figures"]
        assert figures["equal"] + figures["ties"] == figures["texts"] == 4
    cycle = steps[on_card("cycle")]["figures"]
    assert [row["nodes"] for row in cycle["trees"]] == list(NODES)
    for row in cycle["trees"]:
        assert row["tau"] >= 1 and 0 < row["ms"]["verify"] < row["ms"]["cycle"]
        counted = row["counted_per_cycle"]  # the prompt's own passes too, for a few cycles only
        assert counted["engine_calls"] == pytest.approx(3, abs=0.5), "one drafts, one verifies, one keeps rows"
        assert counted["synchronisations"] == pytest.approx(2, abs=0.5)
    assert cycle["token_ms"] > 0


def test_without_a_card_the_rest_is_checked(
    golden_kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.json"
    with pytest.raises(BackendError, match=r"^this machine has no GPU to check: no NVIDIA driver is installed$"):
        run_check(golden_kit, read_kit(golden_kit), FakeMachine(gpu=False).machine, output, as_json=True)
    report = json.loads(output.read_text(encoding="utf-8"))
    assert json.loads(capsys.readouterr().out) == report
    jsonschema.validate(report, SCHEMA)
    assert {step["name"]: step["ok"] for step in report["steps"]} == {
        "card": None,
        "kit": True,
        "load fp16 on cpu": True,
        "logits fp16 on cpu": True,
    }
    assert not report["ok"]


def test_a_kit_asks_for_the_library_that_built_its_engines(golden_kit: Path) -> None:
    """Engines run with one version alone."""
    sidecars = list(golden_kit.glob("*/engines/*/engine.json"))
    built_by = {json.loads(path.read_text(encoding="utf-8"))["library_version"] for path in sidecars}
    (asked,) = (golden_kit / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert {asked} == {f"tensorrt-rtx=={version}" for version in built_by}
    assert asked == f"tensorrt-rtx=={importlib.metadata.version('tensorrt-rtx')}", "pip knows that version"
    assert "requirements.txt" in read_kit(golden_kit).files


def has_driver() -> bool:
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_the_command_without_a_card(golden_kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "card.json"
    assert doctor.main(["--card", str(golden_kit), "--output", str(output)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("eagle-doctor: this machine has no GPU to check: no NVIDIA driver") and err.count("\n") == 1
    assert "logits fp16 on cpu" in out and json.loads(output.read_text(encoding="utf-8"))["schema"] == 2


def test_engines_of_another_version_are_built_here(kit: Path) -> None:
    sidecar = kit / "fp16" / "engines" / "tensorrt-rtx-sm89" / "engine.json"
    sidecar.write_text(sidecar.read_text(encoding="utf-8").replace(f'"{VERSION}"', '"0.9"'), encoding="utf-8")
    machine = FakeMachine()
    steps = check(_listed(kit), machine)
    assert machine.built == ["8.9"] and steps[on_card("load")].figures["built_here"] is True
    assert all(step.ok for step in steps.values())


def test_a_failing_step_leaves_the_others(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> dict[str, int]:
        raise ZeroDivisionError("a clock of zero")

    monkeypatch.setattr(checks, "_counters", fail)
    steps = check(kit, FakeMachine())
    assert {name for name, step in steps.items() if not step.ok} == {on_card("cycle")}
    assert steps[on_card("cycle")].says == "ZeroDivisionError: a clock of zero"


def test_logits_that_cannot_be_read_leave_the_others(kit: Path) -> None:
    shutil.copytree(kit / "fp16", kit / "other")
    (kit / "other.npz").write_bytes(b"no archive")
    made = read_kit(kit)
    served = {"other": made.precisions["fp16"], **made.precisions}
    steps = {
        step.name: step for step in check_card(kit, dataclasses.replace(made, precisions=served), FakeMachine().machine)
    }
    assert steps[f"load other on {BACKEND}"].ok is False
    assert "cannot be read as reference logits" in steps[f"load other on {BACKEND}"].says
    assert all(steps[on_card(name)].ok for name in STEPS)


def test_a_model_that_does_not_close(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, closing = FakeMachine(), []

    def fail() -> None:
        raise BackendError("the GPU failed: unspecified launch failure")

    def opened(bundle: Path, backend: str) -> EagleModel:
        model = machine.open(bundle, backend)
        if backend == BACKEND:
            closing.append(model.close)
            monkeypatch.setattr(model, "close", fail)
        return model

    steps = list(check_card(kit, read_kit(kit), dataclasses.replace(machine.machine, open=opened)))
    assert steps[-1].name == on_card("close") and steps[-1].ok is False and "launch failure" in steps[-1].says
    closing[0]()


def test_engines_that_neither_load_nor_build(kit: Path) -> None:
    shutil.rmtree(kit / "fp16" / "engines")
    machine = FakeMachine()

    def build(bundle: Path, capability: str) -> None:
        raise BackendError("the library is missing")

    steps = list(check_card(kit, read_kit(kit), dataclasses.replace(machine.machine, build=build)))
    assert steps[-1].name == on_card("load") and steps[-1].ok is False
    assert "building engines here failed too: the library is missing" in steps[-1].says
    assert [step.ok for step in steps[:-1]] == [True, False, True, True]  # the kit's engines are missing


def test_a_precision_that_the_card_lacks(kit: Path) -> None:
    made = read_kit(kit)
    served = {"fp16": made.precisions["fp16"], "fp8": ("12.0",)}
    steps = list(check_card(kit, dataclasses.replace(made, precisions=served), FakeMachine().machine))
    assert steps[-1] == Step(f"load fp8 on {BACKEND}", None, "GPUs of compute capability 8.9 have no kernels for fp8")


@pytest.mark.parametrize("wrong", [0.2, np.nan])
def test_wrong_logits_fail(wrong: float, kit: Path) -> None:
    references = read_references(kit / "fp16.npz")
    references[1].logits[3, 5] += wrong * np.abs(references[1].logits).max()
    write_references(kit / "fp16.npz", references)
    steps = check(_listed(kit), FakeMachine())
    assert {name for name, step in steps.items() if not step.ok} == {"logits fp16 on cpu", on_card("logits")}
    figures = steps[on_card("logits")].figures
    assert figures["largest_difference"] is None if np.isnan(wrong) else figures["largest_difference"] > 0
    json.dumps(report_of(kit, read_kit(kit), list(steps.values())), allow_nan=False)


def test_changed_files_are_named(kit: Path) -> None:
    with (kit / "fp16" / "engines" / "tensorrt-rtx-sm89" / "engine.json").open("a", encoding="utf-8") as file:
        file.write(" ")
    step = check(kit, FakeMachine(gpu=False))["kit"]
    assert step.ok is False and "engine.json" in step.says


def test_a_report_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    kit = Kit(1, "0.1.0", "pair", {"fp16": ("8.9",)}, "library 1", {"secret": "hash"})
    home = Path.home()
    says = f"{tmp_path / 'kit' / 'fp16'} failed, and so did {home / 'x'} and {os.path.relpath(tmp_path / 'kit')}"
    text = json.dumps(report_of(tmp_path / "kit", kit, [Step("card", None, says, figures={"at": [str(home)]})]))
    assert str(tmp_path) not in text and str(home) not in text and "secret" not in text
    assert "KIT" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (None, "give the unpacked kit"),
        ({"version": 2}, "its version is not 1"),
        ({"extra": 1}, "unknown key 'extra'; make the kit again"),
        ({"precisions": {"../other": []}}, "is outside of the kit"),
    ],
)
def test_folders_that_are_no_kit(
    change: dict[str, Any] | None, says: str, golden_kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if change is not None:
        data = json.loads((golden_kit / KIT).read_text(encoding="utf-8")) | change
        (tmp_path / KIT).write_text(json.dumps(data), encoding="utf-8")
    assert doctor.main(["--card", str(tmp_path), "--output", str(tmp_path / "card.json")]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not (tmp_path / "card.json").exists()


def test_logits_that_cannot_be_read(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04 broken"):
        (tmp_path / "fp16.npz").write_bytes(content)
        with pytest.raises(RequestError, match="cannot be read as reference logits"):
            read_references(tmp_path / "fp16.npz")


def test_the_archive_holds_the_kit(golden_kit: Path, tmp_path: Path) -> None:
    card_kit.pack(golden_kit, tmp_path / "kit.tar.xz")
    with tarfile.open(tmp_path / "kit.tar.xz") as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert check(tmp_path / "out" / "kit", FakeMachine(gpu=False))["kit"].ok


def test_a_kit_is_made_in_an_empty_folder(golden_kit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert card_kit.main(["-o", str(golden_kit)]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_kit(tmp_path: Path) -> None:
    """Every precision of the shipped pair; packed, it can be attached or downloaded."""
    kit, archive = tmp_path / "kit", tmp_path / "kit.tar.xz"
    assert card_kit.main(["-o", str(kit), "--archive", str(archive)]) == 0
    assert archive.stat().st_size < card_kit.SMALL
    steps = check(kit, FakeMachine(gpu=False))
    assert all(step.ok for name, step in steps.items() if name != "card") and len(steps) == 2 + 2 * len(
        card_kit.PRECISIONS
    )


def test_it_needs_no_more_than_decoding_does() -> None:
    """So that a wheel with a backend is enough to check a card."""
    code = "import sys, eagle_tools.card.command; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "eagle_runtime" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnx_ir", "rich", "matplotlib", "eagle_export"}
