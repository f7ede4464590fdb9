"""`headway launch`: start a run on a cluster, and look after it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headway.api.clusters.bench_job import bench_job
from headway.cli.start.launch_serve import serve
from headway.clouds.cli.launching import (
    DryRunOption,
    OnOption,
    OutOption,
    WaitOption,
    YesOption,
    agrees,
    gpus_text,
    start,
    wait_for_job,
)
from headway.clouds.launchers.ending import find_launched, stop_launched
from headway.clouds.launchers.job import load_job, smoke_job
from headway.clouds.launchers.kubernetes import KubernetesLauncher, yaml_text
from headway.clouds.launchers.launcher import find_launcher
from headway.clouds.launchers.policy import policy_for
from headway.clouds.launchers.record import progress_of, save_seconds_of
from headway.clouds.launchers.roles import role_objects
from headway.clouds.supply.fit import image_row
from headway.config.arguments import ConfigArgument, OverridesArgument, load
from headway.core.audit import user_name
from headway.core.command_line import (
    DefaultVerb,
    JsonOption,
    RunArgument,
    SuiteArgument,
    SuiteOverridesArgument,
    print_json,
    print_table,
)
from headway.core.console import exact_results, notice, print_text
from headway.core.errors import ConfigError, HeadwayError
from headway.core.format import UNKNOWN, counted, format_bytes, format_seconds
from headway.core.user_command import remember_config
from headway.data.epochs import in_steps
from headway.lab.plan.accelerators import parse_machines, this_machine
from headway.lab.plan.prepare import make_plan
from headway.telemetry.summary import loss_text

if TYPE_CHECKING:
    from headway.clouds.launchers.job import Job
    from headway.config import Config

HELP = """Start a run on a cluster: Slurm, Kubernetes, Ray, SkyPilot or Metaflow.

headway launch CONFIG --on TARGET [KEY=VALUE ...]: shows what the run will take, asks, writes the files and submits \
them. The cluster places the machines, and every machine runs the same command.

[bold]Targets[/bold]

slurm: a batch script. kubernetes: an indexed Job; jobset, trainjob, pytorchjob, rayjob: the same pods in the job of a \
controller. ray: a job of a Ray cluster. sky: machines of any cloud. metaflow: a flow that prepares, trains, evaluates \
and exports, here or on Argo Workflows. Or package.module:NAME, a launcher of your own.

[bold]Examples[/bold]

headway launch gpu --on slurm --machines 2 launch.slurm.partition=gpu
headway launch gpu --on kubernetes --dry-run --out dir launch.image=r/headway
headway launch gpu --on kubernetes --smoke -y launch.image=registry/headway
headway launch gpu --on metaflow
headway launch bench strategies --on slurm --parts 4
headway launch serve my-model@prod --on kubernetes --registry s3://bucket/r
headway launch status runs/gpu-1b
headway launch logs runs/gpu-1b --follow
headway launch wait runs/gpu-1b
headway launch cancel runs/gpu-1b
headway launch policy gpu --cloud aws > policy.json

Everything else is in the config section launch: account, image, volumes, secrets by name, queues.
"""

_RUN_HELP = """Launch a config; `run` may be left out.

[bold]Examples[/bold]

headway launch run gpu --on slurm --machines 2:4 --dry-run
headway launch run gpu --on slurm --wait -y

