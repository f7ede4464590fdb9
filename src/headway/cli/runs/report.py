"""`headway report`: an HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import RunArgument, check_folder, writing
from headway.core.console import print_line
from headway.telemetry.report import write_report


def report(
    run: RunArgument,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; report.html in the run directory when not given."),
    ] = None,
) -> None:
    """Write a run's report: one HTML page with its curves, data, attempts and environment. The run may still be active.

    [bold]Examples[/bold]

    headway report runs/quickstart
    """
    check_folder(output)
    with writing(output or run):
        print_line(str(write_report(run, output)))
