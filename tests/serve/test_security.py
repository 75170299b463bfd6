"""Acceptance test 13: who may call, and what a request may look like, over real sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import EagleModel
from eagle_serve import Limits, Options
from eagle_serve.security import host_values
from eagle_serve.server import serving
from raw_http import Answer, connect, head, post, read_answer, request

KEY = "k" * 32
SITE = "https://app.example"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "temperature": 0}
BODY = json.dumps(CHAT).encode()
CHATS, COUNT = "/v1/chat/completions", "/v1/count_tokens"
Row = tuple[str, str, str, dict[str, str | None], bytes | None, int, str | None]


@pytest.fixture(scope="module")
def servers(served_model: EagleModel, served_bundle: Path) -> Iterator[dict[str, str]]:
    """ "plain", "keyed" and "listed": with a key; with a host and a site that are allowed."""
    keyed = Options(api_key=KEY)
    listed = Options(allowed_hosts=("eagle.example", "proxy.example:443"), allowed_origins=(SITE,))
    with (
        serving(served_model, served_bundle) as plain,
        serving(served_model, served_bundle, keyed) as with_key,
        serving(served_model, served_bundle, listed) as with_lists,
    ):
        yield {"plain": plain, "keyed": with_key, "listed": with_lists}


def bearer(key: str) -> dict[str, str | None]:
    return {"Authorization": f"Bearer {key}"}


# Server, method, path, headers, body, status, code of the error. "PORT" and "SELF" stand for the server's.
HOSTS: list[Row] = [
    ("plain", "GET", "/health", {}, None, 200, None),
    ("plain", "GET", "/health", {"Host": "localhost:PORT"}, None, 200, None),
    ("plain", "GET", "/health", {"Host": "LOCALHOST:PORT"}, None, 200, None),
    ("plain", "GET", "/health", {"Host": "[::1]:PORT"}, None, 200, None),
    ("plain", "GET", "/health", {"Host": "localhost"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/health", {"Host": "localhost:1"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/health", {"Host": "evil.example"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/", {"Host": "evil.example:PORT"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/v1/models", {"Host": "127.0.0.1.evil.example:PORT"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/v1/models", {"Host": "localhost:PORT.evil.example"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/v1/models", {"Host": "user@localhost:PORT"}, None, 403, "forbidden_host"),
    ("plain", "GET", "/v1/models", {"Host": ""}, None, 403, "forbidden_host"),
    ("plain", "GET", "/health", {"Host": None}, None, 400, None),  # HTTP/1.1 requires it
    ("plain", "POST", CHATS, {"Host": "evil.example:PORT"}, BODY, 403, "forbidden_host"),
    ("plain", "GET", "/health", {"Host": "eagle.example:PORT"}, None, 403, "forbidden_host"),
    ("listed", "GET", "/health", {"Host": "eagle.example:PORT"}, None, 200, None),
    ("listed", "GET", "/health", {"Host": "eagle.example"}, None, 403, "forbidden_host"),
    ("listed", "GET", "/health", {"Host": "proxy.example:443"}, None, 200, None),
    ("listed", "GET", "/health", {"Host": "proxy.example:PORT"}, None, 403, "forbidden_host"),
    ("listed", "GET", "/health", {"Host": "127.0.0.1:PORT"}, None, 200, None),
]
ORIGINS: list[Row] = [
    ("plain", "POST", CHATS, {"Origin": "SELF"}, BODY, 200, None),
    ("plain", "POST", CHATS, {"Origin": "http://localhost:PORT"}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Origin": "https://evil.example"}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Origin": "null"}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Origin": "http://127.0.0.1:1"}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Origin": "https://127.0.0.1:PORT"}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Origin": ""}, BODY, 403, "forbidden_origin"),
    ("plain", "GET", "/v1/models", {"Origin": "https://evil.example"}, None, 403, "forbidden_origin"),
    ("plain", "GET", "/metrics", {"Sec-Fetch-Site": "cross-site"}, None, 403, "forbidden_origin"),
    ("plain", "GET", "/v1/models", {"Sec-Fetch-Site": "same-site"}, None, 403, "forbidden_origin"),
    ("plain", "GET", "/v1/models", {"Sec-Fetch-Site": "same-origin"}, None, 200, None),
    ("plain", "GET", "/", {"Sec-Fetch-Site": "none"}, None, 200, None),
    ("plain", "POST", CHATS, {"Origin": "SELF", "Sec-Fetch-Site": "cross-site"}, BODY, 403, "forbidden_origin"),
    ("plain", "OPTIONS", CHATS, {"Origin": "https://evil.example"}, None, 403, "forbidden_origin"),
    ("plain", "OPTIONS", CHATS, {}, None, 405, "method_not_allowed"),
    ("listed", "OPTIONS", CHATS, {"Origin": SITE, "Sec-Fetch-Site": "cross-site"}, None, 204, None),
    ("listed", "POST", CHATS, {"Origin": SITE, "Sec-Fetch-Site": "cross-site"}, BODY, 200, None),
    ("listed", "POST", CHATS, {"Origin": f"{SITE}.evil.example"}, BODY, 403, "forbidden_origin"),
    ("listed", "POST", CHATS, {"Origin": "http://app.example"}, BODY, 403, "forbidden_origin"),
]
EVIL = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
FORM = "application/x-www-form-urlencoded"
# What a page of another site can send without asking first, and what it sends once its name points at this machine.
PAGES: list[Row] = [
    ("plain", "POST", CHATS, {**EVIL, "Content-Type": "text/plain"}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {**EVIL, "Content-Type": FORM}, b"messages=hi", 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Origin": "null", "Content-Type": FORM}, b"messages=hi", 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Sec-Fetch-Site": "cross-site", "Content-Type": None}, BODY, 403, "forbidden_origin"),
    ("plain", "POST", CHATS, {"Content-Type": FORM}, b"messages=hi", 415, "unsupported_media_type"),  # old browsers
    ("plain", "POST", CHATS, {"Content-Type": "text/plain; application/json"}, BODY, 415, "unsupported_media_type"),
    ("plain", "GET", "/page.js", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, None, 403, None),
    ("plain", "GET", "/v1/models", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, None, 403, None),
    (
        "plain",
        "GET",
        "/v1/models",
        {"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"},
        None,
        403,
        None,
    ),
    ("plain", "GET", "/", {"Host": "evil.example:PORT", "Sec-Fetch-Site": "same-origin"}, None, 403, "forbidden_host"),
    ("plain", "POST", CHATS, {"Host": "evil.example:PORT", "Origin": "http://evil.example:PORT"}, BODY, 403, None),
]
KEYS: list[Row] = [
    ("keyed", "GET", "/v1/models", {}, None, 401, "invalid_api_key"),
    ("keyed", "GET", "/v1/models", bearer(KEY), None, 200, None),
    ("keyed", "GET", "/v1/models", bearer(KEY[:-1]), None, 401, "invalid_api_key"),
    ("keyed", "GET", "/v1/models", bearer(KEY + "k"), None, 401, "invalid_api_key"),
    ("keyed", "GET", "/v1/models", bearer("é" * 32), None, 401, "invalid_api_key"),
    ("keyed", "GET", "/v1/models", {"Authorization": KEY}, None, 401, "invalid_api_key"),
    ("keyed", "GET", "/v1/models", {"Authorization": f"bearer {KEY}"}, None, 200, None),
    ("keyed", "GET", "/v1/models", {"Authorization": f"Basic {KEY}"}, None, 401, "invalid_api_key"),
    ("keyed", "GET", f"/v1/models?key={KEY}", {}, None, 401, "invalid_api_key"),
    ("keyed", "GET", "/metrics", {}, None, 401, "invalid_api_key"),
    ("keyed", "GET", "/nothing", {}, None, 401, "invalid_api_key"),
    ("keyed", "GET", "/health", {}, None, 200, None),
    ("keyed", "GET", "/", {}, None, 200, None),
    ("keyed", "POST", CHATS, {}, BODY, 401, "invalid_api_key"),
    ("keyed", "POST", CHATS, bearer(KEY), BODY, 200, None),
]
CONTENTS: list[Row] = [
    ("plain", "POST", COUNT, {"Content-Type": "text/plain"}, BODY, 415, "unsupported_media_type"),
    ("plain", "POST", COUNT, {"Content-Type": None}, BODY, 415, "unsupported_media_type"),
    ("plain", "POST", COUNT, {"Content-Type": "multipart/form-data"}, BODY, 415, "unsupported_media_type"),
    ("plain", "POST", COUNT, {"Content-Type": "application/json; charset=utf-16"}, BODY, 415, "unsupported_media_type"),
    ("plain", "POST", COUNT, {"Content-Type": "application/json; charset=UTF-8"}, BODY, 200, None),
    ("plain", "POST", COUNT, {"Content-Type": 'application/json; charset="utf-8"'}, BODY, 200, None),
    ("plain", "POST", "/api/show", {"Content-Type": None}, BODY, 200, None),  # as clients of Ollama send it
    ("plain", "POST", "/api/show", {"Content-Type": "text/plain"}, BODY, 415, None),
    ("plain", "POST", "/api/show", {"Content-Type": None, "Origin": "http://evil.example"}, BODY, 403, None),
    ("plain", "POST", "/api/show", {"Content-Type": None, "Sec-Fetch-Site": "cross-site"}, BODY, 403, None),
    ("plain", "POST", COUNT, {"Content-Type": "application/jsonp"}, BODY, 415, "unsupported_media_type"),
    ("plain", "POST", COUNT, {"Content-Encoding": "gzip"}, BODY, 415, "unsupported_media_type"),
    ("plain", "POST", COUNT, {}, b'{"messages": [', 400, "invalid_json"),
    ("plain", "POST", COUNT, {}, b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", 400, "invalid_json"),
    ("plain", "POST", COUNT, {}, b"[" * 1_000_000, 400, "invalid_json"),
    ("plain", "POST", COUNT, {}, b" " * (5 << 20), 413, "request_too_large"),
    ("plain", "POST", COUNT, {}, b" " * (4 << 20), 400, "invalid_json"),
    ("plain", "POST", COUNT, {"Content-Length": str(1 << 40)}, b"", 413, "request_too_large"),
    ("plain", "PUT", CHATS, {}, BODY, 405, "method_not_allowed"),
    ("plain", "GET", CHATS, {}, None, 405, "method_not_allowed"),
    ("plain", "POST", "/v1/embeddings", {}, BODY, 404, "not_found"),
    ("plain", "GET", "/v1/models/../../etc/passwd", {}, None, 404, "model_not_found"),
    ("plain", "GET", "/page.js/..%2f..%2fcli.py", {}, None, 404, "not_found"),
    ("plain", "GET", "/nothing", {}, None, 404, "not_found"),
]
ROWS = HOSTS + ORIGINS + PAGES + KEYS + CONTENTS


def asked(servers: dict[str, str], row: Row) -> Answer:
    """The answer to a row's request."""
    name, method, path, headers, body, *_ = row
    where = servers[name]
    port = where.rpartition(":")[2]
    named = {
        key: value if value is None else value.replace("SELF", where).replace("PORT", port)
        for key, value in headers.items()
    }
    return request(where, method, path, named, body)


