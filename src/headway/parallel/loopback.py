"""Restricts the workers of a single machine to its loopback interface, so that no other machine can reach them."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from headway.core.coordination.launched import are_all_on_this_machine

#: Variable for each library's interface, and its format (NCCL matches prefixes without the "=").
_INTERFACES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
#: Names of the loopback interface on Linux and macOS.
_NAMES = ("lo", "lo0")


def keep_to_loopback(size: int, environment: MutableMapping[str, str] | None = None) -> None:
    """Make gloo and NCCL listen on the loopback interface if all workers are known to be on this machine.

    The libraries read these variables when they create a group. Variables that are already set stay as they are.

    Args:
        size: Number of workers.
        environment: Environment to change; this process's by default.
    """
    environment = os.environ if environment is None else environment
    there = {name for _, name in socket.if_nameindex()}
    loopback = next((name for name in _NAMES if name in there), None)
    if loopback is None or not are_all_on_this_machine(size):
        return
    for variable, text in _INTERFACES.items():
        environment.setdefault(variable, text.format(loopback))
