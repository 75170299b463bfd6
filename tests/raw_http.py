"""HTTP over bare sockets, for tests that send what no well-behaved client sends, or stop in the middle."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Headers = Mapping[str, str | None] | Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Answer:
    """headers: names in lower case. body: without the framing of chunks."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> str | None:
        """The code of an error."""
        return self.data["error"]["code"] if self.headers.get("content-type") == "application/json" else None


def connect(address: str, *, timeout: float = 60.0, receive_bytes: int | None = None) -> socket.socket:
    """A connection to "http://HOST:PORT". receive_bytes: that the system keeps for this end."""
    parts = urlsplit(address)
    link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    if receive_bytes is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    link.settimeout(timeout)
    link.connect((parts.hostname, parts.port))
    return link


def head(method: str, path: str, headers: Sequence[tuple[str, str]]) -> bytes:
    """The lines of a request before its body."""
    return "".join([f"{method} {path} HTTP/1.1\r\n", *(f"{k}: {v}\r\n" for k, v in headers), "\r\n"]).encode("latin-1")


def request(
    address: str, method: str, path: str, headers: Mapping[str, str | None] | None = None, body: bytes | None = None
) -> Answer:
    """Send a request on a connection of its own. headers: more of them, or None for one to leave out."""
    named: dict[str, str | None] = {"Host": urlsplit(address).netloc, "Connection": "close"}
    if body is not None:
        named |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
    named |= headers or {}
    with connect(address) as link:
        link.sendall(head(method, path, [(k, v) for k, v in named.items() if v is not None]) + (body or b""))
        return read_answer(link)


def post(address: str, path: str, data: Any, headers: Mapping[str, str | None] | None = None) -> Answer:
    """POST an object as JSON."""
    return request(address, "POST", path, headers, json.dumps(data).encode())


def read_answer(link: socket.socket) -> Answer:
    """Read one answer to its end."""
    with link.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while (line := file.readline().strip()) != b"":
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            body = b"".join(_chunks(file))
        else:
            body = file.read(int(headers["content-length"])) if "content-length" in headers else file.read()
    return Answer(status, headers, body)


def _chunks(file: Any) -> Iterator[bytes]:
    while size := int(file.readline() or b"0", 16):
        yield file.read(size)
        file.readline()


def events(body: bytes) -> list[Any]:
    """The events of a stream, as JSON but for "[DONE]"; comments as text that begins with ":"."""
    listed: list[Any] = []
    for block in body.decode().split("\n\n"):
        if block.startswith("data: "):
            listed.append(block[6:] if block == "data: [DONE]" else json.loads(block[6:]))
        elif block:
            listed.append(block)
    return listed