Exit codes: 0 launched or written, 1 declined, 2 usage or config; nothing was started then. With --wait those of \
headway launch wait.
"""


launch = typer.Typer(cls=DefaultVerb, no_args_is_help=True, help=HELP, subcommand_metavar="CONFIG|COMMAND [ARGS]...")


@launch.command("run", help=_RUN_HELP)
def run(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    on: OnOption,
    machines: Annotated[
        str,
        typer.Option(
            "--machines",
            metavar="N or MIN:MAX",
            help="Number of machines with parallel.workers workers each; MIN:MAX also continues with fewer"
            " when some are lost.",
        ),
    ] = "1",
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Launch a run of ten steps on one GPU instead, to try image and volumes.")
    ] = False,
    wait: WaitOption = False,
    dry_run: DryRunOption = False,
    out: OutOption = None,
    yes: YesOption = False,
) -> None:
    """Run `headway launch`."""
    job = _job(config, list(overrides or []), machines, smoke, out)
    start(job, on, _table, dry_run=dry_run, yes=yes)
    if wait and not dry_run:
        wait_for_job(job.directory, *find_launched(job.directory))


def _job(config: Path, overrides: list[str], machines: str, smoke: bool, out: Path | None) -> Job:
    """Return the job of a command line."""
    remember_config(str(config), overrides)
    if smoke:
        return smoke_job(in_steps(load(config, overrides)), out)
    job = load_job(config, overrides, machines)
    loaded = in_steps(job.config)
    return replace(job, config=loaded, save_seconds=save_seconds_of(loaded.run_directory), out=out)


def _table(job: Job) -> tuple[list[list[str]], str]:
    """Return what the launch will take, as far as it is known, and why something is not."""
    memory, hours, price, note = _planned(job)
    launch = job.config.launch
    rows = [
        ["machines", job.machine_range],
        ["GPUs", gpus_text(job)],
        ["image", image_row(launch.image, job.gpus, launch.accelerator)],
        ["workers", f"{counted(job.config.parallel.workers, 'worker')} a machine"],
        ["memory", memory],
        ["time", hours],
        ["price", price],
        ["steps", f"{job.config.train.steps:,}" if job.config.train.steps else UNKNOWN],
        ["time to save", f"{job.grace_seconds} s at a stop"],
    ]
    return rows, note


def _planned(job: Job) -> tuple[str, str, str, str]:
    """Return memory, time and price by `headway plan`, and why something of it is unknown."""
    launch = job.config.launch
    total = job.config.parallel.workers * job.machines
    if job.gpus and launch.accelerator is None:
        return UNKNOWN, UNKNOWN, UNKNOWN, "launch.accelerator does not say which GPUs they are"
    try:
        machines = (
            parse_machines(f"{total}x{launch.accelerator}", job.config.parallel.workers)
            if job.gpus
            else this_machine(total, accelerators=False)
        )
        plan = make_plan(_for_all_machines(job), machines)
    except HeadwayError as error:
        return UNKNOWN, UNKNOWN, UNKNOWN, error.what
    own = plan.own
    memory = UNKNOWN
    if own.memory is not None:
        usable = "" if plan.usable_bytes is None or not job.gpus else f" of {format_bytes(plan.usable_bytes)} usable"
        fits = ", which does not fit" if own.fits is False and job.gpus else ""
        memory = f"{format_bytes(own.memory.peak_bytes)} per worker{usable}{fits}"
    hours = plan.hours(own)
    cost = plan.cost_usd(own)
    unknown = [] if hours is not None else ["the speed of these machines is unknown"]
    if cost is None and plan.price is None:
        unknown.append("neither cost.usd_per_hour nor cost.offer is set")
    time = format_seconds(None if hours is None else hours * 3600)
    return memory, time, UNKNOWN if cost is None else f"${cost:,.2f} at {plan.price}", "; ".join(unknown)


def _for_all_machines(job: Job) -> Config:
    parallel = job.config.parallel
    update = {"workers": parallel.workers * job.machines, "min_workers": None}
    return job.config.model_copy(update={"parallel": parallel.model_copy(update=update)})


@launch.command()
def status(run: RunArgument, json: JsonOption = False) -> None:
    """Show the state of a launched run: what its engine reports, and its progress.

    [bold]Examples[/bold]

    headway launch status runs/gpu-1b
    headway launch status runs/gpu-1b --json
    """
    from dataclasses import asdict

    launcher, handle = find_launched(run)
    state = launcher.status(handle)
    progress = progress_of(run)
    if json:
        print_json({"job": asdict(handle), "engine": asdict(state), "run": asdict(progress)})
        return
    step = "n/a" if progress.step is None else f"{progress.step:,}"
    total = f"/{progress.total_steps:,}" if progress.total_steps else ""
    spent = progress.spent_usd
    saved = progress.saved_seconds_ago
    rows = [
        ["job", f"{handle.id} on {handle.target}"],
        ["state", f"{state.state} ({state.engine})"],
        ["machines", f"{UNKNOWN if state.machines is None else state.machines} of {handle.machines}"],
        ["attempt", UNKNOWN if progress.attempt is None else f"{progress.attempt}, {progress.state}"],
        ["step", f"{step}{total}"],
        ["loss", loss_text(progress.loss)],
        ["eta", format_seconds(progress.eta_seconds)],
        ["spent", UNKNOWN if spent is None else f"${spent:,.2f}"],
        ["last save", UNKNOWN if saved is None else f"{format_seconds(saved)} ago"],
    ]
    print_table(["LAUNCH", run.name], rows)


@launch.command()
def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more, until Ctrl-C.")] = False,
) -> None:
    """Print the output of a launched run.

    [bold]Examples[/bold]

    headway launch logs runs/gpu-1b --follow
    """
    launcher, handle = find_launched(run)
    if code := launcher.logs(handle, follow):
        raise typer.Exit(code)


@launch.command()
def cancel(
    run: RunArgument,
    yes: YesOption = False,
) -> None:
    """Save a launched run, and remove its job. The same launch continues it later.

    [bold]Examples[/bold]

    headway launch cancel runs/gpu-1b
    headway launch cancel runs/gpu-1b -y
    """
    _, handle = find_launched(run)
    if not yes and not agrees("cancel", f"Cancel {run}?"):
        raise typer.Exit(1)
    stop_launched(run, f"by {user_name()}")
    notice(f"{handle.id} is removed from {handle.target}")


@launch.command()
def wait(run: RunArgument) -> None:
    """Wait until the job of a launched run is over, and end as the run did. Ctrl-C leaves the job as it is.

    [bold]Examples[/bold]

    headway launch wait runs/gpu-1b

    Exit codes: those of the run; 1 if it is unknown how the run has ended, 7 if its job was cancelled.
    """
    wait_for_job(run, *find_launched(run))


def policy(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    *,
    cloud: Annotated[
        Literal["aws", "gcp", "azure"] | None,
        typer.Option("--cloud", help="Rights at the buckets that the config names there."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="TARGET",
            help="Roles for people: kubernetes, jobset, trainjob, pytorchjob, rayjob.",
        ),
    ] = None,
    machines: Annotated[str, typer.Option("--machines", metavar="N", help="Number of machines, for --on.")] = "2",
) -> None:
    """Print the least rights that a run needs: of its identity at a cloud's buckets, or of people on Kubernetes.

    With --cloud, the run may write below its own folder of checkpoint.remote.url, and read data.remote and sources
    behind URLs. With --on, three roles for its namespace: viewers follow runs, trainers start and remove them,
    operators manage volumes and quotas too.

    [bold]Examples[/bold]

    headway launch policy my.yaml --cloud aws > policy.json
    headway launch policy my.yaml --on kubernetes > roles.yaml
    """
    if (cloud is None) == (on is None):
        raise ConfigError("one of two is needed", where="--cloud, --on", fix="--cloud aws, or --on kubernetes")
    if cloud is not None:
        found = policy_for(load(config, overrides, trains=False), cloud)
        with exact_results():
            print_text(found.text)
        notice(f"fill in the words in capitals, and apply it with: {found.command}")
        return
    assert on is not None, "one of the two is given"
    launcher = find_launcher(on)
    if not isinstance(launcher, KubernetesLauncher):
        raise ConfigError(f"{on} has no roles for people", where="--on", fix="--on kubernetes, or another of its kinds")
    documents = role_objects(launcher, load_job(config, list(overrides or []), machines))
    with exact_results():
        print_text(yaml_text(documents))
    notice("apply it with: kubectl apply --filename roles.yaml")


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
    start(job, on, _bench_table, dry_run=dry_run, yes=yes)


def _bench_table(job: Job) -> tuple[list[list[str]], str]:
    what = [["suite", job.name.removeprefix("bench-")], ["parts", str(job.parts)], ["machines", job.machine_range]]
    return [*what, ["GPUs", gpus_text(job)]], ""


for verb in (bench, policy, serve):
    launch.command()(verb)
