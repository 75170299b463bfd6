"""The graphs that tools/kernels_elsewhere.sh compares on other systems are right here, and a wrong bit is seen."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import recorded_graphs
from conftest import needs_operators
from operator_graphs import library
from systems import posix_only

pytestmark = [needs_operators, posix_only]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "replay"
    compiler = shutil.which("cc")
    assert compiler is not None, "the operators were compiled here, so there is a compiler"
    subprocess.run([compiler, "-o", path, Path(__file__).with_name("replay.c"), "-ldl"], check=True)
    return path


def test_recorded_bits(program: Path, tmp_path: Path) -> None:
    import onnxruntime

    (runtime,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so*")
    count = recorded_graphs.write(tmp_path / "cases")
    command = [program, runtime, library(), tmp_path / "cases"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(f": 0 of {count} cases have other bits\n")

    content = bytearray((tmp_path / "cases").read_bytes())
    content[-1] ^= 1  # the last bit of the last output
    (tmp_path / "cases").write_bytes(content)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f": 1 of {count} cases" in done.stdout

    (tmp_path / "cases").write_bytes(content[:1000])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "replay: the cases: the file ends early\n")
