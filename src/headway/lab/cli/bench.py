"""`headway bench`: measure which strategy is fastest on this machine, and what each needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from headway.core.command_line import (
    DefaultVerb,
    JsonOption,
    SuiteArgument,
    SuiteOverridesArgument,
    print_json,
    print_table,
    writing,
)
from headway.core.console import notice, print_line, print_lines, warning
from headway.core.errors import ConfigError
from headway.core.format import counted
from headway.lab.bench.collect import collect as read
from headway.lab.bench.comparison import HEADERS as CHANGES
from headway.lab.bench.launchers import MACHINES
from headway.lab.bench.machines import SuiteMachines, find_membership, measure_for_lead
from headway.lab.bench.report import load_report, write_report
from headway.lab.bench.results import schema as of_result
from headway.lab.bench.runner import Matrix, MeasureOptions, open_matrix, parse_part, run_matrix, stoppable, to_do
from headway.lab.bench.suite import ON_CPU, load_suite
from headway.telemetry.hardware import local_accelerators

HELP = """Measure a matrix of strategies, numbers of workers, models, precisions, micro-batches and row lengths.

headway bench SUITE [KEY=VALUE ...]: SUITE is the name of a built-in suite, or a YAML file.

[bold]Built-in suites[/bold]

smoke: a check that everything works; under a minute on an idle machine.
strategies: ddp, fsdp, zero1 to zero3 and DeepSpeed's on 1, 2 and 4 workers.
scaling: weak and strong scaling of ddp and zero3.
memory: the largest model that fits, by strategy.

[bold]Examples[/bold]

headway bench smoke
headway bench strategies --dry-run
headway bench strategies workers=1,2,4,8 model=350m repeats=5
headway bench strategies strategy=ddp,zero3 optimizer.name=muon -o bench/muon
headway bench my.yaml \\
--launcher "torchrun --standalone --nproc-per-node {workers} --no-python"
headway bench report bench/strategies --compare bench/last-week
headway launch bench strategies --on slurm --parts 4
headway launch bench scaling --on kubernetes machines=1,2 launch.image=r/hw
headway bench collect runs/bench-scaling -o bench/cluster

Options of a measurement: headway bench run -h. Every cell runs in separate processes; a cell that fails, hangs or \
runs out of memory is a result too. The same command, without --again and --failed-again, continues a stopped run.
"""

_RUN_HELP = """Measure a suite; `run` may be left out.

Overrides are keys of the suite (workers=1,2 repeats=5), or dotted keys of the config (optimizer.name=muon). Results \
are in the folder's cells/, logs in logs/, the report in report.html, report.md and metrics.csv.

[bold]Examples[/bold]

headway bench run strategies --dry-run
headway bench strategies workers=2 --retries 1 --timeout 300
headway bench strategies --failed-again

Exit codes: 0 measured, even if some cells failed; 1 all cells failed; 2 usage or config; 75 stopped (run again, \
without --again and --failed-again).
"""


bench = typer.Typer(cls=DefaultVerb, no_args_is_help=True, help=HELP, subcommand_metavar="SUITE|COMMAND [ARGS]...")

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of results.")]


@bench.command("run", help=_RUN_HELP)
def run(
    suite: SuiteArgument,
    overrides: SuiteOverridesArgument = None,
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder of results; bench/SUITE when not given."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells and the missing measurements, and stop.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure everything again; to continue after a stop, omit this option.")
    ] = False,
    failed_again: Annotated[
        bool,
        typer.Option("--failed-again", help="Measure failed cells again; to continue after a stop, omit this option."),
    ] = False,
    part: Annotated[
        str,
        typer.Option(metavar="K/N", help="Measure every N-th cell, from the K-th on, into a folder part-K."),
    ] = "1/1",
    retries: Annotated[int | None, typer.Option(min=0, help="Further tries after a failed one.")] = None,
    timeout: Annotated[int | None, typer.Option(min=1, help="Time limit of a measurement in seconds.")] = None,
    launcher: Annotated[
        str,
        typer.Option(
            help="local, torchrun, machines (each of them runs this command), or a command with {workers} that starts"
            " that many processes.",
        ),
    ] = "local",
    print_results: Annotated[
        bool | None,
        typer.Option(
            "--print-results/--no-print-results",
            help="Also print results for logs; the default if standard error is not a terminal.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway bench run`."""
    given = {"retries": retries, "timeout_seconds": timeout}
    options = [f"{key}={value}" for key, value in given.items() if value is not None]
    accelerator = bool(local_accelerators())
    loaded = load_suite(suite, [*(overrides or []), *options], accelerator=accelerator)
    number, count = parse_part(part)
    folder = output or Path("bench") / loaded.name
    if count > 1:  # two processes never measure into one folder
        folder /= f"part-{number}"
    measure_options = MeasureOptions(again, failed_again)
    membership = None if dry_run or launcher != MACHINES else find_membership(loaded)
    if membership is not None and not membership.role.leads:
        with stoppable(measure_options):
            measure_for_lead(membership)
        return
    printed = not sys.stderr.isatty() if print_results is None else print_results
    with writing(folder), stoppable(measure_options), SuiteMachines.of(membership) as machines:
        if machines is not None:
            machines.gather(folder)
        matrix = open_matrix(loaded, folder, launcher, measure_options, (number, count), machines=machines)
        if loaded.description.endswith(ON_CPU):
            notice("no accelerator here: measuring the settings that the suite has for processors (on_cpu)")
        if dry_run:
            _list_cells(matrix, as_json)
            return
        results = run_matrix(matrix, print_results=printed)
    _report_results(folder, as_json)
    if not any(result.status == "ok" for result in results):
        raise typer.Exit(1)


