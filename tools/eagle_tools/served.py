"""Servers that answer the same requests: eagle-serve, and llama.cpp's llama-server, which both know POST /completion.

with served(llama_server(binary, gguf, 4, 2, 512)) as ask: ...     # as batches.py does
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import RequestError

START_S, ANSWER_S, END_S, POLL_S = 300.0, 600.0, 10.0, 0.05  # seconds that a start, an answer and the end may take


@dataclass(frozen=True, slots=True)
class Command:
    """How a server is started, without its address. name: for messages. more: fields that its requests also have."""

    name: str
    arguments: tuple[str, ...]
    more: Mapping[str, Any] = field(default_factory=dict)


def eagle_serve(bundle: Path, method: str, width: int, threads: int, room: int) -> Command:
    """Our server. room: tokens of a prompt and its answer; width: requests at once."""
    limits = ("--parallel", str(width), "--threads", str(threads), "--context", str(room), "--quiet")
    arguments = (sys.executable, "-m", "eagle_serve.cli", str(bundle), *limits)
    return Command("eagle-serve", arguments, {"eagle": {"method": method}})


def llama_server(program: Path, weights: Path, width: int, threads: int, room: int) -> Command:
    """llama.cpp's server; arguments as above."""
    limits = ("-np", str(width), "-c", str(width * room), "-t", str(threads))
    return Command("llama-server", (str(program), "-m", str(weights), *limits))


def check_program(path: Path) -> None:
    """Raises RequestError for a llama-server that is not there."""
    if not path.is_file() or not os.access(path, os.X_OK):
        raise RequestError(f"there is no program at {path}; build llama.cpp's target llama-server and give its path")


class Client:
    """Sends requests to a server."""

    def __init__(self, port: int, more: Mapping[str, Any]) -> None:
        self._port = port
        self._more = more

    def answers(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """The tokens of all prompts' answers, `count` of each, greedily; all are asked at once. Raises RequestError."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self._answer(ids, count), prompts))

    def _answer(self, prompt: list[int], count: int) -> list[int]:
        settings = {"n_predict": count, "temperature": 0, "ignore_eos": True, "return_tokens": True}
        try:
            status, said = post(self._port, "/completion", {"prompt": prompt, **settings, **self._more})
        except (OSError, http.client.HTTPException) as error:
            raise RequestError(f"the server at port {self._port} went away ({error}); see its own log") from None
        if status != 200:
            raise RequestError(f"the server at port {self._port} answered {status}: {said[:200]!r}")
        tokens: list[int] = json.loads(said)["tokens"]
        return tokens


def post(port: int, path: str, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
    """Returns the status and the body of an answer; GET without a body. Raises OSError."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    with contextlib.closing(link):
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        link.request(method, path, content, {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def served(command: Command) -> Iterator[Client]:
    """Within the block a server of this machine alone runs, which has loaded its model. Raises RequestError."""
    port = unused_port()
    with tempfile.TemporaryFile() as log:
        address = ("--host", "127.0.0.1", "--port", str(port))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen((*command.arguments, *address), stdout=log, stderr=log, env=env)
        try:
            _wait(process, port, command.name, log)
            yield Client(port, command.more)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def unused_port() -> int:
    """A port of the loopback address that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], port: int, name: str, log: Any) -> None:
    """Returns when the server says that it is ready. Raises RequestError."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            log.seek(0)
            lines = log.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise RequestError(f"{name} ended with status {process.returncode} before it was ready: {lines[-1][:300]}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            if post(port, "/health", None)[0] == 200:
                return
        time.sleep(POLL_S)
    raise RequestError(f"{name} was not ready after {START_S:.0f} seconds")
