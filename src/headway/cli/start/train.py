"""`headway train`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Annotated

import typer

from headway.command_line import ConfigArgument, OverridesArgument, load, suggest_next
from headway.core.console import print_lines
from headway.core.coordination.launch_code import leaving_code
from headway.core.coordination.launch_variables import LEAD, NODE
from headway.core.coordination.launched import machines_from_environment
from headway.core.startup.garbage import pause_collection
from headway.core.startup.launch_secret import take_secret
from headway.core.startup.torch_libraries import load_libraries_ahead

HELP = """Train a language model, or continue a run that was interrupted.

[bold]Examples[/bold]

headway train configs/quickstart.yaml
headway train configs/quickstart.yaml train.steps=50 name=short
headway train configs/quickstart.yaml --workers 2
headway train configs/quickstart.yaml determinism=elastic --workers 1:2
headway train configs/quickstart.yaml --machines 2 --node 0 --lead node-0:29450
srun --nodes 2 --ntasks-per-node 1 headway train configs/quickstart.yaml
torchrun --nproc-per-node 2 -m headway train configs/quickstart.yaml

A worker that dies or hangs is replaced, and the run continues from the newest checkpoint (config section supervise).
After an interruption, the same command continues from the newest checkpoint that verifies.
Watch it with headway top or headway ui.
Exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint or run directory, 5 diverged, 6 budget \
reached, 7 cancelled, 75 preempted (run again).
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("train", help=HELP)(train)


def train(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    machines: Annotated[
        str | None,
        typer.Option(
            "--machines",
            metavar="N or MIN:MAX",
            help="Number of machines, each started with this command (HEADWAY_MACHINES).",
            show_default=False,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="K",
            help="Number of this machine, from 0; machine 0 leads (HEADWAY_NODE).",
            show_default=False,
        ),
    ] = None,
    lead: Annotated[
        str | None,
        typer.Option(
            "--lead", metavar="HOST:PORT", help="Address at which machine 0 listens (HEADWAY_LEAD).", show_default=False
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-w",
            metavar="N or MIN:MAX",
            help="Worker processes on this machine; MIN:MAX also continues with fewer when some are lost.",
            show_default=False,
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Move an earlier run of this name aside and start from step 0.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Continue although the config or the data differ from those of the run."),
    ] = False,
    start_epoch: Annotated[
        bool, typer.Option("--start-epoch", help="Begin a new epoch of all data at the step where the run continues.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would run.")] = False,
) -> None:
    """Run `headway train`."""
    take_secret()  # before anything starts a process
    if not dry_run:
        pause_collection()
        load_libraries_ahead()
    for variable, value in ((NODE, node), (LEAD, lead)):
        if value is not None:
            os.environ[variable] = value
    # The end of a dry run is not the end of the run, for which a lead makes one before it prepares the data.
    with nullcontext() if dry_run else leaving_code():
        numbers = {"workers": workers, "machines": machines or machines_from_environment()}
        chosen = [f"parallel.{key}={value}" for key, value in numbers.items() if value is not None]
        loaded = load(config, [*(overrides or []), *chosen], in_steps=dry_run)
        if dry_run:
            from headway.run.session.attempt import RunOptions
            from headway.start.preview import preview

            print_lines(preview(loaded, RunOptions(restart, accept_changes, start_epoch)))
            return
        from headway.api import train as run

        run(loaded, restart=restart, accept_changes=accept_changes, start_epoch=start_epoch, own_process=True)
        suggest_next(
            ("chat", loaded.run_directory, "talk to it"),
            ("export", loaded.run_directory, "make a folder for transformers"),
        )