def test_the_matrix_has_its_rows() -> None:
    assert len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}-{row[1]}-{row[2][:20]}-{str(row[3])[:60]}-{row[5]}")
def test_row(servers: dict[str, str], row: Row) -> None:
    answer = asked(servers, row)
    status, code = row[5:]
    assert answer.status == status, answer.body[:300]
    if code is not None:
        assert answer.code == code
        assert set(answer.data["error"]) == {"message", "type", "param", "code"}


def test_cors_headers_go_to_allowed_sites_alone(servers: dict[str, str]) -> None:
    preflight = {
        "Origin": SITE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Private-Network": "true",
    }
    allowed = request(servers["listed"], "OPTIONS", CHATS, preflight)
    assert allowed.headers["access-control-allow-origin"] == SITE
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert "authorization" in allowed.headers["access-control-allow-headers"]
    answer = post(servers["listed"], CHATS, {**CHAT, "user": "x"}, {"Origin": SITE})
    assert answer.headers["access-control-allow-origin"] == SITE and answer.headers["vary"] == "origin"
    assert "x-eagle-ignored" in answer.headers["access-control-expose-headers"]
    wrong = post(servers["listed"], CHATS, {"messages": 3}, {"Origin": SITE})
    assert wrong.status == 400 and wrong.headers["access-control-allow-origin"] == SITE
    for name in servers:
        headers = request(servers[name], "GET", "/v1/models", bearer(KEY)).headers
        assert not any(header.startswith("access-control") for header in headers)


