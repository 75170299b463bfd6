"""An application on a socket: started in a thread by `serving`, or in the main thread by the command; a signal lets
running requests end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import uvicorn

from eagle_runtime import EagleModel, RequestError
from eagle_serve.app import Service, application
from eagle_serve.connection import TimedConnection
from eagle_serve.engine import Engine
from eagle_serve.options import Options

SEND_BYTES = 1 << 16  # that the system keeps for a client; with more, one that does not read is noticed late
POLL_S = 0.02
SAME_S = 0.3  # seconds within which signals count as one: a terminal and a parent process may both send it


class Server(uvicorn.Server):
    """Uvicorn, which at its end gives requests their time, and returns after a signal instead of dying of it."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self.service = service
        limits = service.options.limits
        super().__init__(
            uvicorn.Config(
                application(service, listener.getsockname()[1]),
                loop="asyncio",
                http=TimedConnection,
                timeout_keep_alive=limits.head_s,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=limits.connections + 1,  # uvicorn refuses the last one
                timeout_graceful_shutdown=5,
            )
        )
        self._listener = listener
        self._signalled = 0.0  # when the first signal came

    def run_here(self) -> None:
        """Serve until a signal or `should_exit`."""
        asyncio.run(self.serve(sockets=[self._listener]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new requests, give the running ones `grace_s`, then cancel them and close."""
        service, loop = self.service, asyncio.get_running_loop()
        service.refuse()
        if (jobs := service.jobs) is not None:
            end = loop.time() + service.options.limits.grace_s
            while jobs.running + jobs.depth and loop.time() < end and not self.force_exit:
                await asyncio.sleep(POLL_S)
        await asyncio.to_thread(service.end)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal ends the server when running requests are done; a second one, at once."""
        if not self.should_exit:
            self.should_exit, self._signalled = True, time.monotonic()
        elif time.monotonic() > self._signalled + SAME_S:
            self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As in the base class, but the signal is not raised again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [signal.SIGINT, signal.SIGTERM, *([signal.SIGBREAK] if hasattr(signal, "SIGBREAK") else [])]
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. port: 0 takes an unused one. Raises RequestError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        reason = error.strerror or error
        raise RequestError(
            f"cannot listen at {host}, port {port} ({reason}); choose another --port or --host"
        ) from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    return listener


def address_of(listener: socket.socket) -> str:
    """The address of a listening socket, as a browser takes it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def serving(model: EagleModel, bundle: str | Path, options: Options | None = None, port: int = 0) -> Iterator[str]:
    """Within the block a thread serves a loaded model on the loopback address; yields "http://127.0.0.1:PORT".

    bundle: the folder that the model was loaded from. port: 0 takes an unused one. The block's end cancels what runs;
    the model stays open. Raises RequestError for a port in use."""
    service = Service(options or Options())
    listener = listen("127.0.0.1", port)
    server = Server(service, listener)
    service.begin(Engine(model, Path(bundle), service.options, service.metrics))
    thread = threading.Thread(target=server.run_here, name="eagle-serve")
    thread.start()
    try:
        yield address_of(listener)
    finally:
        server.should_exit = True
        if service.jobs is not None:
            service.jobs.stop()
        thread.join()
