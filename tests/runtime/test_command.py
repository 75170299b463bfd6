"""Commands: whatever goes wrong is one line on stderr and status 2, on any terminal; a second interrupt ends them."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from onnx import TensorProto, helper, save
from tokenizers import Tokenizer, models

from eagle_runtime.base.errors import EagleError, EagleWarning
from eagle_runtime.commands import cli
from eagle_runtime.commands.command import LONGEST, SHELLS, Parser, one_line, run_command, size
from eagle_runtime.commands.interrupts import SAME_S, Interrupted, handled_interrupts
from patience import PATIENCE_S
from systems import posix_only

CLEANUP_S = 1.0  # in processes that tests start
BLOCKS = """
import argparse, hashlib, sys, tempfile, time
from pathlib import Path
from eagle_runtime.commands import interrupts
from eagle_runtime.commands.command import Parser, run_command

interrupts.CLEANUP_S = {cleanup_s}

def run(args):
    folder = Path(sys.argv[1])
    {prepare}
    try:
        (folder / "working").touch()
        {work}
    finally:
        {clearing}
        (folder / "cleared").touch()

sys.exit(run_command(Parser(prog="blocks"), [], run, extra="cpu", interrupted="interrupted"))
"""
# Native code that lets other threads of Python run, and that no signal breaks off, as a pass of an engine.
NATIVE = "hashlib.pbkdf2_hmac('sha512', b'x', b'y', 10**9)"


def ran(run: Callable[[], object]) -> int:
    def wrapped(args: argparse.Namespace) -> None:
        run()

    return run_command(Parser(prog="eagle-x"), [], wrapped, extra="cpu", interrupted="interrupted")


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def run() -> NoReturn:
        raise error

    return run


def a_panic() -> None:
    """As the tokenizers library raises where it gave up."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    tokenizer.enable_truncation(4, stride=3)
    data = json.loads(tokenizer.to_str())
    data["truncation"]["stride"] = 9
    Tokenizer.from_str(json.dumps(data)).encode(["a"] * 20, is_pretokenized=True)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (raising(EagleError("x")), "eagle-x: x\n"),
        (raising(MemoryError()), "eagle-x: the memory is full; "),
        (raising(OSError(36, "File name too long", "y")), "eagle-x: y: File name too long; "),
        (raising(ModuleNotFoundError("x", name="torch")), "eagle-x: needs 'torch'; "),
        (a_panic, "eagle-x: a library gave up ("),
    ],
)
def test_one_line_and_status_2(run: Callable[[], object], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(run) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(says) and err.count("\n") == 1


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        ran(lambda: 1 // 0)


def test_memory_that_is_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert ran(lambda: bytearray(2**62)) == 2
    assert "the memory is full" in capsys.readouterr().err


def test_control_characters_and_megabytes_are_not_echoed(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07\x1b[31m\r\n\u202e\ud800\x9b" + "y" * 10**7
    assert ran(raising(EagleError(f"{evil}; do this"))) == 2
    err = capsys.readouterr().err
    assert err.startswith(r"eagle-x: \x1b]0;title\x07\x1b[31m\r\n\u202e\ud800\x9byyy") and err.endswith("; do this\n")
    assert len(err) < LONGEST + 200 and err.rstrip("\n").isprintable()
    assert one_line("naïve “text” ☃") == "naïve “text” ☃"


@pytest.mark.parametrize(
    "argv",
    [
        ["\x1b[31m" + "x" * 10**6, "--prompt", "x"],
        ["bundle", "--prompt-ids", "9" * 5000],
        ["bundle", "--prompt-ids", "1," + "\x1b" * 10**5],
        ["bundle", "--logit-bias", f"{'9' * 5000}=1", "--prompt", "x"],
        ["bundle", "--prompt", "x", "--method", "\x1b[2J" * 10**5],
        ["bundle", "--prompt", "x", "--depth", "\r" * 10**5],
        ["bundle", "--prompt-file", "x" * 10**4],
    ],
    ids=lambda argv: f"{argv[1]}-{len(''.join(argv))}",
)
def test_arguments_are_not_echoed_raw(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(argv)
    except SystemExit as end:  # as argparse leaves
        status = int(str(end.code))
    out, err = capsys.readouterr()
    assert status == 2 and out == ""
    assert err.count("\n") == 1 and err.rstrip("\n").isprintable() and len(err) < LONGEST + 200


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        warnings.warn("the head\x1b is broken", EagleWarning, stacklevel=1)

    assert ran(run) == 0
    assert capsys.readouterr() == ("", "eagle-x: warning: the head\\x1b is broken\n")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_a_terminal_of_another_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding=encoding))
    assert ran(lambda: print("é € 😀 \ud800")) == 0
    sys.stdout.flush()
    assert terminal.getvalue().decode(encoding).endswith("\\U0001f600 \\ud800" + os.linesep)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


@pytest.mark.parametrize(("chosen", "printed"), [("", "€😀".encode()), ("cp1252", b"\x80\\U0001f600")])
def test_files_and_pipes_get_utf8_unless_something_else_is_chosen(chosen: str, printed: bytes) -> None:
    """Python itself would write Windows' code page."""
    code = (
        "from eagle_runtime.commands.command import Parser, run_command\n"
        "run_command(Parser(prog='x'), [], lambda args: print('€😀'), extra='cpu', interrupted='')"
    )
    env = {name: value for name, value in environment().items() if not name.startswith(("PYTHONIO", "PYTHONUTF8"))}
    env |= {"PYTHONIOENCODING": chosen} if chosen else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, timeout=PATIENCE_S)
    assert done.stdout.rstrip() == printed, done.stderr


@posix_only
@pytest.mark.parametrize("more", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "cp1252"}, {"LC_ALL": "C"}])
def test_eagle_run_on_such_a_terminal(more: dict[str, str], text_bundle: Path, tmp_path: Path) -> None:
    """With a text of many characters, by a bias; and with a prompt whose bytes are no UTF-8."""
    argv = [
        sys.executable,
        "-m",
        "eagle_runtime.commands.cli",
        str(text_bundle),
        "--threads",
        "1",
        "--max-new-tokens",
        "6",
    ]
    wide = Tokenizer.from_file(str(text_bundle / "tokenizer.json")).token_to_id("€😀")
    bias = ["--logit-bias", f"{wide}=100", "--ignore-eos"]
    done = subprocess.run(
        [*argv, "--prompt", "x", *bias], capture_output=True, env=environment(**more), timeout=PATIENCE_S
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    shown = "€😀".encode(more.get("PYTHONIOENCODING", "utf-8"), "backslashreplace")
    assert done.stdout.rstrip() == 6 * shown
    done = subprocess.run(
        [*argv, "--prompt", os.fsdecode(b"x\xff\xfe")],
        capture_output=True,
        env=environment(**more),
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"half a character" in done.stderr


def test_a_user_without_a_home(text_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs were found is then kept nowhere."""
    for name in ("HOME", "EAGLE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that the system does not know
    argv = [str(text_bundle), "--prompt", "x", "--threads", "1", "--max-new-tokens", "3"]
    assert cli.main(argv) == 0


def unignored() -> None:
    """Signals that whoever runs the tests may ignore: a shell's background jobs SIGINT, nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def start(folder: Path, work: str, clearing: str = "pass", prepare: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """A command that has begun its work; gone when the block ends."""
    program = BLOCKS.format(work=work, clearing=clearing, prepare=prepare, cleanup_s=CLEANUP_S)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=unignored if os.name == "posix" else None,
    )
    deadline = time.monotonic() + PATIENCE_S
    while not (folder / "working").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    try:
        time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def endless_graph(path: Path) -> None:
    """A graph of one loop, whose single pass takes weeks."""
    one = [1]
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, one),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, one),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "first"], ["last"], body=body)],
        "endless",
        [
            helper.make_tensor_value_info("turns", TensorProto.INT64, []),
            helper.make_tensor_value_info("first", TensorProto.FLOAT, one),
        ],
        [helper.make_tensor_value_info("last", TensorProto.FLOAT, one)],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


