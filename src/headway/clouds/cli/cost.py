"""`headway cost`: what a run has cost, and what policies would cost on recorded prices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.command_line import JsonOption, RunArgument, print_json, print_table, seconds_of
from headway.core.console import print_line

cost = typer.Typer(no_args_is_help=True, help="Show what a run has cost, and simulate policies on spot machines.")


@cost.command()
def show(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show what a run has spent until now, by part and by attempt.

    [bold]Examples[/bold]

    headway cost show runs/mine
    """
    from headway.core.format import UNKNOWN, format_seconds
    from headway.cost.spending import format_usd
    from headway.run.directory.account import account_of
    from headway.telemetry.record import open_run

    record = open_run(run)
    account = account_of(record)
    if as_json:
        print_json({**asdict(account), "total_usd": account.total_usd} if account.is_known else None)
        return
    if not account.is_known:
        print_line("n/a: the run knows no price of its machines (cost.usd_per_hour, cost.offer)")
        return
    rows = []
    for attempt in record.attempts:
        usd, kept = account.attempts_usd.get(attempt.number), record.attempt_records[attempt.number]
        price = kept.get("usd_per_hour")
        rows.append(
            [
                str(attempt.number),
                attempt.outcome,
                format_seconds(attempt.seconds),
                f"{price:,.2f}" if isinstance(price, int | float) else UNKNOWN,
                UNKNOWN if usd is None else format_usd(usd),
                str(kept.get("offer") or ""),
                str(kept.get("offer_date") or UNKNOWN) if kept.get("offer") else "",
            ]
        )
    print_table(["ATTEMPT", "OUTCOME", "TIME", "$/HOUR", "COST", "OFFER", "PRICE OF"], rows, numeric=(0, 3, 4))
    print_line(str(account))


@cost.command()
def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Recorded prices of one machine.", show_default=False)],
    *,
    hours: Annotated[float, typer.Option("--hours", min=0.01, help="Hours of training without interruptions.")],
    on_demand: Annotated[float, typer.Option("--on-demand", min=0.0001, help="Price on demand, $/hour.")],
    pause_above: Annotated[float, typer.Option("--pause-above", help="Pause above this price, $/hour.")],
    resume_below: Annotated[float, typer.Option("--resume-below", help="Resume below this price.")],
    grow_below: Annotated[
        float | None, typer.Option("--grow-below", help="Use all workers below this price.", show_default=False)
    ] = None,
    growth: Annotated[
        float, typer.Option("--growth", min=1.0, help="Speed and price with all workers, as a multiple.")
    ] = 1.0,
    start: Annotated[
        str, typer.Option("--start", help="Time from the start of a machine to the first step.")
    ] = "2 min",
    save: Annotated[str, typer.Option("--save", help="Time of a save.")] = "30 s",
    save_every: Annotated[str, typer.Option("--save-every", help="Time between saves.")] = "10 min",
    min_run: Annotated[str, typer.Option("--min-run", help="Minimum time between a start and a pause.")] = "10 min",
    min_pause: Annotated[str, typer.Option("--min-pause", help="Minimum length of a pause.")] = "5 min",
    zone: Annotated[
        str | None, typer.Option("--zone", help="Zone, if the trace has several.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a policy on recorded spot prices with on-demand machines and with spot machines that are never paused.

    TRACE is a CSV file with the columns time (a date, or seconds) and usd_per_hour, or what
    `aws ec2 describe-spot-price-history` prints.

    [bold]Examples[/bold]

    headway cost simulate history.json --hours 40 --on-demand 55.04 --pause-above 25 --resume-below 20
    """
    from headway.clouds.spot.policy import SpotPolicy
    from headway.clouds.spot.simulate import Work
    from headway.clouds.spot.simulate import simulate as compare
    from headway.clouds.spot.traces import read_trace
    from headway.core.format import format_seconds

    policy = SpotPolicy(pause_above, resume_below, grow_below, seconds_of(min_run, "--min-run"),
                        seconds_of(min_pause, "--min-pause"))  # fmt: skip
    policy.check()
    work = Work(hours * 3600, seconds_of(start, "--start"), seconds_of(save, "--save"),
                seconds_of(save_every, "--save-every"), growth)  # fmt: skip
    found = compare(read_trace(trace, zone), work, policy, on_demand)
    if as_json:
        print_json([asdict(outcome) for outcome in found])
        return
    rows = [
        [
            outcome.policy,
            f"${outcome.usd:,.2f}",
            format_seconds(outcome.seconds) if outcome.finished else "never done",
            str(outcome.interruptions),
            format_seconds(outcome.lost_seconds),
        ]
        for outcome in found
    ]
    print_table(["POLICY", "COST", "TIME", "INTERRUPTIONS", "LOST"], rows, numeric=(1, 3))


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.add_typer(cost, name="cost")
