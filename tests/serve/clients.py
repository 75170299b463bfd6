"""What tests of the server do as its clients."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raw_http import connect, head, request

COMPLETIONS = "/v1/completions"
PATIENCE = 60.0  # seconds within which things happen that take no time on an idle machine


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds; fails if that takes too long."""
    end = time.monotonic() + PATIENCE
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


def server_process(bundle: Path, *options: str) -> tuple[subprocess.Popen[str], str]:
    """The command, and its address once it serves."""
    command = [sys.executable, "-m", "eagle_serve.cli", str(bundle), "--port", "0", "--threads", "1", *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"http://\S+", line):
            return process, match[0]
    raise AssertionError(f"the server ended with {process.wait()}")
