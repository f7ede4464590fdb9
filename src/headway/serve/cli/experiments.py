"""`headway serve plan` and `headway serve report`: experiments before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.command_line import JsonOption, print_json, print_table, writing
from headway.core.console import notice, print_line

EffectOption = Annotated[
    float, typer.Option(min=0.0001, max=1.0, help="Difference of the shares of successes that matters.")
]
AlphaOption = Annotated[
    float, typer.Option(min=0.0001, max=0.5, help="Largest probability of a decision without a difference.")
]


def plan(
    split: Annotated[str, typer.Option(help="Two aliases with their shares.")] = "prod=90,candidate=10",
    *,
    base_rate: Annotated[float, typer.Option(help="Share of successes of the first alias.")],
    difference: Annotated[float, typer.Option(help="How much more the second one has; may be negative.")] = 0.02,
    effect: EffectOption = 0.02,
    alpha: AlphaOption = 0.05,
    horizon: Annotated[int, typer.Option(min=100, max=10**7, help="Outcomes after which it is given up.")] = 200_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    json: JsonOption = False,
) -> None:
    """Simulate experiments, and print how many outcomes a decision takes.

    [bold]Examples[/bold]

    headway serve plan --base-rate 0.3
    headway serve plan --split prod=50,new=50 --base-rate 0.02 --json
    """
    from headway.serve.experiment.planning import Assumed
    from headway.serve.experiment.planning import plan as simulated
    from headway.serve.experiment.sequential import SequentialTest
    from headway.serve.experiment.split import Split

    found = simulated(Split.parse(split), SequentialTest(effect, alpha), Assumed(base_rate, difference, horizon, seed))
    if json:
        print_json(found)
        return
    outcomes = found["outcomes"]
    rates = " and ".join(f"{arm} {rate:.1%}" for arm, rate in found["rates"].items())
    print_line(f"with {rates} of successes, in {found['experiments']} simulated experiments:")
    print_line(f"  decided after {outcomes['median']:,} outcomes (median), {outcomes['mean']:,.0f} (mean)")
    print_line(f"  90 % of them between {outcomes['low']:,} and {outcomes['high']:,} outcomes")
    print_line(f"  decided within {found['horizon']:,} outcomes: {found['decided']:.1%}")
    print_line(f"without a difference, decided all the same: {found['false_alarms']:.1%}")


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the experiment.")],
    *,
    output: Annotated[Path | None, typer.Option(help="Write a page (HTML) to this file.")] = None,
    json: JsonOption = False,
) -> None:
    """Show what an experiment has decided, when and why. It may be running.

    [bold]Examples[/bold]

    headway serve report trials/one
    headway serve report trials/one --output report.html
    headway serve report trials/one --json
    """
    from headway.core.files.atomic import atomic_write
    from headway.serve.experiment.report import headline, page, table_of
    from headway.serve.experiment.report import report as read

    found = read(folder)
    if output is not None:
        with writing(output), atomic_write(output, "w") as file:
            file.write(page(found))
        notice(f"wrote {output}")
    if json:
        print_json(found)
        return
    print_line(headline(found))
    headers, rows = table_of(found)
    print_table(headers, rows, numeric=range(2, 7))