def test_a_closed_terminal_unwinds_the_work(tmp_path: Path) -> None:
    """Windows signals it as Ctrl-Break, from a thread of the process; a console, which may send it, is not needed."""
    number: int = getattr(signal, "SIGBREAK", None) or signal.SIGHUP
    work = f"import signal, threading; threading.Timer(0.5, signal.raise_signal, [{number}]).start()"
    with start(tmp_path, f"{work}; [time.sleep(0.01) for _ in iter(int, 1)]") as process:
        assert process.wait(PATIENCE_S) == 128 + number
        assert process.communicate() == ("", "blocks: interrupted\n") and (tmp_path / "cleared").exists()


@posix_only
@pytest.mark.parametrize("blocked_in", ["native code", "a pass of ONNX Runtime"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_interrupt_ends_an_endless_pass(number: int, status: int, blocked_in: str, tmp_path: Path) -> None:
    work, prepare = NATIVE, "pass"
    if blocked_in != "native code":
        endless_graph(tmp_path / "endless.onnx")
        prepare = (
            "import numpy as np, onnxruntime; session = onnxruntime.InferenceSession(folder / 'endless.onnx'); "
            "feeds = {'turns': np.array(10**12), 'first': np.ones(1, np.float32)}"
        )
        work = "session.run(None, feeds)"
    with start(tmp_path, work, prepare=prepare) as process:
        process.send_signal(number)
        time.sleep(CLEANUP_S + 0.5)
        assert process.poll() is None, "the first waits for the pass"
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == status
        assert process.communicate() == ("", "")


@posix_only
def test_an_impatient_second_interrupt_ends_it_too(tmp_path: Path) -> None:
    """Only later: unwinding has its time."""
    with start(tmp_path, NATIVE) as process:
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(SAME_S + 0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130 and time.monotonic() - begun > CLEANUP_S - 0.1


@posix_only
def test_two_signals_at_once_count_as_one(tmp_path: Path) -> None:
    """A terminal signals all of a group, and a program that started the command may pass it on."""
    with start(tmp_path, "time.sleep(600)", clearing=f"time.sleep({CLEANUP_S + 1})") as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (130, 143)
        assert process.communicate() == ("", "blocks: interrupted\n") and (tmp_path / "cleared").exists()


@posix_only
def test_interrupts_do_not_break_off_the_clearing_away(tmp_path: Path) -> None:
    with start(tmp_path, "time.sleep(600)", clearing="time.sleep(0.5)") as process:
        while process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
            time.sleep(0.003)
        assert process.returncode == 130
        assert process.communicate() == ("", "blocks: interrupted\n") and (tmp_path / "cleared").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_command_leaves_the_process_as_it_was() -> None:
    """No thread, no descriptor, no handler, however often."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert ran(lambda: None) == 0
    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    for _ in range(20):
        assert ran(lambda: None) == 0
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert signal.set_wakeup_fd(-1) == -1


@posix_only
def test_a_child_that_is_ended_does_not_count(tmp_path: Path) -> None:
    """A forked process has the parent's handlers; what is sent to it is its own."""
    child = "import os; [(pid := os.fork()) or time.sleep(600), time.sleep(1), os.kill(pid, 15), os.waitpid(pid, 0)]"
    work = f"{child}; time.sleep(600)"
    with start(tmp_path, work, clearing=f"time.sleep({CLEANUP_S + 1})") as process:
        time.sleep(SAME_S + CLEANUP_S + 2)  # the child has gone by now
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        assert process.communicate()[1].endswith("blocks: interrupted\n") and (tmp_path / "cleared").exists()


def test_an_error_that_replaces_a_stop_counts_as_the_stop() -> None:
    """NumPy's tofile raises a TypeError if a signal arrives while it looks whether it was given a path."""

    def replace() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            raise TypeError("expected str, bytes or os.PathLike object, not BufferedWriter") from None

    with pytest.raises(Interrupted) as stop, handled_interrupts():
        replace()
    assert stop.value.args == (signal.SIGTERM,)
    with pytest.raises(TypeError), handled_interrupts():
        raise TypeError


@posix_only
def test_a_stop_that_came_to_nothing_is_raised_again() -> None:
    """A finaliser, and what C calls back, swallow what is raised in them."""

    def swallow(until: float) -> None:
        with contextlib.suppress(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        while time.monotonic() < until:
            time.sleep(0.01)

    with pytest.raises(Interrupted) as stop, handled_interrupts():
        swallow(time.monotonic() + 20)
    assert stop.value.args == (signal.SIGTERM,)


def test_sizes_mean_the_same_in_all_commands() -> None:
    texts = ("5GB", "700 MB", "1.5g", "12", "2GiB", "1T")
    assert [size(text) for text in texts] == [5 * 10**9, 7 * 10**8, 15 * 10**8, 12, 2 << 30, 10**12]
    for text in ("5PB", "0", "-1", "GB", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="is not a size like 2GB"):
            size(text)


def test_every_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        Parser(prog="eagle-x").parse_args(["--version"])
    assert ended.value.code == 0 and re.fullmatch(r"eagle-x \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_a_script_for_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--print-completion", shell])
    assert ended.value.code == 0 and "max-new-tokens" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a shell's pipe")
def test_a_reader_that_ends_early_ends_a_completion_silently() -> None:
    command = f"'{sys.executable}' -m eagle_runtime.commands.cli --print-completion bash | head -c 10"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)
    assert run.stdout == "# AUTOMATI" and run.stderr == ""


def test_quiet_leaves_errors_alone_and_verbose_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: argparse.Namespace) -> None:
        print("progress", file=sys.stderr)
        warnings.warn(EagleWarning("odd"), stacklevel=2)
        logging.getLogger("eagle_runtime.somewhere").info("a note")
        raise EagleError("wrong")

    def shown(*options: str) -> str:
        assert run_command(Parser(prog="eagle-x"), options, run, extra="cpu", interrupted="interrupted") == 2
        return capsys.readouterr().err

    assert shown() == "progress\neagle-x: warning: odd\neagle-x: wrong\n"
    assert shown("-q") == "eagle-x: wrong\n"
    assert "INFO eagle_runtime.somewhere: a note\n" in (said := shown("-v"))
    assert 'raise EagleError("wrong")' in said and said.endswith("eagle-x: wrong\n")
    assert "a note" not in shown()


def test_options_of_a_command_hold_for_its_subcommands() -> None:
    parser = Parser(prog="eagle-x")
    parser.add_subparsers(required=True).add_parser("sub")
    assert parser.parse_args(["-q", "sub"]).quiet and parser.parse_args(["sub", "-q"]).quiet
    assert not hasattr(parser.parse_args(["sub"]), "quiet")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "there is nothing to answer; give --prompt, --prompt-ids, --prompt-file, --message or --messages"),
        (("--system", "s", "--prompt", "p"), "--system stands before a --message"),
        (("--worker", "--prompt", "p"), "--worker takes its orders from standard input; leave out --prompt"),
        (("--worker", "--top-k", "3"), "leave out --top-k"),
        (("--prompt", "p", "--memory-limit", "1GB"), "--memory-limit is for --worker"),
        (("--messages", "none.json"), "file of messages none.json cannot be read"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: tuple[str, ...], says: str, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([str(bundle_of("eagle1")), *arguments]) == 2
    assert says in capsys.readouterr().err
