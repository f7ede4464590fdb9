"""`headway chaos`: campaigns of kills, and drills of a recovery."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headway.config.arguments import ConfigArgument, OverridesArgument, load, seconds_of
from headway.core.command_line import DefaultVerb, JsonOption, RunArgument, print_json, print_table, writing
from headway.core.console import print_lines
from headway.core.errors import ConfigError
from headway.core.files.atomic import write_json
from headway.core.files.scratch import scratch_folder
from headway.data.epochs import in_steps
from headway.lab.chaos.drill import drill as run_drill
from headway.lab.chaos.drill_report import HEADERS, drill_page, rows, verdict
from headway.lab.chaos.report import render, run_campaign

HELP = """Kill a training run again and again, and check that its result is as if nothing had happened.

Trains the config once undisturbed, then in many runs with kills (SIGKILL) of workers, of the processes that \
write checkpoints and of the supervisor, in every phase of a step and of a save, on changing numbers of workers. The \
SHA-256 of weights, moments and cursor must be equal, the ledger must prove that no row was lost or repeated, and \
every checkpoint must verify. Control runs that lose something on purpose must be detected. The recovery time, from a \
kill to the next new step, is reported, and checked if a limit is given. With --machines whole machines fail instead, \
and come back. The config's own run directory is not touched.

[bold]Examples[/bold]

headway chaos elastic train.steps=40 --kills 20
headway chaos elastic train.steps=40 --kills 500 --workers 1,2,4 --seed 7
headway chaos elastic train.steps=40 --kills 50 --remote s3://bucket/chaos
headway chaos elastic train.steps=80 --kills 100 --changes
headway chaos elastic train.steps=400 --machines 3 --kills 20
headway chaos elastic train.steps=40 --max-recovery 10s --max-overhead 2s

Ctrl-C ends a campaign, which then reports its results so far.

Exit codes: 0 all equal, 1 a difference, or an exceeded limit, 2 usage or config, 130 stopped before its end.
"""


_DRILL_HELP = """Let copies of a run lose what a run can lose, restore them, and compare the bits. The run is only read.

Every copy begins with the newest checkpoint of RUN and trains until its third save. One continues undisturbed. Every \
other one is killed right before its last save, and loses its disk, its remote checkpoints, or its disk and the newest \
remote checkpoint. Then the same command continues it. Its last state must be that of the undisturbed copy. The report \
has the recovery time (RTO: to the first new step) and the recovery point (RPO: steps that were lost).

[bold]Examples[/bold]

headway chaos drill runs/quickstart
headway chaos drill runs/quickstart --remote s3://bucket/drills --every 20
headway chaos drill runs/mine --loss disk --max-recovery 60s --output drill

Exit codes: 0 all equal, 1 a difference, or an exceeded limit, 2 usage or config, 4 no checkpoint.
"""

_GROUP_HELP = """Kill a training run again and again, and check that its result is as if nothing had happened.

With a config it is a campaign of kills, whose options headway chaos run -h lists. With drill, copies of a run \
lose their disk or remote checkpoints, and the report says how they came back.

[bold]Examples[/bold]

headway chaos elastic train.steps=40 --kills 20
headway chaos drill runs/quickstart
"""

chaos = typer.Typer(
    cls=DefaultVerb,
    no_args_is_help=True,
    help=_GROUP_HELP,
    subcommand_metavar="CONFIG|COMMAND [ARGS]...",
)


@chaos.command("drill", help=_DRILL_HELP)
def drill(
    run: RunArgument,
    *,
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Folder for remote checkpoints of the copies (s3://..., file:///...); a folder here when not given.",
        ),
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=2, help="Steps between saves; as in the run's config when not given."),
    ] = None,
    loss: Annotated[
        list[str] | None,
        typer.Option(help="disk, remote or newest; may be repeated. All when not given."),
    ] = None,
    max_recovery: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Limit on the recovery time, e.g. 60s."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New folder for copies, logs, drill.html and drill.json."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway chaos drill`."""
    limit = None if max_recovery is None else seconds_of(max_recovery, "--max-recovery", "60s")
    with nullcontext(output) if output else scratch_folder("headway-drill-") as folder:
        result = run_drill(run, folder, remote=remote, every=every, losses=loss)
    result.max_recovery_seconds = limit
    if output is not None:
        with writing(output):
            write_json(output / "drill.json", result.record())
            (output / "drill.html").write_text(drill_page(result), encoding="utf-8")
    if as_json:
        print_json(result.record())
    else:
        print_table(HEADERS, rows(result), numeric=range(1, 6))
        print_lines("\n".join([*(f"FAIL  {problem}" for problem in result.problems), verdict(result)]))
    if result.problems:
        raise typer.Exit(1)


@chaos.command("run", help=HELP)
def campaign(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    kills: Annotated[
        int,
        typer.Option(min=1, help="Minimum number of kills in all; runs are added until it is reached."),
    ] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the campaign; an equal seed gives equal kills.")] = 0,
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="Numbers of workers to alternate between, as in 1,2,4.")
    ] = "1",
    remote: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Folder for remote checkpoints (s3://..., file:///...): uploads are killed too, and local checkpoints"
            " are lost.",
        ),
    ] = None,
    max_recovery: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Limit on the time from a kill to the next new step (recovery time objective), e.g. 10s.",
        ),
    ] = None,
    max_overhead: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Limit on Headway's part of it: starting new workers, and finding and loading a checkpoint.",
        ),
    ] = None,
    machines: Annotated[
        int,
        typer.Option(
            min=1,
            help="With more than one: kill, freeze, cut off and stop whole machines instead. As root they are network"
            " namespaces, else processes on loopback.",
        ),
    ] = 1,
    controls: Annotated[bool, typer.Option(help="Also check that losses are detected.")] = True,
    changes: Annotated[
        bool,
        typer.Option(
            "--changes",
            help="Every run, also the undisturbed one, accepts a larger batch, more data and shorter rows while it runs"
            " (without controls).",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="New folder for runs, logs and chaos.json, which are kept."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway chaos`."""
    try:
        counts = [int(count) for count in workers.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise ConfigError(f"'{workers}' is not a list of numbers of workers", where="--workers", fix="--workers 1,2,4")
    limits = (
        None if max_recovery is None else seconds_of(max_recovery, "--max-recovery", "10s"),
        None if max_overhead is None else seconds_of(max_overhead, "--max-overhead", "2s"),
    )
    loaded = in_steps(load(config, overrides))
    with nullcontext(output) if output else scratch_folder("headway-chaos-") as folder:
        result = run_campaign(
            loaded,
            folder,
            kills=kills,
            seed=seed,
            worker_counts=counts,
            controls=controls,
            remote=remote,
            changes=changes,
            machines=machines,
        )
    result.max_recovery_seconds, result.max_overhead_seconds = limits
    if output:
        with writing(output / "chaos.json"):
            write_json(output / "chaos.json", result.record())
    if as_json:
        print_json(result.record())
    else:
        print_lines(render(result))
    if result.stopped and not result.failed:
        raise KeyboardInterrupt
    if not result.passed:
        raise typer.Exit(1)
