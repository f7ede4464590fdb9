"""The network interface that has an address."""

from __future__ import annotations


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface with an address; None if it has none."""
    import psutil

    plain = address.partition("%")[0]
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == plain for one in found):
            return str(name)
    return None
