"""The endpoints.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/count_tokens
    GET  /v1/models, /v1/models/{name}, /health, /metrics, / (the chat page)
    and those of Ollama (ollama.py) and llama.cpp (llama_cpp.py)

A request is checked, rendered and made ready in a worker thread, waits in the queue (jobs.py), and is answered piece by
piece (stream.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle_runtime.drafting.methods import NAMES
from eagle_serve import llama_cpp, ollama
from eagle_serve.allocator import FreeMemory
from eagle_serve.answers import CHAT, COMPLETIONS
from eagle_serve.dialect import Dialect
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError
from eagle_serve.jobs import Events, Job, Jobs, failure, stopping
from eagle_serve.json_body import read_json
from eagle_serve.metrics import Metrics
from eagle_serve.options import Options
from eagle_serve.refused import ADDRESSES, Endpoint
from eagle_serve.request import Request, model_not_found, parse_request
from eagle_serve.responses import RESPONSES
from eagle_serve.security import Security
from eagle_serve.stream import EventStream, whole

T = TypeVar("T")
PREPARING = 2  # threads that make requests ready
log = logging.getLogger("eagle_serve")
METHOD_OPTIONS = "".join(f"<option>{name}</option>" for name in NAMES).encode()  # what the page offers
PAGE = {
    "/": ("index.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
DIALECTS = (CHAT, COMPLETIONS, RESPONSES, ollama.CHAT, ollama.GENERATE, llama_cpp.COMPLETION)
# What is told at once, of the server or of a body.
TOLD: dict[str, Callable[[Engine], dict[str, Any]]] = {
    "/api/tags": ollama.tags,
    "/api/ps": ollama.running,
    "/api/version": lambda engine: {"version": ollama.VERSION},
    "/props": llama_cpp.props,
}
ASKED: dict[str, Callable[[Mapping[str, Any], Engine], dict[str, Any]]] = {
    "/api/show": ollama.show,
    "/tokenize": llama_cpp.tokenize,
    "/detokenize": llama_cpp.detokenize,
    "/apply-template": llama_cpp.apply_template,
}
Handler = Callable[[HttpRequest], Awaitable[Any]]


class Service:
    """What the endpoints share. engine, jobs: None until the model is loaded."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.metrics = Metrics()
        self.engine: Engine | None = None
        self.jobs: Jobs | None = None
        self._stopping = False
        self._preparing = ThreadPoolExecutor(PREPARING, "eagle-serve-prepare")

    def begin(self, engine: Engine) -> None:
        """Serve a loaded model."""
        self.jobs = Jobs(engine.decode, engine.model.grant, engine.parallel, self.options.queue, FreeMemory().give_back)
        self.engine = engine

    async def prepare(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call what may take long, as a template or a grammar does, in a thread."""
        try:
            called = asyncio.get_running_loop().run_in_executor(self._preparing, function, *arguments)
        except RuntimeError:  # the server has ended while the request arrived
            raise stopping() from None
        return await called

    def ready(self) -> tuple[Engine, Jobs]:
        """Returns the engine and its queue. Raises ApiError: 503 while there is none, or none any more."""
        if self._stopping:
            raise stopping()
        if self.engine is None or self.jobs is None:
            raise ApiError(503, "loading", "the model is being loaded; try again soon", headers={"retry-after": "1"})
        return self.engine, self.jobs

    def refuse(self) -> None:
        """Take no more requests; those there are go on."""
        self._stopping = True
        if self.jobs is not None:
            self.jobs.refuse()

    def end(self) -> None:
        """Cancel what runs, and free what was kept."""
        self.refuse()
        if self.jobs is not None:
            self.jobs.stop()
        self._preparing.shutdown(cancel_futures=True)
        if self.engine is not None:
            self.engine.prefixes.close()


def application(service: Service, port: int) -> ASGIApp:
    """Returns the ASGI application. port: that it will listen on, which Host headers name."""
    return Security(_Answered(_router(service), service), service.options, port)


def _router(service: Service) -> Router:
    def generation(dialect: Dialect) -> Handler:
        async def handler(http: HttpRequest) -> Any:
            return await _generate(service, http, dialect)

        return handler

    async def told(http: HttpRequest) -> Response:
        engine, _ = service.ready()
        return _json(TOLD[http.url.path](engine))

    async def asked(http: HttpRequest) -> Response:
        engine, _ = service.ready()
        body = await read_json(http.receive, service.options.limits)
        return _json(await service.prepare(ASKED[http.url.path], body, engine))

    async def refused(http: HttpRequest) -> Response:
        raise ApiError(404, "not_found", ADDRESSES[http.url.path])

    async def count(http: HttpRequest) -> Response:
        engine, _ = service.ready()
        body = await read_json(http.receive, service.options.limits)
        endpoint: Endpoint = "chat" if "messages" in body else "completions"
        request = parse_request(body, endpoint, service.options, engine.names, engine.own_penalty)
        prompts = [ids for ids, _ in await service.prepare(engine.prompts, request)]
        told: dict[str, Any] = {"object": "token_count", "count": sum(map(len, prompts))}
        ids = prompts[0] if len(prompts) == 1 else prompts
        return _json({**told, "ids": ids, "context": engine.model.context})

    async def models(http: HttpRequest) -> Response:
        engine, _ = service.ready()
        name = http.path_params.get("name")
        if name is None:
            return _json({"object": "list", "data": [engine.description(name) for name in engine.names]})
        if name not in engine.names:
            raise model_not_found(name, engine.names)
        return _json(engine.description(name))

    async def health(http: HttpRequest) -> Response:
        service.ready()
        return _json({"status": "ok"})

    async def metrics(http: HttpRequest) -> Response:
        gauges: dict[str, tuple[str, float]] = {}
        if service.jobs is not None and service.engine is not None:
            gauges["queue_depth"] = ("Requests that wait.", service.jobs.depth)
            gauges["running"] = ("Requests that decode.", service.jobs.running)
            gauges |= service.engine.prefixes.gauges
        return Response(service.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    async def page(http: HttpRequest) -> Response:
        name, kind = PAGE[http.url.path]
        content = resources.files("eagle_serve").joinpath("page", name).read_bytes()
        return Response(content.replace(b"<!-- methods -->", METHOD_OPTIONS), media_type=kind)

    return Router(
        [
            *(Route(dialect.path, generation(dialect), methods=["POST"]) for dialect in DIALECTS),
            Route("/v1/count_tokens", count, methods=["POST"]),
            Route("/chat/completions", generation(CHAT), methods=["POST"]),  # as llama.cpp has it too
            Route("/v1/models", models, methods=["GET"]),
            Route("/models", models, methods=["GET"]),
            Route("/v1/models/{name:path}", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            *(Route(path, told, methods=["GET"]) for path in TOLD),
            *(Route(path, asked, methods=["POST"]) for path in ASKED),
            *(Route(path, refused, methods=["GET", "POST", "DELETE"]) for path in ADDRESSES),
            *(Route(path, page, methods=["GET"]) for path in PAGE),
        ],
        redirect_slashes=False,
    )


class _Answered:
    """Turns errors into answers, and counts and logs every request."""

    def __init__(self, router: Router, service: Service) -> None:
        self._app = router
        self._known = {route.path for route in router.routes if isinstance(route, Route) and "{" not in route.path}
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0
        started = time.perf_counter()

        async def sending(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            try:
                await self._app({**scope, "app": self._app}, receive, sending)
            except ConnectionError:  # the client went away: nobody reads an answer
                return
            except Exception as error:
                if status:  # too late for another answer: the connection is closed
                    raise
                answer = _error_of(error, scope["path"], self._known)
                body = ollama.error_body(answer) if scope["path"].startswith("/api/") else answer.body
                await Response(body, answer.status, answer.headers, "application/json")(scope, receive, sending)
        finally:
            route = scope["path"] if scope["path"] in self._known else "other"
            self._service.metrics.request(route, status or 499)
            _log(scope, status or 499, time.perf_counter() - started)


def _error_of(error: Exception, path: str, known: Container[str]) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, HTTPException):  # of the router
        if error.status_code == 405:
            return ApiError(405, "method_not_allowed", "this address takes another method", headers=error.headers)
        return ApiError(404, "not_found", f"there is nothing at this address; {_near(path, known)}")
    return failure(error)


def _near(path: str, known: Container[str]) -> str:
    """What to ask instead of an address that there is not: one that lacks /v1 or ends in a slash is a common slip."""
    plain = path.rstrip("/")
    for meant in (plain, f"/v1{plain}"):
        if meant in known:
            return f"did you mean {meant}?"
    return "see GET /v1/models"


def _log(scope: Scope, status: int, seconds: float) -> None:
    fields = {"method": scope["method"], "path": scope["path"][:200], "status": status, "ms": round(seconds * 1e3, 1)}
    log.info("%(method)s %(path)s %(status)s %(ms)s ms", fields, extra={"fields": fields})


async def _generate(service: Service, http: HttpRequest, dialect: Dialect) -> Response | EventStream:
    engine, jobs = service.ready()
    limits = service.options.limits
    body = await read_json(http.receive, limits)
    if (answered := dialect.at_once(body, engine)) is not None:
        return _json(answered)
    read = dialect.read(body, engine)
    try:
        request = parse_request(read.fields, read.endpoint, service.options, engine.names, engine.own_penalty)
        dialect.check(request)
        prepared = await service.prepare(engine.prepare, request)
    except ApiError as error:
        raise dialect.renamed(error) from None
    events = Events()
    asked = [Job(one, events) for one in prepared]
    jobs.submit(asked)
    if service.options.log_content:
        log.info("prompt %s", json.dumps(body), extra={"fields": {"prompt": body}})
    headers = _ignored(request)
    answers = dict(zip(asked, dialect.write(engine, asked, body), strict=True))
    if request.stream:
        return EventStream(answers, events, jobs, service.metrics, limits, headers)
    told = await whole(asked, events, jobs, service.metrics, http.receive)
    wholes = [answer.whole(*one) for answer, one in zip(answers.values(), told, strict=True)]
    return _json(wholes[0] if dialect.join is None else dialect.join(wholes), headers)


def _ignored(request: Request) -> dict[str, str]:
    """The header that lists fields without effect, with what a header may hold of their names."""
    names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name[:64]) for name in request.ignored[:32]]
    return {"x-eagle-ignored": ", ".join(names)} if names else {}


def _json(data: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(data).encode("ascii"), 200, headers, "application/json")
