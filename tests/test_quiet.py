"""What the commands leave on the disk, and whom they call: nobody, and nothing but what was asked for.

Each runs with a home, a temporary folder and a working folder that are empty before, in a process in which the kernel
refuses sockets of the internet: with the process's death, so that native code cannot try unseen.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from conftest import GOLDEN
from export_workplace import make_target

LINUX = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")

# Python looks for this module when it starts; so do the processes that a command starts.
SITECUSTOMIZE = '''
import ctypes, os, platform, struct, sys

NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request")
WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT
HERE = os.path.realpath(os.environ["QUIET_ROOT"])

def watch(event, arguments):
    if event in NETWORK:
        print("called out:", event, arguments, file=sys.stderr)
        os._exit(99)
    if event == "import" and arguments[0] == "onnxruntime" and "ORT_DISABLE_TELEMETRY" not in os.environ:
        print("onnxruntime imported with its telemetry on", file=sys.stderr)
        os._exit(98)
    if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int) and arguments[2] & WRITE:
        path = os.path.realpath(arguments[0])
        if not path.startswith((HERE, "/dev/", "/proc/")):
            print("wrote outside:", path, file=sys.stderr)
            os._exit(97)

def forbid_sockets():
    """seccomp: socket(AF_INET or AF_INET6, ...) kills the process, and all that it starts."""
    number, machine = {"x86_64": (41, 0xC000003E), "aarch64": (198, 0xC00000B7)}[platform.machine()]
    load, equal, give = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    program = [
        (load, 0, 0, 4), (equal, 0, 6, machine),
        (load, 0, 0, 0), (equal, 0, 4, number),
        (load, 0, 0, 16), (equal, 1, 0, 2), (equal, 0, 1, 10),
        (give, 0, 0, 0x80000000),  # SECCOMP_RET_KILL_PROCESS
        (give, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filters, 0, 0):  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP
        raise OSError(ctypes.get_errno(), "no seccomp")

sys.addaudithook(watch)
if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
    forbid_sockets()
'''


class Place:
    """An empty home, and what there is to run a command in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("home", "tmp", "work", "site"):
            (root / name).mkdir()
        (root / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
        kept = ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
        self.env = {name: os.environ[name] for name in kept if name in os.environ}
        paths = [str(root / "site"), *(path for path in sys.path if path)]
        self.env |= {
            "HOME": str(root / "home"),
            "TMPDIR": str(root / "tmp"),
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",  # a second thread would wait for the other worker's core by spinning
            "QUIET_ROOT": str(root),
        }

    def run(self, *argv: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """A command in the working folder."""
        command = [sys.executable, "-m", *map(str, argv)]
        return subprocess.run(
            command,
            cwd=self.root / "work",
            env={**self.env, **(env or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def files(self) -> Sequence[str]:
        """All that lies anywhere, but in the folders of the outputs that were asked for."""
        names = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if not path.is_dir())
        return sorted(name for name in names if not name.startswith(("work/bundle/", "work/calib/", "site/")))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_commands_write_what_was_asked_for_and_call_nobody(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target, head = make_target(tmp_path_factory.mktemp("pair") / "target"), GOLDEN / "head_eagle1"
    steps: list[tuple[object, ...]] = [
        ("eagle_export.commands.cli", target, head, "-o", "bundle"),
        ("eagle_calib.cli", "bundle", "-o", "calib", "--data", "ids.jsonl", "--tokens", 40),
        ("eagle_runtime.commands.cli", "bundle", "--prompt-ids", "5,6,7", "--max-new-tokens", 8, "--method", "eagle"),
        ("eagle_tools.doctor", "bundle", "--backend", "cpu"),
        ("eagle_tools.doctor",),
    ]
    (place.root / "work" / "ids.jsonl").write_text('{"ids": [5, 6, 7, 8, 9, 10, 11, 12]}\n')
    for step in steps:
        done = place.run(*step)
        assert done.returncode == 0, (step, done.returncode, done.stderr)
        left = [name for name in place.files() if not name.startswith("home/.cache/eagle-edge/")]
        assert left == ["work/ids.jsonl"], step


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 9))", 99),
        ("import onnxruntime", 98),
        ("open('/var/tmp/quiet', 'w')", 97),
        *([("import _socket; _socket.socket()", -signal.SIGSYS)] if LINUX else []),
    ],
)
def test_what_is_watched_is_seen(place: Place, code: str, status: int) -> None:
    """The watch itself works: in Python, and below it."""
    (place.root / "site" / "attempt.py").write_text(code)
    assert place.run("attempt").returncode == status
