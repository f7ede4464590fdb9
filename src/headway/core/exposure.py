"""Which addresses other machines can reach, and the secrets that servers ask of clients there."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from headway.core.errors import ConfigError

#: Shortest secret that is accepted.
_SECRET_LENGTH = 16


def is_loopback(host: str) -> bool:
    """Return whether an IP address is of the loopback; a name is none."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_machine(host: str) -> bool:
    """Return whether only processes of this machine can connect to a host."""
    return host == "localhost" or is_loopback(host)


def names_this_machine(host_header: str) -> bool:
    """Return whether the Host header of a request names this machine.

    A page of another site can let a name of its own point here (DNS rebinding), but not choose the Host header.
    """
    try:
        host = urlsplit(f"//{host_header}").hostname or ""
    except ValueError:  # brackets that do not close
        return False
    return is_this_machine(host)


def check_secret(secret: str, where: str) -> None:
    """Check that a secret is long, and that a request can carry it in a header.

    Args:
        secret: What clients must send.
        where: The environment variable that it comes from.

    Raises:
        ConfigError: it is not.
    """
    fix = "openssl rand -hex 32"
    if len(secret) < _SECRET_LENGTH:
        raise ConfigError(f"the token has fewer than {_SECRET_LENGTH} characters", where=where, fix=fix)
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        raise ConfigError("the token has characters that a request cannot carry", where=where, fix=fix)
