"""`headway ui`: a local page on the runs of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.exposure import tls_pair
from headway.tracking.http_server import Address
from headway.tracking.ui import serve


def ui(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run directories.")] = Path("runs"),
    *,
    port: Annotated[int, typer.Option(help="Port of the page; 0 takes a free one.", min=0, max=65535)] = 9500,
    host: Annotated[str, typer.Option(help="Address to listen on; the default serves this machine only.")] = (
        "127.0.0.1"
    ),
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the server (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")] = None,
) -> None:
    """Show all runs of a folder in a browser: the list, and curves to compare, live.

    It only reads, and loads nothing from the internet. To serve other machines it needs a certificate, and a token in
    HEADWAY_METRICS_TOKEN, for which the page asks.

    [bold]Examples[/bold]

    headway ui
    headway ui runs --port 9501
    ssh -L 9500:localhost:9500 node7 headway ui /shared/runs
    """
    serve(folder, Address(host.strip("[]"), port, "ui"), tls_pair(tls_cert, tls_key))
