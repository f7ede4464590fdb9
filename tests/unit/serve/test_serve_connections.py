"""Connections whose clients do not read, or begin a request and do not end it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn

from headway.serve.server import Connection
from support.waits import LONG


class Impatient(Connection):
    """The same with short limits."""

    header_seconds = 0.5
    stall_seconds = 0.5


async def endless(scope: Any, receive: Any, send: Any) -> None:
    """Answer without an end, as long as the client takes it."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/short":
        await send({"type": "http.response.body", "body": b"done"})
        return
    watch = asyncio.ensure_future(receive())
    while not watch.done() or watch.result()["type"] != "http.disconnect":
        if watch.done():
            watch = asyncio.ensure_future(receive())
        await send({"type": "http.response.body", "body": b" " * 2**16, "more_body": True})
        await asyncio.sleep(0)


def check_is_cut_off(content: bytes, then: bytes = b"") -> None:
    """Send something, and more after a first reply; the server has to end the connection, and what answers it."""
    made: list[Any] = []

    class Counted(Impatient):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            made.append(transport)

    async def run() -> None:
        config = uvicorn.Config(endless, http=Counted, ws="none", lifespan="off", log_config=None, port=0)
        server = uvicorn.Server(config)
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.ensure_future(server.serve([listening]))
        with socket.create_connection(listening.getsockname()) as client:
            client.sendall(content)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(LONG):
                if then:
                    assert await loop.sock_recv(client, 4096)
                    await loop.sock_sendall(client, then)
                while not made or server.server_state.connections or server.server_state.tasks:
                    await asyncio.sleep(0.01)
        server.should_exit = True
        await serving

    asyncio.run(run())


def test_a_client_that_does_not_read_is_cut_off() -> None:
    check_is_cut_off(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")


def test_a_head_that_does_not_end_is_cut_off() -> None:
    check_is_cut_off(b"GET / HTT")


def test_a_second_head_that_does_not_end_is_cut_off() -> None:
    """The time for it begins after the first reply, before which the server may be idle for longer."""
    first = b"GET /short HTTP/1.1\r\nHost: a\r\n\r\n"
    check_is_cut_off(first, b"GET / HTT")
