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

        registry = self.server.registry
        if not self.names_this_machine():
            self.send(HTTPStatus.FORBIDDEN, b"metrics are at localhost; requests to other names are not answered\n")
        elif not self.has_token():
            self.send(HTTPStatus.UNAUTHORIZED, b"a bearer token is needed\n", WWW_Authenticate="Bearer")
        elif self.path.partition("?")[0] != "/metrics":
            self.send(HTTPStatus.NOT_FOUND, b"metrics are at /metrics\n")
        elif registry is None:
            self.send(HTTPStatus.SERVICE_UNAVAILABLE, b"the runs are being read\n", Retry_After="5")
        else:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self.send(HTTPStatus.OK, encode(registry), content_type)


class MetricsServer(RunsServer):
    """Serves a registry until `shutdown`; the rest is as for `RunsServer`.

    Args:
        address: Where to listen.
        registry: What is served; None answers that it is not yet known.
        token: What scrapers must send.
        tls: Certificate and key as PEM files.
    """

    def __init__(
        self,
        address: Address,
        registry: CollectorRegistry | None,
        *,
        token: str | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.registry = registry
        super().__init__(address, _Handler, token=token, tls=tls)
