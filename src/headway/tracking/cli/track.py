"""`headway track`: send runs to trackers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.core.errors import ConfigError
from headway.tracking.sweep import sweep as sweep_runs
from headway.tracking.track_runs import track_runs

HELP = """Send runs to trackers: MLflow, TensorBoard, W&B, Trackio, OpenTelemetry, or your own.

What was sent is not sent again. Without --to, each run is sent to the trackers of its config (track). An active run
is followed until it ends; a run with `track` in its config needs no such command.

If a machine dies, a tracker shows its runs as running. With --sweep, each run of a folder that is not running is sent
to the trackers that show it so: the rest of its records, and how it stands.

[bold]Examples[/bold]

headway track runs/quickstart --to tensorboard
headway track runs/* --to mlflow --once
headway track runs/tiny --to "{mlflow: {uri: 'http://127.0.0.1:5000'}}"
headway track runs/tiny --to "{wandb: {mode: offline}}"
headway track runs/a --to "{opentelemetry: {endpoint: 'http://otel:4318'}}"
headway track runs/tiny --to mlflow --model runs/tiny/export
headway track --sweep runs
"""


def track(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN", help="Run directories; with --sweep folders of runs."),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="TRACKER",
            help="mlflow, opentelemetry, tensorboard, trackio, wandb or module:Class, or with keys as in `track` of a"
            " config; may be repeated.",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Send what is there now, and do not follow.")] = False,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Send the end of runs whose machine died; RUN is a folder of runs, runs if none."),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Also log the model that `headway export` wrote there, to MLflow.",
        ),
    ] = None,
) -> None:
    """Run `headway track`."""
    if sweep:
        if once or model is not None:
            raise ConfigError(
                "a sweep sends what is there to trackers, and no model",
                where="--sweep",
                fix="headway track --sweep runs, without --once and --model",
            )
        sweep_runs(runs or [Path("runs")], to or [])
        return
    if not runs:
        raise ConfigError("no run is named", where="RUN", fix="headway track runs/NAME, or headway track --sweep runs")
    track_runs(runs, to or [], once=once, model=model)