@bench.command()
def report(
    folder: FolderArgument,
    compare: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of earlier results to compare with."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write metrics.csv, report.md and report.html from the results in a folder, and print a summary.

    [bold]Examples[/bold]

    headway bench report bench/strategies
    headway bench report bench/after --compare bench/before
    """
    _report_results(folder, as_json, compare)


@bench.command()
def collect(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Logs, folders, launched runs, - (standard input), kubectl:POD, slurm:JOB, ray:JOB.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of results.")],
    as_json: JsonOption = False,
) -> None:
    """Find the results that were printed to logs, and write them to a folder of results.

    Other text before, between or after the lines of a log does no harm. A result with missing lines is reported and
    skipped.

    [bold]Examples[/bold]

    headway bench collect pod.log logs/ --output bench/cluster
    kubectl logs job/bench | headway bench collect - --output bench/cluster
    headway bench collect "kubectl:-n ml job/bench" --output bench/cluster
    headway bench collect runs/bench-scaling --output bench/cluster
    headway bench collect slurm:1234 --output bench/cluster

    Exit codes: 0 found, 1 nothing found, 2 usage, 3 a result cannot be read.
    """
    with writing(output):
        found = read(sources, output)
    for place in found.broken:
        warning(f"lines of a result are missing: {place}")
    if found.replaced:
        older = counted(found.replaced, "older repeat")
        warning(f"{older} replaced by newer ones of the same cell and number; use one folder per source to keep them")
    if as_json:
        names = [result.cell.name for result in found.results]
        print_json(
            {
                "sources": found.sources,
                "cells": names,
                "broken": found.broken,
                "replaced": found.replaced,
                "output": str(output),
            }
        )
    else:
        print_line(f"{counted(len(found.results), 'cell')} from {counted(found.sources, 'log')}, in {output}")
    if not found.results:
        raise typer.Exit(1)


@bench.command()
def schema() -> None:
    """Print the JSON Schema of a result.

    [bold]Examples[/bold]

    headway bench schema > result.schema.json
    """
    print_json(of_result())


def _report_results(folder: Path, as_json: bool, compare: Path | None = None) -> None:
    """Write the report, and print a summary of it."""
    found = load_report(folder, compare)
    if as_json:
        results = [result.model_dump(mode="json") for result in found.results]
        print_json(
            {
                "findings": found.findings,
                "summary": found.summary,
                "changes": found.changes,
                "other_conditions": found.other_conditions,
                "results": results,
            }
        )
    else:
        figures = ("Tokens/s", "Step p50", "Peak memory", "Of ideal", "Communication")
        rows = [row[:-1] for row in found.rows(figures)]
        print_table(["CELL", "RESULT", *(name.upper() for name in figures)], rows, numeric=range(2, 7))
        if found.changes:
            print_line()
            print_lines(found.summary or "")
            print_table([name.upper() for name in CHANGES[:-1]] + ["DIFFERENCE"], found.changes, numeric=range(1, 5))
            if found.other_conditions:
                print_lines(found.other_conditions)
        print_lines("\n" + "\n".join(found.findings))
    try:
        with writing(folder):
            files = write_report(folder, compare)
    except ConfigError as error:
        notice(f"no report but {folder / 'metrics.csv'}: {error.what} ({error.fix})")
        return
    notice(f"report: {next(file for file in files if file.suffix == '.html')}")


def _list_cells(matrix: Matrix, as_json: bool) -> None:
    missing = [planned.key for _, planned in to_do(matrix)]
    rows = []
    for planned in matrix.cells:
        what = f"{missing.count(planned.key)} of {matrix.suite.repeats}"
        reason = planned.excluded or planned.refused
        kind = "left out" if planned.excluded else "refused" if planned.refused else what
        rows.append([planned.cell.name, kind, reason or planned.faults])
    if as_json:
        keys = ("name", "to_measure", "reason")
        print_json({"output": str(matrix.folder), "cells": [dict(zip(keys, row, strict=True)) for row in rows]})
    else:
        print_table(["CELL", "TO MEASURE", "REASON"], rows)
