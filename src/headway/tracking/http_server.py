"""An HTTP server for readers of runs: on the loopback for everybody, and beyond it only with a token and TLS."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6
from socketserver import TCPServer
from typing import Any, Literal

from headway.core.errors import ConfigError
from headway.core.exposure import (
    bears,
    check_secret,
    is_this_machine,
    names_this_machine,
    server_context,
    url_host,
)

#: Environment variable with the token that clients must send as `Authorization: Bearer TOKEN`.
TOKEN_VARIABLE = "HEADWAY_METRICS_TOKEN"
#: How long a client may take for its request, so that silent clients do not fill the process with threads.
_CLIENT_SECONDS = 10.0
TEXT = "text/plain; charset=utf-8"
_ADDRESS = re.compile(r"(?:(?P<host>[^:\[\]]*|\[[0-9a-fA-F:.]+\]):)?(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int
    verb: Literal["top", "ui"] = "top"
    """The verb that was given the address."""

    @property
    def options(self) -> str:
        """The address as the options of its verb."""
        return f"--serve {self.url}" if self.verb == "top" else f"--host {self.host} --port {self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect."""
        return is_this_machine(self.host)

    @property
    def url(self) -> str:
        """The server's URL without its scheme."""
        return f"{url_host(self.host)}:{self.port}"


def parse_address(text: str) -> Address:
    """Parse `:9400`, `9400`, `0.0.0.0:9400` or `[::]:9400`; without a host it is the loopback.

    Raises:
        ConfigError: it is no address.
    """
    found = _ADDRESS.fullmatch(text)
    if not found or not 0 <= int(found["port"]) < 65536:
        raise ConfigError(
            f"'{text}' is no address", where="--serve", fix="for example --serve :9400 or --serve 0.0.0.0:9400"
        )
    return Address((found["host"] or "127.0.0.1").strip("[]"), int(found["port"]))


def check_exposure(address: Address, tls: tuple[Path, Path] | None) -> str | None:
    """Check that an address beyond the loopback has a token and TLS; return the token that scrapers must send.

    Raises:
        ConfigError: something is missing.
    """
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None:
        check_secret(token, TOKEN_VARIABLE)
    if not address.is_loopback and (token is None or tls is None):
        missing = f"{TOKEN_VARIABLE} is not set" if token is None else "there is no certificate"
        alone = f"--serve :{address.port}" if address.verb == "top" else f"--port {address.port}"
        raise ConfigError(
            f"runs are shown beyond this machine only with a token and TLS: {missing}",
            where=address.options,
            fix=f"{TOKEN_VARIABLE}=... headway {address.verb} RUNS {address.options} --tls-cert FILE --tls-key FILE, or"
            f" {alone} for this machine alone",
        )
    return token


class RunsHandler(BaseHTTPRequestHandler):
    """Answers one client; a subclass says what it gets."""

    timeout = _CLIENT_SECONDS
    server: RunsServer
    _with_body = True

    def do_GET(self) -> None:
        """Answer with a body."""
        self.answer()

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._with_body = False
        self.answer()

    def answer(self) -> None:
        """Answer the request with one call of `send`."""
        raise NotImplementedError

    def names_this_machine(self) -> bool:
        """Return whether the request names this machine; all do where others are served, too."""
        return not self.server.address.is_loopback or names_this_machine(self.headers.get("Host", ""))

    def has_token(self) -> bool:
        """Return whether the request has the token in its header, or needs none."""
        expected = self.server.token
        given = self.headers.get("Authorization", "")
        return expected is None or bears(given, expected)

    def send(self, status: HTTPStatus, body: bytes, content_type: str = TEXT, **headers: str) -> None:
        """Send the whole answer; underscores in the names of headers stand for dashes."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self._with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log no requests: a client makes one every few seconds."""

    def version_string(self) -> str:
        """Name no versions of software."""
        return "headway"


class RunsServer(ThreadingHTTPServer):
    """Serves until `shutdown`.

    Args:
        address: Where to listen; port 0 takes a free one.
        handler: What answers clients.
        token: What clients must send; None lets everybody on this machine read.
        tls: Certificate and key as PEM files.

    Raises:
        ConfigError: the port cannot be used, or the certificate cannot be loaded.
    """

    daemon_threads = True

    def __init__(
        self,
        address: Address,
        handler: type[RunsHandler],
        *,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.token = token
        self._context = None if tls is None else server_context(*tls)
        if ":" in address.host:
            self.address_family = AF_INET6
        try:
            super().__init__((address.host, address.port), handler)
        except OSError as error:
            raise ConfigError(
                f"nothing can be served there: {error.strerror or error}",
                where=address.options,
                fix="choose another port, or end what listens on this one",
            ) from None
        self.address = replace(address, port=int(self.server_address[1]))

    @property
    def url(self) -> str:
        """Where the server is."""
        scheme = "http" if self._context is None else "https"
        return f"{scheme}://{self.address.url}/"

    def server_bind(self) -> None:
        """Bind without asking the name service for this machine's name, which may take long."""
        TCPServer.server_bind(self)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; the TLS handshake is made by its own thread, since the client may be slow."""
        connection, client = super().get_request()
        if self._context is not None:
            connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, client

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Leave out the traceback of a client that went away or speaks another protocol."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
