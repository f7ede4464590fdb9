"""The HTTP server of the exporter: `/metrics`."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from headway.tracking.http_server import Address, RunsHandler, RunsServer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class _Handler(RunsHandler):
    server: MetricsServer

    def answer(self) -> None:
        from prometheus_client.exposition import choose_encoder

        if not self.has_token():
            self.send(HTTPStatus.UNAUTHORIZED, b"a bearer token is needed\n", WWW_Authenticate="Bearer")
        elif self.path.partition("?")[0] != "/metrics":
            self.send(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        else:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self.send(HTTPStatus.OK, encode(self.server.registry), content_type)


class MetricsServer(RunsServer):
    """Serves a registry until `shutdown`; the rest is as for `RunsServer`.

    Args:
        address: Where to listen.
        registry: What is served.
        token: What scrapers must send.
        tls: Certificate and key as PEM files.
    """

    def __init__(
        self,
        address: Address,
        registry: CollectorRegistry,
        *,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.registry = registry
        super().__init__(address, _Handler, token=token, tls=tls)
