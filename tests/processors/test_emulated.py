"""Other processors than this one, by user-mode emulation (Debian's qemu-user): kernels are chosen by the processor.

    make processors        all of it: about half an hour

`make numeric-avx2` tests the same kernels at full speed, by an altered library (tools/eagle_tools/as_avx2.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import needs_operators
from eagle_tools.kernel_wheels import SYSTEMS, build

ROOT = Path(__file__).parents[2]
AVX2 = ("qemu-x86_64", "-cpu", "Haswell")  # AVX2, neither AVX-512 nor VNNI
QUANTISED = ("int8", "int8-static", "int8-weight", "int4")
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "calib", "export", "train", "tools"))
KERNELS = ("tests/export/test_recipes.py", "tests/export/test_exact_attention.py", "tests/export/test_certificate.py")

pytestmark = pytest.mark.emulated
needs_x86 = pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 is not installed")
needs_arm = pytest.mark.skipif(shutil.which("qemu-aarch64") is None, reason="qemu-aarch64 is not installed")


def emulated(command: Sequence[str], cache: Path, *packages: Path) -> str:
    """What a command prints, run by the emulator with the project's sources. cache: for what it finds out; packages:
    further folders of modules."""
    path = os.pathsep.join([SOURCES, *map(str, packages)])
    environment = {**os.environ, "PYTHONPATH": path, "EAGLE_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def arm64() -> list[str]:
    """The ARM64 Python, whose folder outlives the tests, as it takes a minute to fill: EAGLE_ARM64 names it."""
    site = os.environ.get("EAGLE_ARM64") or str(Path.home() / ".cache" / "eagle-edge-arm64")
    return [str(ROOT / "tools" / "as_arm64.sh"), site]


@pytest.fixture(scope="module")
def arm64_operators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native operators, compiled for ARM64 (`pip install "eagle-edge[wheels]"`)."""
    folder = tmp_path_factory.mktemp("operators")
    (system,) = (system for system in SYSTEMS if system.tag == "manylinux2014_aarch64")
    with zipfile.ZipFile(build(system, folder)) as wheel:
        wheel.extractall(folder / "unpacked")
    return folder / "unpacked"


def outcomes(
    python: Sequence[str], bundles: Sequence[Path], runs: int, tokens: int, cache: Path
) -> list[dict[str, Any]]:
    """Of eagle_tools.lossless over bundles."""
    command = [*python, "-m", "eagle_tools.lossless", *map(str, bundles), "--json", "--threads", "2"]
    printed = emulated([*command, "--runs", str(runs), "--tokens", str(tokens)], cache)
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@needs_x86
def test_with_avx2_alone_drafts_change_nothing(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    bundles = [bundle_of("eagle1", precision) for precision in QUANTISED]
    *int8, int4 = outcomes([*AVX2, sys.executable], bundles, 3, 6, tmp_path)
    assert len(int8) == 3 and all(outcome["differ"] == 0 for outcome in (*int8, int4))
    assert all("alone and in trees" in outcome["rows"] for outcome in int8) and "fewer are padded" in int4["rows"]


@needs_x86
def test_with_avx2_alone_int8_computes_what_it_does_here(
    bundle_of: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """The logits of a prompt. Where sums of byte products overflow they are off by whole units."""
    script = (
        "import json, sys, numpy as np\n"
        "from eagle_runtime import EagleModel\n"
        "with EagleModel.load(sys.argv[1], threads=1) as model:\n"
        "    rows = [rows.copy() for rows in model.score(json.loads(sys.argv[2]))]\n"
        "print(json.dumps(np.concatenate(rows).tolist()))\n"
    )
    arguments = ["-c", script, str(bundle_of("eagle1", "int8")), json.dumps(prompts[0])]
    there = json.loads(emulated([*AVX2, sys.executable, *arguments], tmp_path))
    here = json.loads(emulated([sys.executable, *arguments], tmp_path / "here"))
    assert (
        max(abs(a - b) for one, other in zip(there, here, strict=True) for a, b in zip(one, other, strict=True)) < 0.2
    )


@needs_x86
@pytest.mark.parametrize("file", KERNELS)
def test_recipes_attention_and_certificates_with_avx2_alone(file: str, tmp_path: Path) -> None:
    emulated([*AVX2, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", file], tmp_path)


@needs_x86
@pytest.mark.parametrize("precision", [*QUANTISED, "fp32"])
def test_32_generations_with_avx2_alone(bundle_of: Callable[..., Path], precision: str, tmp_path: Path) -> None:
    (outcome,) = outcomes([*AVX2, sys.executable], [bundle_of("eagle3", precision)], 32, 24, tmp_path)
    assert outcome["differ"] == outcome["ties"] and (precision == "fp32" or outcome["differ"] == 0)


@needs_arm
@pytest.mark.parametrize("precision", [*QUANTISED, "fp32"])
def test_32_generations_on_arm64(bundle_of: Callable[..., Path], precision: str, tmp_path: Path) -> None:
    (outcome,) = outcomes(arm64(), [bundle_of("eagle3", precision)], 32, 24, tmp_path)
    assert outcome["differ"] == outcome["ties"] and (precision == "fp32" or outcome["differ"] == 0)


@needs_arm
@needs_operators
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_native_bits_are_those_of_arm64(
    bundle_of: Callable[..., Path], precision: str, arm64_operators: Path, tmp_path: Path
) -> None:
    bundle = bundle_of("eagle3", precision)
    command = ["-m", "eagle_tools.bits", str(bundle), "--backend", "native"]
    here = emulated([sys.executable, *command], tmp_path / "here")
    assert emulated([*arm64(), *command], tmp_path / "there", arm64_operators) == here
    assert here.startswith("native, logits ")


@needs_arm
@needs_operators
def test_drafts_change_nothing_on_arm64_with_native_operators(
    bundle_of: Callable[..., Path], arm64_operators: Path, tmp_path: Path
) -> None:
    command = [*arm64(), "-m", "eagle_tools.lossless", *(str(bundle_of("eagle3", one)) for one in ("int8", "int4"))]
    command += ["--backend", "native", "--json", "--threads", "2", "--runs", "32", "--tokens", "24"]
    printed = emulated(command, tmp_path, arm64_operators)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [(one["backend"], one["runs"], one["differ"]) for one in found] == [("native", 32, 0)] * 2
