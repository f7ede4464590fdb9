"""Ports for the servers of tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count

#: Linux gives connections ports from 32768 on.
_FIRST_PORT, _PORTS_OF_A_WORKER, _PORT_RANGES = 12_000, 1000, 20


def _own_ports() -> Iterator[int]:
    """Ports that no connection is given by the kernel while a server starts, nor another worker of these tests; two
    runs of the tests side by side begin at other ones."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST_PORT + worker % _PORT_RANGES * _PORTS_OF_A_WORKER
    for number in count(os.getpid()):
        yield first + number % _PORTS_OF_A_WORKER


_ports = _own_ports()


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens at, others at every call."""
    with ExitStack() as held:
        found: list[int] = []
        while len(found) < number:
            port, one = next(_ports), held.enter_context(socket.socket())
            with suppress(OSError):
                one.bind(("", port))
                found.append(port)
        return found
