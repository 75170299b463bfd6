"""Where the native operators cannot be used the portable graph runs, and one line says why and what to do."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import needs_operators
from eagle_runtime.bundle.graph import OPERATORS
from eagle_runtime.machine.kernels import is_damaged
from eagle_runtime.ort.operators import native_operators
from systems import posix_only

THREE = ("--prompt-ids", "5,6,7", "--max-new-tokens", "3", "--json")  # tokens, and nothing but messages on stderr
SLOWER = "the portable graph runs, which takes twice as long as the native one or more: "
INSTALLS = r"'pip install ./kernels' in a clone installs it \(docs/install\.md\)"
OTHER = INSTALLS.replace("it", "the one of this version", 1)


def package(folder: Path, version: str = OPERATORS, change: Callable[[bytes], bytes] = bytes) -> Path:
    """Writes eagle_edge_kernels with the installed library, changed, and no record of it; returns the library."""
    installed = native_operators().library
    assert installed is not None
    made = folder / "eagle_edge_kernels" / installed.name
    made.parent.mkdir()
    made.write_bytes(change(installed.read_bytes()))
    lines = f"VERSION = {version!r}\ndef library(): return {str(made)!r}\n"
    (made.parent / "__init__.py").write_text(lines, encoding="utf-8")
    return made


def record(library: Path) -> None:
    """Writes what an installer records of a library."""
    content = library.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    folder = library.parents[1] / "eagle_edge_kernels-0.1.0.dist-info"
    folder.mkdir()
    (folder / "RECORD").write_text(f"{library.parent.name}/{library.name},sha256={digest},{len(content)}\n")


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    """A change of a library's bytes, which keeps its size."""

    def change(content: bytes) -> bytes:
        assert old in content and len(old) == len(new)
        return content.replace(old, new)

    return change


def command(module: str, folder: Path, *argv: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command whose first packages are those of a folder."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    argv = (sys.executable, "-m", f"eagle_runtime.commands.{module}", *argv)
    return subprocess.run(argv, input=given, capture_output=True, encoding="utf-8", env=environment, check=False)


def reason_of(bundle: Path, folder: Path) -> str:
    """What eagle-run says of why it runs the portable graph, on its only line of stderr."""
    done = command("cli", folder, str(bundle), *THREE)
    assert done.returncode == 0 and len(json.loads(done.stdout)["token_ids"]) == 3
    assert done.stderr.startswith(f"eagle-run: {SLOWER}") and done.stderr.count("\n") == 1
    return done.stderr.removeprefix(f"eagle-run: {SLOWER}").removesuffix("\n")


@pytest.fixture
def bundle(bundle_of: Callable[..., Path]) -> Path:
    return bundle_of("alone", "int8")


@pytest.fixture
def without(tmp_path: Path) -> Path:
    """A folder with which no operators are installed: an empty folder, as an uninstallation may leave it."""
    (tmp_path / "missing" / "eagle_edge_kernels").mkdir(parents=True)
    (tmp_path / "missing" / "eagle_edge_kernels" / "__init__.py").touch()
    return tmp_path / "missing"


def test_a_package_that_is_missing(bundle: Path, without: Path) -> None:
    assert re.fullmatch(f"eagle-edge-kernels is not installed; {INSTALLS}", reason_of(bundle, without))


@needs_operators
def test_a_library_of_another_version(bundle: Path, tmp_path: Path) -> None:
    package(tmp_path, version="0")
    said = f"eagle-edge-kernels has operators of version 0, and this runtime needs {OPERATORS}; {OTHER}"
    assert re.fullmatch(said, reason_of(bundle, tmp_path))


@needs_operators
@posix_only
@pytest.mark.parametrize("name", [b"eagle_instruction_set", b"RegisterCustomOps"])
def test_a_library_without_a_symbol(name: bytes, bundle: Path, tmp_path: Path) -> None:
    package(tmp_path, change=replaced(name + b"\0", name[:-2] + b"zz\0"))
    said = r"eagle-edge-kernels (cannot be loaded|does not run here) \(.*" + name.decode()
    assert re.fullmatch(rf"{said}.*\); {OTHER}", reason_of(bundle, tmp_path))


@needs_operators
@pytest.mark.parametrize("change", [lambda content: content[:5000], replaced(b"ONNX Runtime's", b"ANNX Runtime's")])
def test_a_damaged_library_is_not_loaded(change: Callable[[bytes], bytes], bundle: Path, tmp_path: Path) -> None:
    """The end of a file that was cut is not in memory: who reads it is ended by a signal."""
    library = package(tmp_path)
    record(library)
    assert not is_damaged(library)
    library.write_bytes(change(library.read_bytes()))
    said = f"{re.escape(str(library))} is not the file that was installed; {INSTALLS}"
    assert re.fullmatch(said, reason_of(bundle, tmp_path))


@needs_operators
def test_a_library_that_is_gone(tmp_path: Path) -> None:
    library = package(tmp_path)
    record(library)
    library.unlink()
    assert is_damaged(library)


@needs_operators
def test_without_a_record_a_library_is_loaded(bundle: Path, tmp_path: Path) -> None:
    package(tmp_path)
    done = command("cli", tmp_path, str(bundle), *THREE)
    assert (done.returncode, done.stderr) == (0, "")


@needs_operators
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="constants stand elsewhere in the code")
def test_a_library_that_computes_other_numbers(bundle: Path, tmp_path: Path) -> None:
    right, wrong = (struct.pack("<f", number) for number in (-0.693359375, -0.75))  # of every exponential, -ln 2
    package(tmp_path, change=replaced(right, wrong))
    said = f"eagle-edge-kernels computes other numbers than it should here; {OTHER}"
    assert re.fullmatch(said, reason_of(bundle, tmp_path))


def test_who_chooses_the_portable_graph_is_told_nothing(bundle: Path, without: Path) -> None:
    for more in (("--backend", "cpu"), ("--quiet",)):
        done = command("cli", without, str(bundle), *THREE, *more)
        assert (done.returncode, done.stderr) == (0, "")


def test_chat_and_worker_say_it_too(chatting: Path, without: Path) -> None:
    done = command("chat", without, str(chatting), "--max-new-tokens", "2", given="Hello\n")
    assert done.returncode == 0 and done.stderr.count(SLOWER) == 1
    assert done.stderr.startswith(f"eagle-chat: {SLOWER}eagle-edge-kernels is not installed; ")
    done = command("cli", without, str(chatting), "--worker", given='{"id": "1", "op": "hello"}\n')
    assert done.returncode == 0 and done.stderr.startswith(f"eagle-run: {SLOWER}")
    assert f'"notice":"{SLOWER}eagle-edge-kernels is not installed; ' in done.stdout


@posix_only
def test_the_server_says_it_too(bundle: Path, without: Path) -> None:
    argv = (sys.executable, "-m", "eagle_serve.cli", str(bundle), "--port", "0")
    environment = {**os.environ, "PYTHONPATH": str(without)}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, encoding="utf-8", env=environment) as server:
        assert server.stderr is not None
        said: list[str] = []
        while not said or " is served at " not in said[-1]:
            said.append(server.stderr.readline())
            assert said[-1], said
        server.terminate()
        said += server.stderr
    assert "".join(said).count(SLOWER) == 1
