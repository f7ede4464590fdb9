"""Which addresses other machines can reach, and the secrets and certificates that servers have there."""

from __future__ import annotations

import hmac
import ipaddress
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from headway.core.errors import ConfigError, explaining_os_errors

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


def url_host(host: str) -> str:
    """Return a host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def bears(authorization: str, secret: str) -> bool:
    """Return whether the Authorization header of a request bears a secret, in a time that does not depend on it."""
    return hmac.compare_digest(authorization.encode(), f"Bearer {secret}".encode())


def free_port(host: str = "") -> int:
    """Return a port that is free now, on one address or on all interfaces."""
    with socket.socket() as one:
        one.bind((host, 0))
        return int(one.getsockname()[1])


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


def tls_pair(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """Return the certificate and the key of a server; None without both.

    Raises:
        ConfigError: one of them is missing.
    """
    if certificate is not None and key is not None:
        return certificate, key
    if certificate is None and key is None:
        return None
    there = "--tls-cert" if key is None else "--tls-key"
    raise ConfigError("TLS takes a certificate and its key", where=there, fix="--tls-cert FILE --tls-key FILE")


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Load the certificate of a server and its key, which are PEM files.

    Raises:
        ConfigError: they cannot be loaded.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    with explaining_os_errors(
        ConfigError,
        "the certificate cannot be loaded",
        f"--tls-cert {certificate} --tls-key {key}",
        "name the certificate and its key as PEM files",
    ):
        context.load_cert_chain(certificate, key)
    return context
