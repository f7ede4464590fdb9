"""`headway train`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.checkpoint.format.manifest import step_name, step_of
from headway.cli.start.dial import DepthOption, MinutesOption, SizeOption, dial_of
from headway.config.arguments import PRESET_NAMES, OverridesArgument, load
from headway.core.console import print_lines
from headway.core.coordination.launch_code import leaving_code
from headway.core.coordination.launch_variables import LEAD, NODE
from headway.core.coordination.launched import machines_from_environment
from headway.core.errors import ConfigError
from headway.core.process.variables import ONE_THREAD, with_variables
from headway.core.startup.launch_secret import take_secret
from headway.core.user_command import suggest_next

if TYPE_CHECKING:
    from headway.api.start.recipe.recipe import Dial
    from headway.config import Config

TextOrConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER|CONFIG",
        help=f"Folder of text; or YAML file of the run, or a built-in preset ({PRESET_NAMES}).",
    ),
]

HELP = """Train a language model or a task of your own, or continue a run that was interrupted.

Of a folder of text it makes a plan itself: shape, batch, rate and steps for the minutes that you give, or for a size. \
Then it samples and exports too.

[bold]Examples[/bold]

headway train my-texts --minutes 10
headway train my-texts --size 30M --workers 2
headway train quickstart train.steps=50 name=short
headway train my.yaml --workers 2
headway train elastic --workers 1:2
headway train my.yaml --machines 2 --node 0 --lead node-0:29450
srun --nodes 2 --ntasks-per-node 1 headway train my.yaml
torchrun --nproc-per-node 2 -m headway train my.yaml
headway train my.yaml name=lower --from runs/my --step 1000 --accept-changes

A worker that dies or hangs is replaced, and the run continues from the newest checkpoint (config section supervise).
After an interruption, the same command continues from the newest checkpoint that verifies.
Watch it with headway top or headway ui.
Exit codes: 0 done, 2 usage or config, 3 data, 4 checkpoint or run directory, 5 diverged, 6 budget \
reached, 7 cancelled, 75 preempted (run again).
"""


def train(
    config: TextOrConfigArgument,
    overrides: OverridesArgument = None,
    *,
    machines: Annotated[
        str | None,
        typer.Option(
            "--machines",
            metavar="N or MIN:MAX",
            help="Number of machines, each started with this command (HEADWAY_MACHINES).",
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node",
            metavar="K",
            help="Number of this machine, from 0; machine 0 leads (HEADWAY_NODE).",
        ),
    ] = None,
    lead: Annotated[
        str | None,
        typer.Option("--lead", metavar="HOST:PORT", help="Address at which machine 0 listens (HEADWAY_LEAD)."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            "-w",
            metavar="N or MIN:MAX",
            help="Worker processes on this machine; MIN:MAX also continues with fewer when some are lost.",
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
    begin_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN|CHECKPOINT",
            help="Begin a new run from a checkpoint of another one, the newest or that of --step.",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Step of the checkpoint for --from.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print what would run.")] = False,
    minutes: MinutesOption = None,
    size: SizeOption = None,
    depth: DepthOption = None,
) -> None:
    """Run `headway train`."""
    take_secret()  # before anything starts a process
    for variable, value in ((NODE, node), (LEAD, lead)):
        if value is not None:
            os.environ[variable] = value
    # The end of a dry run is not the end of the run, for which a lead makes one before it prepares the data.
    with nullcontext() if dry_run else leaving_code():
        numbers = {"workers": workers, "machines": machines or machines_from_environment()}
        chosen = [f"parallel.{key}={value}" for key, value in numbers.items() if value is not None]
        words = [*(overrides or []), *chosen]
        dial = _dial(config, minutes, size, depth)
        source = _source(begin_from, step)
        loaded = _config_for(config, words, dial, restart) if dial else load(config, words)
        if dry_run:
            from headway.api.start.preview import describe_dry_run

            for part in describe_dry_run(
                loaded,
                restart=restart,
                accept_changes=accept_changes,
                start_epoch=start_epoch,
                begin_from=source,
            ):
                print_lines(part)
            return
        from headway.api.training import train as run

        run(
            loaded,
            restart=restart,
            accept_changes=accept_changes,
            start_epoch=start_epoch,
            begin_from=source,
            own_process=True,
        )
        if dial is not None:
            from headway.cli.start.folder import finish

            finish(loaded, config, dial)
            return
        if loaded.task is not None:
            suggest_next(("report", loaded.run_directory, "see its curves"))
            return
        suggest_next(
            ("chat", loaded.run_directory, "talk to it"),
            ("export", loaded.run_directory, "make a folder for transformers"),
        )


def _source(begin_from: Path | None, step: int | None) -> Path | None:
    """Return the run or the checkpoint from which a run is to begin; None if it begins at step 0.

    Raises:
        ConfigError: a step is given without a run.
    """
    if step is None:
        return begin_from
    if begin_from is None or step_of(begin_from.name) is not None:
        raise ConfigError(
            "--step names a checkpoint of the run that --from names",
            where="--step",
            fix="--from RUN --step N; headway checkpoints restore RUN --step N goes back within a run",
        )
    return begin_from / "checkpoints" / step_name(step)


def _dial(config: Path, minutes: float | None, size: str | None, depth: int | None) -> Dial | None:
    """Return the dial where the first word is a folder of text; None where it is a config.

    Raises:
        ConfigError: a dial is given for a config, or there is neither a folder nor a config.
    """
    if config.suffix not in (".yaml", ".yml") and str(config) not in PRESET_NAMES.split(", "):
        if not config.exists():
            raise ConfigError(
                "there is no such folder of text, and no such config",
                where=str(config),
                fix=f"give a folder of text, a YAML file, or a built-in preset: {PRESET_NAMES}",
            )
        from headway.cli.start.folder import is_folder_of_text

        if is_folder_of_text(config):
            return dial_of(minutes, size, depth)
    if (minutes, size, depth) != (None, None, None):
        raise ConfigError(
            "--minutes, --size and --depth plan a run on a folder of text, and this is a config",
            where=str(config),
            fix="train.steps=..., or headway train FOLDER",
        )
    return None


def _config_for(folder: Path, overrides: list[str], dial: Dial, restart: bool) -> Config:
    with with_variables(ONE_THREAD):  # NumPy's threads would prevent copies of this process
        from headway.cli.start.folder import config_for

        return config_for(folder, overrides, dial, restart=restart)