def test_every_answer_forbids_what_the_page_does_not_need(servers: dict[str, str]) -> None:
    for path in ("/", "/page.js", "/health", "/nothing"):
        headers = request(servers["plain"], "GET", path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_headers_hold_no_text_of_a_request(servers: dict[str, str]) -> None:
    fields = {"evil\r\nset-cookie: a=b": 1, "ünknown": 2, "x" * 500: 3, **{f"f{n}": n for n in range(100)}}
    answer = post(servers["plain"], CHATS, {**CHAT, **fields})
    assert answer.status == 200 and "set-cookie" not in answer.headers
    listed = answer.headers["x-eagle-ignored"].split(", ")
    assert listed[:3] == ["evil??set-cookie??a?b", "?nknown", "x" * 64] and len(listed) == 32


def test_a_body_has_its_time(served_model: EagleModel, served_bundle: Path) -> None:
    hurried = Options(limits=Limits(body_s=0.2))
    with serving(served_model, served_bundle, hurried) as where, connect(where) as link:
        headers = [("Host", where[7:]), ("Content-Type", "application/json"), ("Content-Length", "100")]
        link.sendall(head("POST", CHATS, headers) + b'{"messages"')
        answer = read_answer(link)
    assert (answer.status, answer.code) == (408, "request_timeout")


PARTIAL_HEADS = (b"", b"POST /v1/chat", f"POST {CHATS} HTTP/1.1\r\nHost: localhost".encode())


def slow(where: str, number: int) -> socket.socket:
    """A client that stays silent, sends a part of a head, or a head and a part of the body."""
    link = connect(where)
    headers = [("Host", where[7:]), ("Content-Type", "application/json"), ("Content-Length", "100")]
    link.sendall((*PARTIAL_HEADS, head("POST", CHATS, headers) + b'{"messages"')[number % 4])
    return link


def test_slow_clients_keep_nobody_waiting(address: str) -> None:
    links = [slow(address, number) for number in range(100)]
    try:
        assert request(address, "GET", "/health").status == 200
        assert post(address, CHATS, CHAT).status == 200
    finally:
        for link in links:
            link.close()


def test_a_client_that_closes_its_sending_side_has_left(address: str) -> None:
    """A closed connection looks the same, and must free its place at once."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    names = [("Host", address[7:]), ("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    with connect(address) as link:
        link.sendall(head("POST", CHATS, names) + body)
        link.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: link.recv(65536), b""))
    assert b"[DONE]" not in got
    assert post(address, CHATS, CHAT).status == 200


def test_slow_clients_end(served_model: EagleModel, served_bundle: Path) -> None:
    """Also one that sends a head byte by byte, and one that begins a second request."""
    hurried = Options(limits=Limits(head_s=1, body_s=1))
    with serving(served_model, served_bundle, hurried) as where:
        links = [slow(where, number) for number in range(8)]
        second = connect(where)
        second.sendall(head("GET", "/health", [("Host", where[7:])]))
        assert read_answer(second).status == 200
        second.sendall(b"GET /hea")
        dripping = connect(where)
        dripping.settimeout(0.05)
        ended = False
        while not ended:
            try:
                dripping.sendall(b"G")
                ended = dripping.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        for link in (*links, second):
            said = link.makefile("rb").read()  # up to the end of the connection
            assert said == b"" or b" 408 " in said.splitlines()[0]
            link.close()
        dripping.close()


def test_a_chunked_body_is_counted(served_model: EagleModel, served_bundle: Path) -> None:
    small = Options(limits=Limits(body_bytes=1000))
    with serving(served_model, served_bundle, small) as where, connect(where) as link:
        headers = [("Host", where[7:]), ("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        link.sendall(head("POST", CHATS, headers) + (b"200\r\n" + b" " * 512 + b"\r\n") * 3 + b"0\r\n\r\n")
        answer = read_answer(link)
    assert (answer.status, answer.code) == (413, "request_too_large")


def test_connections_have_a_number(served_model: EagleModel, served_bundle: Path) -> None:
    few = Options(limits=Limits(connections=2))
    with serving(served_model, served_bundle, few) as where:
        first, second = connect(where), connect(where)
        time.sleep(0.2)  # until the server has accepted them
        assert request(where, "GET", "/health").status == 503
        first.close()
        second.close()
        time.sleep(0.2)
        assert request(where, "GET", "/health").status == 200


def test_host_values() -> None:
    assert host_values(("a", "b:9", "[::1]"), 8000) == {"a:8000", "b:9", "[::1]:8000"}
    assert host_values(("A",), 80) == {"a:80", "a"}


def test_errors_tell_no_path(served_bundle: Path, address: str) -> None:
    answers: list[Any] = [
        post(address, CHATS, {"messages": [{"role": "user", "content": "refuse this"}]}),
        post(address, CHATS, {"messages": [{"role": "user", "content": "é"}]}),
        post(address, CHATS, {"messages": [{"role": "user", "content": "a" * 3000}]}),
        request(address, "GET", "/v1/models"),
    ]
    assert [answer.status for answer in answers[::2]] == [400, 400]
    assert answers[0].code == "template_error" and "no thanks" in answers[0].data["error"]["message"]
    for answer in answers:
        assert str(served_bundle.parent).encode() not in answer.body
