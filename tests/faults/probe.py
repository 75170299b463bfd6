"""A process that loads bundles and decodes from them, one case after another, and reports the outcome of each.

It takes JSON lines on stdin and answers on stdout. A case that crashes, never ends or takes too much memory ends this
process, not the tests; `Probe` starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from eagle_runtime import EagleError, EagleModel
from eagle_runtime.commands.cli import main as eagle_run

LIMIT_S = 600.0  # of one case, on however busy or slow a machine; a second is much
MEMORY = 2 << 30  # bytes of address space beyond what a first generation takes
MESSAGE = 4000  # characters of one sentence
CONTEXT = 160
RUNS: list[dict[str, Any]] = [
    {"max_new_tokens": 16, "ignore_eos": True, "seed": 1},
    {"max_new_tokens": 16, "ignore_eos": True, "seed": 2, "temperature": 1.0, "tree": "dynamic"},
]
PROMPT = "a tree of tokens, a tree of "

Answer = dict[str, Any]


class Probe:
    """The process, seen from the tests: a case in, its outcome out."""

    def __init__(self, whole: Path, folder: Path) -> None:
        """whole: a sound bundle, decoded first to learn what sound memory is. folder: to work in, which must stay
        empty."""
        self._whole = whole
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, bundle: Path, **case: Any) -> Answer:
        """Returns the outcome of a case: "outcome" is served (with "outputs"), refused (by an error of the project,
        "message"), broken (by any other error, "message"), crash or timeout."""
        answer = self._ask({"bundle": str(bundle), **case})
        if left := sorted(path.name for path in self._folder.iterdir()):
            return {"outcome": "broken", "message": f"leftover files: {left}"}
        return answer

    def _ask(self, case: dict[str, Any]) -> Answer:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(case) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT_S)[0]:
            self._end()
            return {"outcome": "timeout", "message": f"no answer in {LIMIT_S:.0f} s"}
        line = process.stdout.readline()
        if not line:
            status = process.wait(LIMIT_S)
            self._process = None
            return {"outcome": "crash", "message": f"exit status {status}"}
        answer: Answer = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            path = os.pathsep.join(path for path in sys.path if path)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "faults.probe", str(self._whole)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": path},
            )
            assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def main(whole: str) -> None:
    """Answer cases until stdin ends."""
    with contextlib.ExitStack() as stack:
        answers = stack.enter_context(os.fdopen(os.dup(1), "w", buffering=1))
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        os.dup2(out.fileno(), 1)  # engines write there by themselves
        os.dup2(err.fileno(), 2)
        warnings.simplefilter("error", RuntimeWarning)  # NumPy's, of numbers that are none
        for way in (api, command):
            answer = way({"bundle": whole}, out, err)
            assert answer["outcome"] == "served", answer
        pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 1 << 22
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print("ready", file=answers)
        for line in sys.stdin:
            case = json.loads(line)
            os.environ.update(case.get("env", {}))
            way = command if case.get("command") else api
            print(json.dumps(way(case, out, err)), file=answers)


def api(case: dict[str, Any], out: TextIO, err: TextIO) -> Answer:
    """Load and decode as an application does."""
    try:
        with EagleModel.load(
            case["bundle"], threads=1, context=CONTEXT, check_hashes=case.get("check_hashes", True)
        ) as model:
            outputs = [run(model, settings) for settings in RUNS]
        return {"outcome": "served", "outputs": outputs}
    except EagleError as error:
        return refused(type(error).__name__, str(error))
    except BaseException:  # a Rust library's panic is not an Exception
        return {"outcome": "broken", "message": traceback.format_exc()[-MESSAGE:]}


def run(model: EagleModel, settings: dict[str, Any]) -> tuple[tuple[int, ...], str | None]:
    """Tokens and text."""
    result = model.generate(PROMPT, **settings)
    return result.token_ids, result.text


def command(case: dict[str, Any], out: TextIO, err: TextIO) -> Answer:
    """Decode by eagle-run, the first of RUNS."""
    argv = [case["bundle"], "--prompt", PROMPT, "--threads", "1", "--context", str(CONTEXT), "--json"]
    argv += ["--max-new-tokens", "16", "--ignore-eos", "--seed", "1"]
    taken(sys.stdout, out), taken(sys.stderr, err)  # warnings of cases before
    try:
        status, raised = eagle_run(argv), ""
    except BaseException:
        status, raised = -1, traceback.format_exc()[-MESSAGE:]
    printed, said = taken(sys.stdout, out), taken(sys.stderr, err)
    if raised:
        return {"outcome": "broken", "message": raised}
    if status == 0 and not said:
        result = json.loads(printed)
        return {"outcome": "served", "outputs": [(result["token_ids"], result["text"])]}
    if status == 2 and not printed and said.startswith("eagle-run: ") and said.endswith("\n"):
        return refused("command", said.removesuffix("\n"))
    return {"outcome": "broken", "message": f"status {status}, stderr {said[-MESSAGE:]!r}, stdout {printed!r}"}


def refused(kind: str, message: str) -> Answer:
    """One sentence, or broken."""
    if "\n" in message or not 0 < len(message) <= MESSAGE:
        return {"outcome": "broken", "message": f"no sentence: {kind}: {len(message)}: {message[:MESSAGE]}"}
    return {"outcome": "refused", "message": f"{kind}: {message}"}


def taken(stream: TextIO, file: TextIO) -> str:
    """What was written since the last time, by Python and by engines."""
    stream.flush()
    with contextlib.closing(os.fdopen(os.dup(file.fileno()), "r", errors="replace")) as reader:
        reader.seek(0)
        content = reader.read()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    os.ftruncate(file.fileno(), 0)
    return content


def same(answer: Answer, wanted: Sequence[Any]) -> bool:
    """Whether a served case gave the outputs that a sound bundle gives."""
    outputs = answer.get("outputs", [])
    return len(outputs) > 0 and all(a == b for a, b in zip(outputs, wanted, strict=False))


if __name__ == "__main__":
    main(sys.argv[1])
