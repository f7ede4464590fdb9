"""Options, question and launcher that `headway launch` and `headway launch bench` share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.clouds.launchers.ending import exit_code_of, only_one, wait_for_end
from headway.clouds.launchers.launcher import OVER, find_launcher
from headway.clouds.launchers.record import read_handle, write_handle
from headway.clouds.supply.fit import image_problems
from headway.config.checks.contradictions import combined
from headway.core.command_line import print_table, writing
from headway.core.console import exact_results, notice, print_line, print_text
from headway.core.errors import ConfigError
from headway.core.files.atomic import atomic_write
from headway.core.user_command import suggest
from headway.run.directory.audit import record
from headway.run.directory.run_directory import LAUNCH_FILE

if TYPE_CHECKING:
    from headway.clouds.launchers.job import Job
    from headway.clouds.launchers.launcher import Handle, Launcher

OnOption = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="TARGET",
        help="slurm, kubernetes, jobset, trainjob, pytorchjob, rayjob, ray, sky, metaflow, or package.module:NAME.",
    ),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the files, or write them to --out; contact no cluster.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder for the files; a folder in the run directory when not given.",
    ),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait until the job is over, and end as the run did; Ctrl-C leaves the job.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def start(job: Job, on: str, table: Callable[[Job], tuple[list[list[str]], str]], *, dry_run: bool, yes: bool) -> None:
    """Launch a job, or show what it would be.

    Args:
        job: The job.
        on: Name of the launcher.
        table: Returns what the launch will take, in rows, and why something of it is unknown.
        dry_run: Print the files, or write them to the job's folder.
        yes: Do not ask.

    Raises:
        ConfigError: the launcher or the cluster refuses it; nothing was started then.
    """
    launcher = find_launcher(on)
    launch = job.config.launch
    problems = [*launcher.problems(job), *image_problems(launch.image, job.gpus, launch.accelerator)]
    if problems:
        raise combined(problems)
    files = launcher.files(job)
    if dry_run:
        show_or_write(files, job.out)
        return
    rows, note = table(job)
    print_table(["LAUNCH", job.name], [["run", str(job.config.run_directory)], ["target", on], *rows])
    if note:
        print_line(f"n/a: {note}")
    _check_not_launched(job)
    launcher.check(job)
    if not yes and not agrees("launch", "Launch?"):
        raise typer.Exit(1)
    _submit(launcher, job, files)


def show_or_write(files: Mapping[str, str | bytes], out: Path | None) -> None:
    """Print the files of a launch, or write them to a folder."""
    if out is not None:
        write_files(files, out)
        notice(f"wrote {', '.join(str(out / name) for name in files)}")
        return
    with exact_results():
        for name, content in files.items():
            text = content if isinstance(content, str) else f"({len(content):,} bytes)"
            print_text(f"# {name}\n{text}\n")


def write_files(files: Mapping[str, str | bytes], folder: Path) -> None:
    """Write the files of a launch into a folder."""
    for name, content in files.items():
        mode = "w" if isinstance(content, str) else "wb"
        with writing(folder / name), atomic_write(folder / name, mode) as file:
            file.write(content)


def gpus_text(job: Job) -> str:
    """Return the GPUs of a job in words."""
    accelerator = job.config.launch.accelerator or ("GPU" if job.gpus else "CPU")
    return f"{job.gpus} x {accelerator} each, {job.gpus * job.machines} in all" if job.gpus else "none"


def agrees(action: str, question: str) -> bool:
    """Ask the user.

    Raises:
        ConfigError: standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody is there to agree to the {action}", where="standard input", fix="add -y")
    return typer.confirm(question, default=True)


def _check_not_launched(job: Job) -> None:
    """Check that an earlier launch of the run is over.

    Raises:
        ConfigError: it is not.
    """
    directory = job.directory
    handle = read_handle(directory)
    if handle is None:
        return
    state = find_launcher(handle.target).status(handle)
    if state.state in OVER:
        return
    fix = f"headway launch cancel {directory}, or choose another name=..."
    if state.state == "unknown":  # two jobs of one run would be worse than a question
        fix += f"; if that cluster is gone, remove {directory / LAUNCH_FILE}"
    raise ConfigError(
        f"the run is launched already, as {handle.id} on {handle.target}: {state.engine}",
        where=str(directory),
        fix=fix,
    )


def _submit(launcher: Launcher, job: Job, files: Mapping[str, str | bytes]) -> None:
    directory = job.directory
    with only_one(directory, "launch"):
        _check_not_launched(job)
        write_files(files, job.folder)
        handle = launcher.submit(job, job.folder)
        write_handle(directory, handle)
    command = suggest("launch" if job.suite is None else "launch bench")
    record(
        directory, "launch", anchors=True, target=handle.target, id=handle.id, machines=handle.machines, command=command
    )
    notice(f"launched {handle.id} on {handle.target}; headway launch status {directory} shows how it is")


def wait_for_job(run: Path, launcher: Launcher, handle: Handle) -> None:
    """Wait until a job is over, and end this command with the run's exit code.

    Raises:
        typer.Exit: the job is over.
    """
    notice(f"waiting for {handle.id} on {handle.target}; Ctrl-C leaves it running")
    state = wait_for_end(launcher, handle)
    code = exit_code_of(state, handle, run)
    notice(f"{handle.id} on {handle.target} is over: {state.engine}; exit code {code}")
    raise typer.Exit(code)
