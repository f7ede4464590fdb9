"""`headway launch bench`: measure a suite on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headway.clouds.cli.launching import DryRunOption, OnOption, OutOption, YesOption, gpus_text, start
from headway.command_line import SuiteArgument, SuiteOverridesArgument
from headway.core.errors import ConfigError
from headway.core.user_command import remember_config
from headway.start.bench_job import bench_job

if TYPE_CHECKING:
    from headway.clouds.launchers.job import Job


def bench(
    suite: SuiteArgument,
    overrides: SuiteOverridesArgument = None,
    *,
    on: OnOption,
    parts: Annotated[int, typer.Option("--parts", min=1, help="Jobs that share the cells: an array of Slurm.")] = 1,
    dry_run: DryRunOption = False,
    out: OutOption = None,
    yes: YesOption = False,
) -> None:
    """Measure a suite of `headway bench` on machines of a cluster: as many as its largest cell has.

    The first machine leads. Results are in its log, too: where no folder comes back, headway bench collect reads them
    there.

    [bold]Examples[/bold]

    headway launch bench strategies --on slurm --parts 4 launch.slurm.account=me
    headway launch bench smoke --on slurm machines=1,2,4
    headway launch bench smoke --on kubernetes --dry-run launch.image=r/headway
    headway bench collect runs/bench-smoke --output bench/smoke
    """
    remember_config(suite, list(overrides or []))
    if parts > 1 and on != "slurm":
        raise ConfigError(f"{on} has no arrays of jobs", where="--parts", fix="--parts 1, or --on slurm")
    job = bench_job(suite, list(overrides or []), parts, out)
    start(job, on, _table, dry_run=dry_run, yes=yes)


def _table(job: Job) -> tuple[list[list[str]], str]:
    what = [["suite", job.name.removeprefix("bench-")], ["parts", str(job.parts)], ["machines", job.machine_range]]
    return [*what, ["GPUs", gpus_text(job)]], ""
