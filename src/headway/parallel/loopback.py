"""Workers of one machine talk over its loopback interface alone, so that nobody else can reach them."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from headway.core.launched import are_all_on_this_machine

#: The interface on which each library listens, and how it takes a whole name (NCCL takes prefixes otherwise).
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
#: Its names on Linux and on macOS.
_NAMES = ("lo", "lo0")


def keep_to_loopback(size: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Have gloo and NCCL listen on the loopback interface only, where all workers are known to be on this machine.

    They read their variables when they make a group. Variables that are set already stay as they are.

    Args:
        size: Number of workers.
        environment: Changed instead of this process's.
    """
    environment = os.environ if environment is None else environment
    there = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _NAMES if name in there), None)
    if loopback is None or not are_all_on_this_machine(size):
        return
    for variable, text in _INTERFACES.items():
        environment.setdefault(variable, text.format(loopback))
