"""What tests of the server do as its clients."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patience import PATIENCE_S
from raw_http import connect, head, request

COMPLETIONS = "/v1/completions"


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fails if that takes too long."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, "it never came to hold"
        time.sleep(0.01)


def metric(address: str, name: str) -> float:
    """A counter or gauge of the server."""
    text = request(address, "GET", "/metrics").body.decode()
    return float(re.findall(rf"^eagle_{name} (\S+)$", text, re.M)[0])


def idle(address: str) -> bool:
    return metric(address, "running") == 0 == metric(address, "queue_depth")


def started(address: str, data: dict[str, Any], **options: Any) -> socket.socket:
    """A connection on which a request was sent."""
    link = connect(address, **options)
    body = json.dumps(data).encode()
    headers = [("Host", address[7:]), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    link.sendall(head("POST", COMPLETIONS, headers) + body)
    return link


def read_until(link: socket.socket, mark: bytes) -> bytes:
    """What comes up to a mark."""
    got = b""
    while mark not in got:
        piece = link.recv(4096)
        assert piece, got
        got += piece
    return got


def server_process(bundle: Path, *options: str) -> tuple[subprocess.Popen[bytes], str, Callable[[], str]]:
    """The command, its address once it serves, and a function that returns what it has written to standard error."""
    command = [sys.executable, "-m", "eagle_serve.cli", str(bundle), "--port", "0", "--threads", "1", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    handle, name = tempfile.mkstemp(prefix="eagle-serve-")
    process = subprocess.Popen(command, stderr=handle, env=env)
    os.close(handle)

    def said() -> str:
        return Path(name).read_text(encoding="utf-8")

    def address() -> str | None:
        assert process.poll() is None, said()
        match = re.search(r"http://\S+", said())
        return match[0] if match else None

    until(lambda: address() is not None)
    return process, address() or "", said
