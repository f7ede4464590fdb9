"""`headway top`: all runs of a folder, live in the terminal, or for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import JsonOption, print_json
from headway.core.errors import ConfigError
from headway.core.exposure import tls_pair
from headway.tracking.exporting import export
from headway.tracking.live_table import as_json, print_once, show_live
from headway.tracking.runs_folder import RunsFolder


def top(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run directories.")] = Path("runs"),
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the table once.")] = False,
    json: JsonOption = False,
    every: Annotated[
        float | None, typer.Option(help="Seconds between readings: 3 for the table, 15 for --textfile.", min=0.1)
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Also show runs that ended more than a day ago.")] = False,
    serve: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Serve metrics for Prometheus; :9400 listens on this machine only."),
    ] = None,
    textfile: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write metrics for the textfile collector of the node exporter.")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="With --serve or --textfile: run `headway track --sweep` every five minutes."),
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the server (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate (PEM).")] = None,
) -> None:
    """Show all runs of a folder: state, step, loss, speed, cost, last save and alerts.

    With --serve or --textfile it exports their metrics to Prometheus instead. To serve other machines, --serve needs a
    certificate, and a token in HEADWAY_METRICS_TOKEN.

    [bold]Examples[/bold]

    headway top
    headway top runs --once
    headway top runs --json
    headway top runs --serve :9400
    headway top runs --serve :9400 --sweep
    headway top runs --textfile /var/lib/node_exporter/textfile
    """
    if serve is not None or textfile is not None:
        export(
            folder,
            serve=serve,
            textfile=textfile,
            every_seconds=every or 15.0,
            sweep=sweep,
            tls=tls_pair(tls_cert, tls_key),
        )
        return
    if sweep:
        raise ConfigError(
            "only an exporter sweeps", where="--sweep", fix=f"headway track --sweep {folder}, or add --serve :9400"
        )
    import sys

    runs = RunsFolder(folder, newest=True, ended_seconds=float("inf") if all_ else 86400.0)
    if json:
        print_json(as_json(runs.refresh()))
    elif once or not sys.stdout.isatty():
        print_once(runs)
    else:
        show_live(runs, every or 3.0)
