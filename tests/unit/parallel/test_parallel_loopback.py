"""When workers listen on the loopback interface alone."""

from __future__ import annotations

import socket

import pytest

from headway.core.coordination.launched import RENDEZVOUS_VARIABLE
from headway.parallel.loopback import keep_to_loopback

LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}


@pytest.mark.parametrize(
    ("variables", "size", "expected"),
    [
        ({}, 1, LOCAL),  # DeepSpeed has a group of gloo for one worker, too
        ({RENDEZVOUS_VARIABLE: "/proc/1/fd/3"}, 2, LOCAL),
        ({"LOCAL_WORLD_SIZE": "2"}, 2, LOCAL),
        ({"LOCAL_WORLD_SIZE": "2"}, 4, {}),
        ({}, 2, {}),  # where nobody says where the others are, they may be anywhere
    ],
)
def test_only_where_all_workers_are_known_to_be_here(
    variables: dict[str, str], size: int, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for name in (RENDEZVOUS_VARIABLE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment = dict[str, str]()
    keep_to_loopback(size, environment)
    assert environment == expected


def test_what_is_set_stays_and_an_interface_that_is_not_there_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo0")])
    environment = {"GLOO_SOCKET_IFNAME": "eth0"}
    keep_to_loopback(1, environment)
    assert environment == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=lo0"}
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0")])
    keep_to_loopback(1, environment := {})
    assert environment == {}
