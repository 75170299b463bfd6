"""Who may call: pages of other web sites may not, nor names that a foreign DNS server points at this machine, nor
callers without the key. Pure ASGI, so that a client that goes away is seen by the endpoint."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eagle_serve.errors import ApiError
from eagle_serve.json_body import DRAINED, too_large
from eagle_serve.options import Options

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
JSON, UTF_8 = "application/json", ("", "charset=utf-8", "charset=utf8")
OPEN_PATHS = ("/", "/health", "/page.css", "/page.js")  # no key: a browser loads the page before it has one
PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; " + (
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Security:
    """Checks every request before the application sees it. port: that the server listens on."""

    def __init__(self, app: ASGIApp, options: Options, port: int) -> None:
        self._app = app
        self._options = options
        self._hosts = host_values((*LOOPBACK, *options.allowed_hosts), port)
        self._origins = {origin.rstrip("/").lower() for origin in options.allowed_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        allowed: dict[str, str] = {}
        try:
            self._check_host(headers)
            allowed = self._check_origin(headers)
            if scope["method"] == "OPTIONS" and allowed:
                await Response(None, 204, {**allowed, **_preflight(headers)})(scope, receive, send)
                return
            self._check_key(scope["path"], headers)
            self._check_content(scope, headers)
        except ApiError as error:
            answer = Response(error.body, error.status, {**allowed, **error.headers}, JSON)
            await answer(scope, receive, _adding(send, {}))
            return
        await self._app(scope, receive, _adding(send, allowed))

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            raise ApiError(
                403,
                "forbidden_host",
                "the Host header names another machine; call the server by a loopback name with its port, or start it "
                "with --allowed-hosts",
            )

    def _check_origin(self, headers: Headers) -> dict[str, str]:
        """Returns the CORS headers of the answer: none for a caller that is not a page of another origin."""
        origins = headers.getlist("origin")
        same = f"http://{headers['host'].lower()}"
        for origin in origins:
            if len(origins) == 1 and origin.lower() in self._origins:
                return {
                    "access-control-allow-origin": origin,
                    "access-control-expose-headers": "x-eagle-ignored, retry-after",
                    "cross-origin-resource-policy": "cross-origin",
                    "vary": "origin",
                }
            if origin.lower() != same:
                raise _foreign()
        if any(site.lower() not in ("same-origin", "none") for site in headers.getlist("sec-fetch-site")):
            raise _foreign()
        return {}

    def _check_key(self, path: str, headers: Headers) -> None:
        key = self._options.api_key
        if key is None or path in OPEN_PATHS:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), key.encode())
        if scheme.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "invalid_api_key",
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                headers={"www-authenticate": "Bearer"},
            )

    def _check_content(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] != "POST":
            return
        # Clients of Ollama send no type; those of pages name an origin, which was looked at.
        given = headers.get("content-type", JSON if scope["path"].startswith("/api/") else "")
        kind, _, parameters = given.lower().partition(";")
        if kind.strip() != JSON or parameters.replace('"', "").strip(" ;") not in UTF_8:
            raise ApiError(415, "unsupported_media_type", "the content type must be application/json, in UTF-8")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError(415, "unsupported_media_type", "the body must not be compressed")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > DRAINED * self._options.limits.body_bytes:
            raise too_large(self._options.limits.body_bytes)


def host_values(names: Iterable[str], port: int) -> set[str]:
    """Returns the Host headers that stand for these names: each with the port unless it has one, and without it where
    it is HTTP's own."""
    values = set()
    for name in names:
        name = name.lower()
        has_port = ":" in name.rpartition("]")[2]
        values.add(name if has_port else f"{name}:{port}")
        if port == 80 and not has_port:
            values.add(name)
    return values


def _preflight(headers: Headers) -> dict[str, str]:
    allowed = {
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization, content-type",
        "access-control-max-age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        allowed["access-control-allow-private-network"] = "true"
    return allowed


def _adding(send: Send, more: dict[str, str]) -> Send:
    """Returns a `send` that adds headers to the answer, unless it has them."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, **more}.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def _foreign() -> ApiError:
    return ApiError(
        403,
        "forbidden_origin",
        "a page of another web site made this request; start the server with --allowed-origins to let it",
    )
