"""`headway doctor`."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.config.arguments import OverridesArgument, load
from headway.config.units import parse_count
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import is_first_worker, print_line, print_lines
from headway.core.errors import ConfigError
from headway.core.format import counted, format_bytes
from headway.lab.doctor.bandwidth import Communication
from headway.lab.doctor.examine import Examination
from headway.lab.doctor.examine import as_json as result
from headway.lab.doctor.findings import Examined, Finding, worst
from headway.parallel.nccl import Profile

HELP = """Show what this machine has, what is wrong with it, and what to set.

With a config, its folders, its NCCL profile and the lifecycle rules of its bucket are checked too. Nothing is changed;
unknown values are n/a.

[bold]Examples[/bold]

headway doctor
headway doctor quickstart --disk --arithmetic
headway doctor --json
headway doctor --communication --workers 2 --device cpu --sizes 64Ki,1Mi,16Mi
torchrun --nnodes 2 ... -m headway doctor --communication
headway doctor --profile ethernet --export

Exit codes: 0 no errors, perhaps warnings; 1 an error was found; 2 usage or config.
"""

_MARKS = {"ok": "ok     ", "note": "note   ", "warning": "WARNING", "error": "ERROR  "}
_INDENT = " " * 11


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="YAML file of a run.")] = None,
    overrides: OverridesArgument = None,
    *,
    communication: Annotated[
        bool, typer.Option("--communication", help="Measure communication between workers instead.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-w", min=1, help="Number of workers; one per GPU, or 2, when not given."),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the workers: auto, cuda or cpu.")] = "auto",
    sizes: Annotated[
        str | None,
        typer.Option(help="Sizes of the arrays in bytes, e.g. 64Ki,1Mi,16Mi."),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="NCCL profile: auto, none, ethernet, ..."),
    ] = None,
    export: Annotated[bool, typer.Option("--export", help="Print the NCCL profile as shell commands instead.")] = False,
    disk: Annotated[bool, typer.Option("--disk", help="Also write and sync 64 MiB in each folder.")] = False,
    arithmetic: Annotated[
        bool, typer.Option("--arithmetic", help="Also multiply matrices and update weights; loads PyTorch.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run `headway doctor`."""
    if device not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"there is no device '{device}'", where="--device", fix="auto, cuda or cpu")
    loaded = load(config, overrides, trains=False) if config is not None else None
    wanted = profile or (loaded.parallel.nccl_profile if loaded else "auto")
    determinism = loaded.determinism if loaded else "run"
    if communication:
        _communication(workers, device, sizes, profile=wanted, determinism=determinism, as_json=as_json)
        return

    folders = {"runs": loaded.runs, "store": loaded.data.store} if loaded else {"here": Path()}
    examination = Examination(
        folders=folders,
        wanted_profile=wanted,
        determinism=determinism,
        write_test=disk,
        arithmetic=arithmetic,
        config=loaded,
    )
    if export:
        _export(examination.profile)
        return
    _examine(examination, as_json)


def _examine(examination: Examination, as_json: bool) -> None:
    examined = examination.examine()
    try:
        profile = examination.profile
    except ConfigError:  # there is a finding about it
        profile = None
    if as_json:
        print_json(result(examined, profile))
    else:
        _print(examined, profile)
    if worst(examined) == "error":
        raise typer.Exit(1)


def _print(examined: list[Examined], profile: Profile | None) -> None:
    for subject in examined:
        print_line(subject.subject)
        for finding in subject.findings:
            _print_finding(finding)
        if subject.subject == "NCCL profile" and profile is not None:
            for setting in profile.settings:
                print_line(f"{_INDENT}{setting.name}={setting.value}  {setting.reason}")
            for left in profile.left_open:
                print_line(f"{_INDENT}left open  {left}")
    levels = [finding.level for subject in examined for finding in subject.findings]
    errors = levels.count("error")
    warnings = levels.count("warning")
    print_lines(
        f"\n{counted(errors, 'error')}, {counted(warnings, 'warning')}, {counted(levels.count('note'), 'note')}"
    )


def _print_finding(finding: Finding) -> None:
    print_line(f"  {_MARKS[finding.level]}  {finding.what}")
    if finding.level == "ok":
        return
    for label, text in (("seen", finding.where), ("do", finding.fix), ("run", finding.command)):
        if text:
            print_line(f"{_INDENT}{label + ':':<6}{text}")


def _export(profile: Profile) -> None:
    """Print the profile for a shell: `eval "$(headway doctor --export)"`."""
    print_line(f"# NCCL profile {profile.name}: {profile.reason}")
    added = profile.environment(os.environ)
    for setting in profile.settings:
        if setting.name in added:
            # Always quoted: zsh expands a bare "=eth0" to the path of a program.
            print_line(f"export {setting.name}='{setting.value}'  # {setting.reason}")
        else:
            print_line(f"# {setting.name} stays {shlex.quote(os.environ[setting.name])}, as set in the environment")
    for left in profile.left_open:
        print_line(f"# left open: {left}")


def _communication(
    workers: int | None, device: str, sizes: str | None, *, profile: str, determinism: str, as_json: bool
) -> None:
    parsed = _sizes(sizes) if sizes is not None else None
    from headway.lab.doctor.workers import run_communication

    found = run_communication(workers, device, parsed, profile, determinism=determinism)
    if not is_first_worker():
        return
    if as_json:
        print_json(asdict(found))
    else:
        _print_communication(found)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(parse_count(part.strip(), "bytes") for part in text.split(","))
    except ValueError as error:
        raise ConfigError(str(error), where="--sizes", fix="--sizes 64Ki,1Mi,16Mi") from None
    if min(sizes) < 4:
        raise ConfigError("an array has at least one number of 4 bytes", where="--sizes", fix="--sizes 64Ki")
    return sizes


def _print_communication(found: Communication) -> None:
    where = counted(found.machines, "machine")
    print_line(f"{found.workers} workers on {where}, {found.device}, {found.backend}")
    print_line()
    headers = ["COLLECTIVE", "SIZE", "MEDIAN MS", "P10 MS", "P90 MS", "REPEATS", "ALGORITHM GB/S", "BUS GB/S"]
    rows = [
        [
            item.operation,
            format_bytes(item.size_bytes),
            *(f"{1e3 * value:.3f}" for value in (item.median_seconds, item.p10_seconds, item.p90_seconds)),
            str(item.repeats),
            *(f"{1e-9 * value:.3f}" for value in (item.algorithm_bytes_per_second, item.bus_bytes_per_second)),
        ]
        for item in found.measurements
    ]
    print_table(headers, rows, numeric=range(1, len(headers)))
    widest = max(found.clocks, key=lambda clock: abs(clock.seconds))
    print_lines(
        f"\nclocks: worker {widest.worker} differs most from worker 0, by {1e3 * widest.seconds:+.3f} ms"
        f" (known to {1e3 * widest.uncertainty_seconds:.3f} ms)"
    )
    if any(clock.is_wrong for clock in found.clocks):
        print_line("WARNING: clocks differ by more than a second; run headway doctor on each machine")
