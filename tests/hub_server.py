"""A small server that speaks the part of the Hugging Face Hub's protocol that huggingface_hub uses for downloads and
for uploads of small files.

As in huggingface_hub 2.4 (hf_api.py, file_download.py, utils/_http.py): /api/models/ID[/revision/REVISION] with the
commit and the files, /api/models/ID/tree/REVISION, /api/models/ID/paths-info/REVISION, and /ID/resolve/REVISION/FILE
with HEAD, ETag, X-Repo-Commit and Range. Errors have an X-Error-Code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROUTE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)(/(?P<what>revision|tree|paths-info)/(?P<revision>[^/]+))?/?")
WRITE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/(?P<what>preupload|commit)/main")
FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


@dataclass
class Hub:
    """models: id -> revision -> folder. gated: ids that ask for a login. cut: file -> bytes after which the connection
    that sends it is closed, once. absent: files whose content is refused. served: file -> bytes of content that were
    sent. ranges: file -> the Range headers that asked for it. uploads: where models that clients make are kept; None:
    nobody may write."""

    models: dict[str, dict[str, Path]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cut: dict[str, int] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    served: Counter[str] = field(default_factory=Counter)
    ranges: dict[str, list[str]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    uploads: Path | None = None
    endpoint: str = ""


def commit_of(folder: Path) -> str:
    """A commit's hash that belongs to a folder."""
    return hashlib.sha1(str(folder).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_POST(self) -> None:
        self.asked = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create" or WRITE.fullmatch(path):
            self.hub.requests.append(f"POST {path}")
            self.write(path)
        else:
            self.answer(body=True)

    def write(self, path: str) -> None:
        """Makes a model, says how its files are to come, or takes them."""
        if self.hub.uploads is None or "Authorization" not in self.headers:
            self.error(401, "")
            return
        match, answer = WRITE.fullmatch(path), dict[str, Any]()
        if match is None:
            name = json.loads(self.asked)
            id = f"{name['organization']}/{name['name']}"
            self.hub.models.setdefault(id, {"main": self.hub.uploads / id}).get("main", Path()).mkdir(parents=True)
            answer = {"url": f"{self.hub.endpoint}/{id}", "name": id, "private": name.get("private")}
        elif match["what"] == "preupload":
            files = json.loads(self.asked)["files"]
            answer["files"] = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]
        else:
            folder = self.hub.models[match["id"]]["main"]
            for line in map(json.loads, self.asked.splitlines()):
                if line["key"] == "file":
                    file = folder / line["value"]["path"]
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(line["value"]["content"]))
            commit = commit_of(folder)
            answer = {"commitOid": commit, "commitUrl": f"{self.hub.endpoint}/{match['id']}/commit/{commit}"}
        self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if (match := FILE.fullmatch(path)) is not None:
            self.file(match["id"], match["revision"], match["file"], body)
        elif (match := ROUTE.fullmatch(path)) is not None:
            self.listing(match["id"], match["what"], match["revision"] or "main")
        else:
            self.send(404, b"", {})

    def folder(self, name: str, revision: str, *, content: bool) -> Path | None:
        """The folder of a revision; None after an error was sent."""
        revisions = self.hub.models.get(name)
        if revisions is None:
            self.error(401 if "Authorization" not in self.headers else 404, "RepoNotFound")
        elif content and name in self.hub.gated:
            self.error(403, "GatedRepo")
        else:
            by_commit = {commit_of(each): each for each in revisions.values()}
            if (folder := (revisions | by_commit).get(revision)) is not None:
                return folder
            self.error(404, "RevisionNotFound")
        return None

    def listing(self, name: str, what: str | None, revision: str) -> None:
        folder = self.folder(name, revision, content=False)
        if folder is None:
            return
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*.*"))}
        data: Any
        if what in ("tree", "paths-info"):
            wanted = set(re.findall(r"paths=([^&]+)", unquote(self.asked))) if what == "paths-info" else set(sizes)
            if what == "paths-info" and self.asked.startswith("{"):
                wanted = set(json.loads(self.asked)["paths"])
            data = [
                {"type": "file", "path": file, "size": size, "oid": hashlib.sha1(file.encode()).hexdigest()}
                for file, size in sizes.items()
                if file in wanted
            ]
        else:
            siblings = [{"rfilename": file, "size": size, "blobId": "0"} for file, size in sizes.items()]
            data = {"id": name, "modelId": name, "sha": commit_of(folder), "private": False, "siblings": siblings}
        self.send(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def file(self, name: str, revision: str, file: str, body: bool) -> None:
        folder = self.folder(name, revision, content=True)
        if folder is None:
            return
        path = folder / file
        if not path.is_file():
            self.error(404, "EntryNotFound")
            return
        if file in self.hub.absent and body:
            self.error(403, "")
            return
        content = path.read_bytes()
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit_of(folder)}
        headers |= {"Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if not body:
            self.send(200, content, headers, body=False)
            return
        status, part = 200, content
        if asked is not None:
            self.hub.ranges.setdefault(file, []).append(asked)
            first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", asked).groups()  # type: ignore[union-attr]
            end = min(int(last) + 1 if last else len(content), len(content))
            status, part = 206, content[int(first) : end]
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
        self.send(status, part, headers, limit=self.hub.cut.pop(file, None), counted=file)

    def error(self, status: int, code: str) -> None:
        self.send(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def send(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str],
        *,
        body: bool = True,
        limit: int | None = None,
        counted: str | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not body or self.command == "HEAD":
            return
        sent = content if limit is None else content[:limit]
        self.wfile.write(sent)
        if counted is not None:
            self.hub.served[counted] += len(sent)
        if limit is not None:  # as when the network fails
            self.wfile.flush()
            self.close_connection = True


class serving:  # noqa: N801  (a context manager, named as what it does)
    """Serves a hub for the length of a block, and sets its endpoint."""

    def __init__(self, hub: Hub, port: int = 0) -> None:
        """port: 0 takes a free one."""
        self.hub, self.port = hub, port

    def __enter__(self) -> Hub:
        handler = type("BoundHandler", (Handler,), {"hub": self.hub})
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.hub.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self.hub

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
