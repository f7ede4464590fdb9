"""`headway cost`: what a run has cost, and what policies would cost on recorded prices."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from headway.clouds.cli.policy import (
    GrowBelowOption,
    MinPauseOption,
    MinRunOption,
    PauseAboveOption,
    ResumeBelowOption,
    policy_of,
)
from headway.clouds.spot.made_trace import as_csv, make_trace
from headway.clouds.spot.simulate import Work
from headway.clouds.spot.simulate import simulate as compare
from headway.clouds.spot.traces import read_trace
from headway.config.arguments import seconds_of
from headway.core.command_line import JsonOption, print_json, print_table
from headway.core.console import notice, print_line, print_text
from headway.core.format import UNKNOWN, counted, format_seconds, format_usd
from headway.run.directory.account import account_of, fleet_account
from headway.telemetry.record import is_run, open_run

cost = typer.Typer(no_args_is_help=True, help="Show what a run has cost, and simulate policies on spot machines.")


@cost.command()
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory, or a folder of them.")],
    as_json: JsonOption = False,
) -> None:
    """Show what a run has spent until now, by part and by attempt; of a folder of runs, each run and the sum.

    [bold]Examples[/bold]

    headway cost show runs/mine
    headway cost show runs
    """
    if run.is_dir() and not is_run(run):
        _show_fleet(run, as_json)
    else:
        _show_run(run, as_json)


def _show_fleet(folder: Path, as_json: bool) -> None:
    """Show the runs of a folder, the one that has cost most first."""
    fleet = fleet_account(folder)
    if as_json:
        print_json([{**asdict(one), "total_usd": one.total_usd} for one in fleet])
        return
    if not fleet:
        notice(f"no runs in {folder}")
        return
    headers = ["RUN", "STATE", "ATTEMPTS", "TIME", "$/HOUR", "COST", "COMPUTE", "HELD", "STORAGE", "BUDGET"]
    rows = []
    for one in fleet:
        parts = (one.total_usd, one.compute_usd, one.idle_usd, one.storage_usd, one.budget_usd)
        price = UNKNOWN if one.usd_per_hour is None else f"{one.usd_per_hour:,.2f}"
        usd = [UNKNOWN if part is None else format_usd(part) for part in parts]
        rows.append([one.name, one.state, str(one.attempts), format_seconds(one.seconds), price, *usd])
    print_table(headers, rows, numeric=(2, *range(4, 10)))
    known = [one.total_usd for one in fleet if one.total_usd is not None]
    unknown = f" · {len(fleet) - len(known)} n/a" if len(known) < len(fleet) else ""
    print_line(f"{counted(len(fleet), 'run')} · cost {format_usd(sum(known))}{unknown}")


def _show_run(run: Path, as_json: bool) -> None:
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
        usd = account.attempts_usd.get(attempt.number)
        kept = record.attempt_records[attempt.number]
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
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Recorded prices of one machine.")],
    *,
    hours: Annotated[float, typer.Option("--hours", min=0.01, help="Hours of training without interruptions.")],
    on_demand: Annotated[float, typer.Option("--on-demand", min=0.0001, help="Price on demand, $/hour.")],
    pause_above: PauseAboveOption,
    resume_below: ResumeBelowOption,
    grow_below: GrowBelowOption = None,
    growth: Annotated[
        float, typer.Option("--growth", min=1.0, help="Speed and price with all workers, as a multiple.")
    ] = 1.0,
    start: Annotated[
        str, typer.Option("--start", help="Time from the start of a machine to the first step.")
    ] = "2 min",
    save: Annotated[str, typer.Option("--save", help="Time of a save.")] = "30 s",
    save_every: Annotated[str, typer.Option("--save-every", help="Time between saves.")] = "10 min",
    min_run: MinRunOption = "10 min",
    min_pause: MinPauseOption = "5 min",
    zone: Annotated[str | None, typer.Option("--zone", help="Zone, if the trace has several.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a policy on recorded spot prices with on-demand machines and with spot machines that are never paused.

    TRACE is a CSV file with the columns time (a date, or seconds) and usd_per_hour, or what
    `aws ec2 describe-spot-price-history` prints.

    [bold]Examples[/bold]

    headway cost simulate prices.json --hours 40 --on-demand 55.04 \\
    --pause-above 25 --resume-below 20
    """
    policy = policy_of(pause_above, resume_below, grow_below, min_run, min_pause)
    policy.check()
    work = Work(hours * 3600, seconds_of(start, "--start"), seconds_of(save, "--save"),
                seconds_of(save_every, "--save-every"), growth)  # fmt: skip
    found = compare(read_trace(trace, zone), work, policy, on_demand)
    fixed, naive, _ = found
    savings = [(outcome.saving(fixed), outcome.saving(naive)) for outcome in found]
    if as_json:
        names = ("saving_on_demand", "saving_never_paused")
        print_json(
            [{**asdict(one), **dict(zip(names, two, strict=True))} for one, two in zip(found, savings, strict=True)]
        )
        return
    rows = [
        [
            outcome.policy,
            f"${outcome.usd:,.2f}",
            format_seconds(outcome.seconds) if outcome.finished else "never done",
            str(outcome.interruptions),
            format_seconds(outcome.lost_seconds),
            *(UNKNOWN if saving is None else f"{saving:.0%}" for saving in saved),
        ]
        for outcome, saved in zip(found, savings, strict=True)
    ]
    headers = ["POLICY", "COST", "TIME", "INTERRUPTIONS", "LOST", "SAVES VS ON DEMAND", "VS NEVER PAUSED"]
    print_table(headers, rows, numeric=(1, 3, 5, 6))


@cost.command()
def trace(
    *,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same prices.")] = 0,
    days: Annotated[float, typer.Option("--days", min=0.1, max=366, help="Length.")] = 7.0,
    spikes: Annotated[int, typer.Option("--spikes", min=0, max=1000, help="Number of spikes.")] = 3,
    usd: Annotated[float, typer.Option("--usd", min=0.0001, max=1000, help="The usual price, $/hour.")] = 2.0,
    every: Annotated[str, typer.Option("--every", help="Time between two prices.")] = "10 min",
) -> None:
    """Print made prices with spikes, to try a policy where none were recorded.

    [bold]Examples[/bold]

    headway cost trace --seed 7 > week.csv
    headway cost simulate week.csv --hours 100 --on-demand 6 \\
    --pause-above 2.80 --resume-below 2.50
    """
    every_seconds = seconds_of(every, "--every")
    print_text(as_csv(make_trace(seed, days=days, spikes=spikes, usual_usd=usd, every_seconds=every_seconds)).rstrip())
