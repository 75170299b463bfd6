"""tools/gpu_check: what it does where there is no card, which steps it takes where there is one, and its report."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import gpu_check
from eagle_calib.cli import _parser as calib_parser
from eagle_export.commands.cli import _parser as export_parser
from eagle_export.commands.cli import with_command
from eagle_export.recipes.plan import RECIPES
from eagle_runtime.commands.command import Parser
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_tools.bench.cli import _parser as bench_parser
from eagle_tools.doctor import _parser as doctor_parser

SCRIPT = gpu_check.ROOT / "tools" / "gpu_check.sh"
RTX = DeviceInfo("NVIDIA GeForce Fake", "8.9", "13.0", 8_000_000_000, None, None)
HOPPER = dataclasses.replace(RTX, name="NVIDIA H200", compute_capability="9.0")
ALL = ("cpu", "cuda", "tensorrt-rtx", "tensorrt")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a script for Linux")


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def script(*arguments: object, **env: str) -> tuple[int, str]:
    """Exit status and stderr; stdout stays empty."""
    done = subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHON": sys.executable, **env},
        check=False,
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


def test_the_script_is_sound() -> None:
    assert os.access(SCRIPT, os.X_OK)
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.skipif(has_driver(), reason="this machine has a driver")
def test_without_a_card_it_says_so_in_a_line(tmp_path: Path) -> None:
    status, err = script(tmp_path, tmp_path / "out")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("gpu_check: this machine has no GPU to check: no NVIDIA driver is installed")
    assert not list(tmp_path.iterdir())
    done = subprocess.run(
        [sys.executable, SCRIPT.with_suffix(".py"), tmp_path],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert (
        done.returncode == 2 and done.stderr == "gpu_check: no NVIDIA driver is installed (libcuda.so.1 is missing)\n"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_wrong_arguments_take_a_line(arguments: list[str]) -> None:
    assert script(*arguments) == (2, "gpu_check: usage: tools/gpu_check.sh WHEELS [OUT]\n")


def test_a_python_that_is_not_there() -> None:
    status, err = script("wheels", PYTHON="no-such-python")
    assert (
        status == 2
        and err.startswith("gpu_check: no-such-python is not installed; set PYTHON")
        and err.count("\n") == 1
    )


def steps(gpu: DeviceInfo, works: tuple[str, ...], pairs: tuple[str, ...] = ("demo", "grown")) -> list[gpu_check.Step]:
    return list(gpu_check.plan(Path("/out"), gpu, works, pairs, 4))


def test_every_step_is_a_command_that_there_is() -> None:
    """Parsed by the commands' own parsers."""
    parsers: dict[str, Callable[[], Parser]] = {
        "eagle_tools.doctor": doctor_parser,
        "eagle_export.commands.cli": export_parser,
        "eagle_calib.cli": calib_parser,
        "eagle_tools.bench": bench_parser,
    }
    seen = set()
    for step in steps(RTX, ALL):
        if step.argv[0] != "-m":
            assert Path(step.argv[0]).is_file()
            continue
        module, arguments = step.argv[1], list(step.argv[2:])
        if module == "pytest":
            assert Path(arguments[-1]).is_dir()
            continue
        parser = parsers[module]
        if parser is export_parser:
            arguments = with_command(arguments)
        parser().parse_args(arguments)
        seen.add(module)
    assert seen == set(parsers)


def test_each_step_needs_what_one_before_it_makes() -> None:
    for gpu, works in ((RTX, ALL), (HOPPER, ALL), (RTX, ("cpu",))):
        made: set[Path] = set()
        names = []
        for step in steps(gpu, works):
            assert set(step.needs) <= made
            made |= {step.makes} - {None} if step.makes is not None else set()
            names.append(step.name)
        assert len(set(names)) == len(names)


