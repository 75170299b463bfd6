"""An export that is stopped by a signal or a full disk ends without a traceback and leaves no bundle.

The command runs as a process: signals arrive while it traces and while it writes, and writes fail because the kernel
refuses them. Large weights are sparse files of zeros, which are quick to prepare and slow to export.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from eagle_export.commands.cli import main
from patience import PATIENCE_S
from systems import largest_file, posix_only

INTERRUPTED = "eagle-export: interrupted; no bundle was written, and the same command goes on with what is finished\n"
WORK, KEPT = ".bundle.eagle-work", ".bundle.eagle-work/kept"


def write_zeros(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Writes a sparse safetensors file of fp32 zeros, which takes no space on disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)


def wide_target(golden: Path, folder: Path, width: int) -> Path:
    """A target of one layer whose three MLP weights are 64 x width."""
    folder.mkdir()
    config = json.loads((golden / "target" / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": 1, "intermediate_size": width}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    write_zeros(
        folder / "model.safetensors",
        {
            "model.embed_tokens.weight": (256, 64),
            "lm_head.weight": (256, 64),
            "model.norm.weight": (64,),
            f"{layer}.input_layernorm.weight": (64,),
            f"{layer}.post_attention_layernorm.weight": (64,),
            f"{layer}.self_attn.q_proj.weight": (64, 64),
            f"{layer}.self_attn.k_proj.weight": (32, 64),
            f"{layer}.self_attn.v_proj.weight": (32, 64),
            f"{layer}.self_attn.o_proj.weight": (64, 64),
            f"{layer}.mlp.gate_proj.weight": (width, 64),
            f"{layer}.mlp.up_proj.weight": (width, 64),
            f"{layer}.mlp.down_proj.weight": (64, width),
        },
    )
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to export into."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the variable that the command sets in its process."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def start(*argv: object, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
    """eagle-export as a process that reacts to Ctrl-C, even if this process runs in the background and ignores it."""
    command = [sys.executable, "-m", "eagle_export.commands.cli", *map(str, argv)]
    env = {**os.environ, "TERM": "xterm"}  # for the progress line

    def react_to_ctrl_c() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen(command, text=True, env=env, stdout=stdout, stderr=stderr, preexec_fn=react_to_ctrl_c)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Waits until the condition holds, checking it every millisecond; fails if the process ends before."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < deadline
        time.sleep(0.001)


@posix_only
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_writing(golden: Path, tmp_path: Path, out: Path, number: int, status: int) -> None:
    target = wide_target(golden, tmp_path / "target", width=400_000)  # 307 MB, written in about a second
    with start(target, "-o", out / "bundle") as process:
        journal = out / KEPT / "target.journal"
        wait_for(lambda: journal.is_file() and journal.stat().st_size, process)
        process.send_signal(signal.SIGSTOP)
        halfway = [path.name for path in out.iterdir()]
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        while process.poll() is None:  # as a user who presses Ctrl-C repeatedly
            process.send_signal(number)
            time.sleep(0.003)
        printed, errors = process.communicate()
    assert halfway == [WORK], "it was not stopped in the middle of writing"
    assert (process.returncode, printed, errors) == (status, "", INTERRUPTED)
    assert {path.relative_to(out).as_posix() for path in out.rglob("*")} == {
        WORK, KEPT, *(f"{KEPT}/{name}" for name in ("made_of.txt", "target.data", "target.journal"))
    }  # fmt: skip


@posix_only
def test_ctrl_c_while_tracing(golden: Path, out: Path) -> None:
    """On a terminal, whose progress line shows that the trace has begun."""
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)
    output = b""

    def tracing() -> bool:
        nonlocal output
        with contextlib.suppress(OSError):  # no output yet, or the writer has ended
            output += os.read(ours, 1 << 16)
        return b"tracing" in output

    arguments = (golden / "target", golden / "head_eagle1", "-o", out / "bundle")
    with start(*arguments, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        wait_for(tracing, process)
        time.sleep(0.5)  # into the trace, which takes ten times as long
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    with contextlib.suppress(OSError):  # how Linux reports that the other end is closed
        while piece := os.read(ours, 1 << 16):
            output += piece
    os.close(ours)
    assert b"Traceback" not in output
    assert b"writing weights" not in output
    assert output.replace(b"\r\n", b"\n").endswith(INTERRUPTED.encode())
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("full_at", ["weights", "tokenizer"])
def test_a_disk_that_fills_up(
    golden: Path, tmp_path: Path, out: Path, full_at: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel refuses files above a size, like a full disk. The older bundle stays unchanged."""
    target = wide_target(golden, tmp_path / "target", width=160)
    size = 100_000  # bytes; the target's weights take 274 kB
    if full_at == "tokenizer":
        size = 400_000
        tokenizer = (golden / "byte_tokenizer.json").read_bytes()
        (target / "tokenizer.json").write_bytes(tokenizer + b" " * size)
    older = out / "bundle" / "eagle_config.json"
    older.parent.mkdir()
    older.write_text('{"files": {}}')
    with largest_file(size):
        status = main([str(target), str(golden / "head_eagle1"), "-o", str(out / "bundle")])
    printed, errors = capsys.readouterr()
    assert (status, printed) == (2, "")
    assert errors.startswith(f"eagle-export: {out / 'bundle'} could not be written (the disk is full); free space")
    assert {path.name for path in out.iterdir()} == {"bundle", WORK}
    assert [path.name for path in (out / WORK).iterdir()] == ["kept"]
    assert older.read_text(encoding="utf-8") == '{"files": {}}'


@posix_only  # Windows' files have no holes unless they are asked for: this one would fill the disk
def test_a_disk_that_is_too_small(golden: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error comes before any file is written, also for weights of many times the memory."""
    width = shutil.disk_usage(out).free // (3 * 64 * 4) + 1
    target = wide_target(golden, tmp_path / "target", width)
    changed = out.stat().st_mtime_ns
    status = main([str(target), str(golden / "head_eagle1"), "-o", str(out / "bundle")])
    printed, errors = capsys.readouterr()
    assert (status, printed) == (2, "")
    assert errors.startswith(f"eagle-export: {out} has ") and "MB free, but the bundle may take" in errors
    assert errors.index("\n") == len(errors) - 1
    assert out.stat().st_mtime_ns == changed
