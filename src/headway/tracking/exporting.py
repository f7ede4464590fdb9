"""The exporter as a command: it serves or writes until it is stopped."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.console import notice, warning
from headway.core.errors import ConfigError, fix_for
from headway.core.format import counted, format_seconds
from headway.tracking.exporter import check_library, registry_of, write_textfile
from headway.tracking.http_server import Address, RunsHandler, RunsServer, check_exposure, parse_address
from headway.tracking.runs_folder import RunsFolder
from headway.tracking.sweep import sweep_forever

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


def export(
    folder: Path,
    *,
    serve: str | None,
    textfile: Path | None,
    every_seconds: float,
    sweep: bool = False,
    tls: tuple[Path, Path] | None = None,
) -> None:
    """Export the runs of a folder until Ctrl-C.

    Args:
        folder: The folder of runs.
        serve: Address to serve at.
        textfile: Folder to write to.
        every_seconds: Time between two writes.
        sweep: Send the end of runs whose machine died to their trackers.
        tls: Certificate and key of the server as PEM files; None serves without TLS, on the loopback only.

    Raises:
        ConfigError: a library, a folder, the token or the certificate is missing, or the port is in use.
        CheckpointError: there is no such folder of runs.
    """
    check_library()
    address = None if serve is None else parse_address(serve)
    token = None if address is None else check_exposure(address, tls)
    if textfile is not None and not textfile.is_dir():
        raise ConfigError(
            f"there is no folder '{textfile}'",
            where=f"--textfile {textfile}",
            fix="name the folder of the node exporter's --collector.textfile.directory",
        )
    runs = RunsFolder(folder)
    with ExitStack() as stack:
        if address is not None:
            server = stack.enter_context(MetricsServer(address, None, token=token, tls=tls))
            threading.Thread(target=server.serve_forever, name="headway-metrics", daemon=True).start()
            stack.callback(server.shutdown)
        # Now, not in the first scrape, which would take longer than scrapers wait: the histories may be long.
        started = time.monotonic()
        found = runs.refresh()
        took = format_seconds(time.monotonic() - started)
        if address is not None:
            server.registry = registry_of(runs)
            notice(f"{counted(len(found), 'run')} of {folder} read in {took}; metrics are at {server.url}metrics")
        if sweep:
            sweep_forever(folder)
        # As Ctrl-C: service managers and containers stop it so.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            if textfile is None:
                threading.Event().wait()
            else:
                _write_forever(runs, textfile, every_seconds)


def _write_forever(runs: RunsFolder, directory: Path, every_seconds: float) -> None:
    """Write again and again. The first write must succeed; later trouble, as a full disk, is reported once."""
    try:
        path = write_textfile(runs, directory)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be written: {error.strerror or error}",
            where=str(directory),
            fix=fix_for(error, "name a folder that may be written to"),
        ) from None
    notice(f"metrics are written to {path} every {every_seconds:g} s")
    failed = False
    while True:
        time.sleep(every_seconds)
        try:
            write_textfile(runs, directory)
            if failed:
                notice(f"metrics are written again: {path}")
            failed = False
        except OSError as error:
            if not failed:
                warning(f"metrics cannot be written ({error.strerror or error}); tried again: {path}")
            failed = True
