"""A connection whose client must send the head of a request in time."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """Uvicorn's, which waits for the rest of a head for ever. Here it ends after the time that an idle connection
    has, timeout_keep_alive, whether nothing came or a part."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Begin to count when a head is awaited; what comes of it does not begin anew."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._head is None:
            self._head = self.loop.call_later(self.timeout_keep_alive, self._late)

    def _late(self) -> None:
        self._head = None
        if self.conn.their_state is h11.IDLE:
            self.transport.close()

    def _forget(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
