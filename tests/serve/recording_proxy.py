"""A proxy that keeps what clients send: recording_proxy.py http://127.0.0.1:8000 8001 bodies.jsonl"""

from __future__ import annotations

import http.client
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


class Proxy(ThreadingHTTPServer):
    """Passes requests on to a server. file: gets a line for each body: path, body, status."""

    def __init__(self, address: str, port: int, file: Path) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.target = urlsplit(address).netloc
        self.file = file


class _Handler(BaseHTTPRequestHandler):
    def _pass(self) -> None:
        proxy = self.server
        assert isinstance(proxy, Proxy)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        link = http.client.HTTPConnection(proxy.target, timeout=120)
        kept = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        link.request(self.command, self.path, body, kept)
        answer = link.getresponse()
        if body:
            kind = self.headers.get("content-type")
            sent = {"path": self.path, "status": answer.status, "type": kind, "body": json.loads(body)}
            with proxy.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(sent) + "\n")
        self.send_response(answer.status)
        for name in ("content-type", "retry-after", "x-should-retry"):
            if answer.headers[name]:
                self.send_header(name, answer.headers[name])
        self.send_header("connection", "close")
        self.end_headers()
        while piece := answer.read1(1 << 16):
            self.wfile.write(piece)
            self.wfile.flush()

    do_GET = do_POST = do_DELETE = _pass  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    Proxy(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])).serve_forever()
