"""`headway verify`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from headway.config.arguments import ConfigArgument, OverridesArgument, load
from headway.core.command_line import JsonOption, print_json
from headway.core.console import print_line
from headway.data.epochs import in_steps
from headway.lab.verify.reproducibility import verify as run

HELP = """Check that a config is reproducible bit for bit, as its determinism promises.

Trains the first steps twice, once more with a kill and a resume, and (determinism: elastic) on another number of \
workers, and compares the SHA-256 of every weight and moment after every step. The run directory is not touched.

[bold]Examples[/bold]

headway verify quickstart
headway verify elastic --steps 8 --other-workers 4

Exit codes: 0 all equal, 1 a difference (the first step and tensor are named), 2 usage or config, 130 stopped \
before its end; if a training fails, its own code (3 data, ...).
"""


def verify(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    steps: Annotated[int, typer.Option(min=4, help="Steps of each training.")] = 10,
    other_workers: Annotated[
        int | None,
        typer.Option(min=1, help="Workers of the elastic check."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run `headway verify`."""
    verdict = run(in_steps(load(config, overrides)), steps, other_workers)
    if as_json:
        print_json({"passed": verdict.passed, **asdict(verdict)})
    else:
        for check in verdict.checks:
            found = check.difference
            print_line(f"{'ok  ' if found is None else 'FAIL'}  {check.name}")
            if found is not None:
                print_line(
                    f"      first difference: step {found.step}, tensor {found.tensor} ({found.count} differ there)"
                )
        print_line(f"state after step {verdict.steps}: {verdict.state_sha256}")
    if not verdict.passed:
        raise typer.Exit(1)
