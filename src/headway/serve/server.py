"""The HTTP server: connections with limits of time, and an end that loses no request. The only file with uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headway.core.console import notice
from headway.core.errors import ConfigError
from headway.serve.front import Front
from headway.serve.options import Place

#: Time from a connection, or from the end of a reply, to the end of the next request's headers.
HEADER_SECONDS = 10.0
#: Time that a client may leave a part of a reply unread.
STALL_SECONDS = 30.0
#: Connections at once, for each request at once.
_CONNECTIONS = 8


class Connection(H11Protocol):  # type: ignore[misc]
    """A connection that is closed where its client sends no request, or does not read the reply."""

    header_seconds = HEADER_SECONDS
    stall_seconds = STALL_SECONDS
    _silent: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent = self.loop.call_later(self.header_seconds, self._close_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._silent, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        is_first = self.cycle is None or self.cycle.response_complete
        super().data_received(data)
        if is_first and self._silent is None:
            self._silent = self.loop.call_later(self.header_seconds, self._close_if_silent)
        if self._silent is not None and self.cycle is not None and not self.cycle.response_complete:
            self._silent.cancel()
            self._silent = None

    def _close_if_silent(self) -> None:
        self._silent = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class _Server(uvicorn.Server):  # type: ignore[misc]
    """A server that drains at SIGTERM and SIGINT; a second signal ends it at once."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], object]) -> None:
        super().__init__(config)
        self._drain = drain
        self._is_asked = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._is_asked:
            self.force_exit = True
            self.should_exit = True
        self._is_asked = True
        self._drain()


def listen(place: Place) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((place.host, place.port))
        one.listen(1024)
    except OSError as error:
        one.close()
        raise ConfigError(
            f"nothing can be served there: {error.strerror or error}",
            where=f"--host {place.host} --port {place.port}",
            fix="choose another port, or end what listens on this one",
        ) from None
    one.setblocking(False)
    return one


def serve(
    front: Front,
    place: Place,
    listening: socket.socket,
    *,
    drain_seconds: float,
    tasks: Callable[[], Awaitable[None]],
) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    For `drain_seconds` after the signal the server is not ready and still takes requests, since balancers learn of it
    late; then it takes no more, and ends after the last reply.

    Args:
        front: What answers.
        place: Where `listening` listens, and its certificate.
        listening: From `listen`.
        drain_seconds: See above.
        tasks: What runs beside the server.
    """
    certificate, key = place.tls or (None, None)
    config = uvicorn.Config(
        front.application(),
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        limit_concurrency=_CONNECTIONS * front.limits.concurrency + 64,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    asyncio.run(_serve(front, config, listening, drain_seconds, tasks=tasks))


async def _serve(
    front: Front,
    config: uvicorn.Config,
    listening: socket.socket,
    drain_seconds: float,
    *,
    tasks: Callable[[], Awaitable[None]],
) -> None:
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    server = _Server(config, lambda: loop.call_soon_threadsafe(asked.set))

    async def drain() -> None:
        await asked.wait()
        front.is_draining = True
        notice(f"ending: requests are taken for {drain_seconds:g} more seconds, and all are answered")
        await asyncio.sleep(drain_seconds)
        front.is_closed = True
        while front.running:
            await asyncio.sleep(0.02)
        server.should_exit = True

    beside = [asyncio.ensure_future(one) for one in (drain(), tasks())]
    try:
        await server.serve(sockets=[listening])
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