def test_which_engines_are_checked() -> None:
    def engines(gpu: DeviceInfo, works: tuple[str, ...]) -> set[str]:
        return {step.argv[step.argv.index("--backend") + 1] for step in steps(gpu, works) if step.name[:5] == "bench"}

    assert engines(RTX, ALL) == {"cuda", "tensorrt-rtx", "tensorrt"}
    assert engines(HOPPER, ALL) == {"cuda", "tensorrt"}  # TensorRT for RTX knows no 9.0
    assert engines(RTX, ("cpu",)) == {"cuda"}  # which then fails, and is seen to
    compared = [step for step in steps(HOPPER, ("cuda",)) if "--vs-pytorch" in step.argv]
    assert [step.name for step in compared] == ["bench-demo-eagle3-cuda", "bench-grown-eagle3-cuda"]


@pytest.mark.parametrize("library", ["tensorrt-rtx", "tensorrt"])
def test_every_precision_of_the_tensorrt_libraries_is_exported_built_checked_and_timed(library: str) -> None:
    """As their recipes have it; those that take recorded inputs get the calibration."""
    listed = steps(RTX, ALL, ("demo",))
    recipes = RECIPES[library]
    precisions = gpu_check.tensorrt_precisions(RTX)
    assert {"fp16", *precisions} == set(recipes) - {"int4-int8"}
    older = dataclasses.replace(RTX, compute_capability="8.6")
    assert {*gpu_check.tensorrt_precisions(older), "fp8"} == set(precisions) > set(gpu_check.tensorrt_precisions(older))
    for precision in precisions:
        bundle = f"/out/demo-eagle3-{precision}-{library}"
        named = {step.name: step.argv for step in listed if bundle in step.argv}
        name = Path(bundle).name
        bench = f"bench-demo-eagle3-{library}"
        assert list(named) == [f"export-{name}", f"engines-{name}-{library}", f"doctor-{name}-{library}", bench]
        export = named[f"export-{name}"]
        assert export[export.index("-p") + 1] == precision
        recorded = recipes[precision].calibrated or recipes[precision].self_calibrated
        assert ("--calibration" in export) == recorded


def test_failed_steps_are_noted_and_those_that_need_them_left_out(tmp_path: Path) -> None:
    missing = tmp_path / "never"
    plan = [
        gpu_check.Step("good", ("-c", "print('hello')")),
        gpu_check.Step("bad", ("-c", "raise SystemExit(3)"), makes=missing),
        gpu_check.Step("empty", ("-c", "pass"), makes=missing),
        gpu_check.Step("later", ("-c", "print('never')"), needs=(missing,)),
        gpu_check.Step("doctor-x", ("-c", 'print(\'{"checks": [{"name": "tau", "ok": false, "says": "low"}]}\')')),
        gpu_check.Step("bench-x", ("-c", "open('bench-x.md', 'w').write('| a table |')")),
    ]
    outcomes = list(gpu_check.run(plan, tmp_path))
    assert [outcome.status for outcome in outcomes] == [0, 3, 1, None, 0, 0]
    assert (tmp_path / "good.log").read_text(encoding="utf-8") == "hello\n" and not (tmp_path / "later.log").exists()
    gpu_check.write_report(tmp_path, RTX, outcomes, done=True)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert report["ok"] is False and report["gpu"]["name"] == RTX.name
    assert [step["status"] for step in report["steps"]] == [0, 3, 1, None, 0, 0]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# eagle-edge on NVIDIA GeForce Fake\n\nNVIDIA GeForce Fake, compute 8.9, 8.0 GB, ")
    for line in ("3 of 6 steps differ, fail or were left out.", "- tau: DIFFERS; low", "| a table |"):
        assert line in text
    assert "| bad | FAILED (3) |" in text and "| later | left out |" in text
    gpu_check.write_report(tmp_path, RTX, outcomes[:1], done=True)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["ok"] is True
    assert "\nall well.\n" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_report_of_some_steps_is_not_well_yet(tmp_path: Path) -> None:
    gpu_check.write_report(tmp_path, RTX, [gpu_check.Outcome("machine", 0, 1.0)], done=False)
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["ok"] is False
    assert "all well so far." in (tmp_path / "report.md").read_text(encoding="utf-8")
