"""`headway spot`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.command_line import seconds_of

if TYPE_CHECKING:
    from headway.clouds.launchers.spot import Feed

HELP = """Run a training command while its spot machines are cheap: pause it above a price, resume it below another.

A pause asks the run to save and stop, and starts the command again later: the run continues where it stopped. With \
--grow-below it uses all workers while the price is very low. What follows -- is the command that trains.

[bold]Examples[/bold]

headway spot runs/mine --pause-above 2.50 --resume-below 2.00 --prices prices.csv -- headway train my.yaml
headway spot runs/mine --pause-above 25 --resume-below 20 --price-command ./price.sh -- headway train my.yaml
headway spot runs/mine --pause-above 25 --resume-below 20 --grow-below 12 --workers 1:8 --prices prices.csv -- headway \
train my.yaml determinism=elastic

Exit codes: those of the command; 2 usage, or a policy that cannot be carried out; 75 stopped while paused.
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("spot", help=HELP)(spot)


def spot(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of the command.", show_default=False)],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Command that trains.", show_default=False)
    ] = None,
    *,
    pause_above: Annotated[float, typer.Option("--pause-above", help="Pause above this price, $/hour.")],
    resume_below: Annotated[float, typer.Option("--resume-below", help="Resume below this price.")],
    grow_below: Annotated[
        float | None, typer.Option("--grow-below", help="Use all workers below this price.", show_default=False)
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="MIN:MAX", help="Usual and largest number of workers.", show_default=False),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", help="File whose newest entry is the current price.", show_default=False),
    ] = None,
    price_command: Annotated[
        str | None, typer.Option("--price-command", help="Shell command that prints the price.", show_default=False)
    ] = None,
    zone: Annotated[
        str | None, typer.Option("--zone", help="Zone, if the file has several.", show_default=False)
    ] = None,
    every: Annotated[str, typer.Option("--every", help="Time between two checks of the price.")] = "1 min",
    min_run: Annotated[str, typer.Option("--min-run", help="Minimum time between a start and a pause.")] = "10 min",
    min_pause: Annotated[str, typer.Option("--min-pause", help="Minimum length of a pause.")] = "5 min",
) -> None:
    """Run `headway spot`."""
    from headway.clouds.launchers.spot import SpotJob, hold_by_price
    from headway.clouds.spot.policy import SpotPolicy

    policy = SpotPolicy(pause_above, resume_below, grow_below, seconds_of(min_run, "--min-run"),
                        seconds_of(min_pause, "--min-pause"))  # fmt: skip
    job = SpotJob(run, command or [], policy, _workers(workers), seconds_of(every, "--every"))
    job.check()
    raise typer.Exit(hold_by_price(job, _feed(prices, price_command, zone)))


def _feed(prices: Path | None, price_command: str | None, zone: str | None) -> Feed:
    from headway.clouds.launchers.spot import command_feed, file_feed
    from headway.core.errors import ConfigError

    if (prices is None) == (price_command is None):
        raise ConfigError(
            "the price comes from a file or from a command", where="--prices, --price-command", fix="give one of them"
        )
    return command_feed(price_command) if price_command is not None else file_feed(prices or Path(), zone)


def _workers(text: str | None) -> tuple[int, int] | None:
    from headway.core.errors import ConfigError

    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    if not colon or not fewest.isdecimal() or not most.isdecimal():
        raise ConfigError(f"'{text}' is not two numbers of workers", where="--workers", fix="--workers 1:8")
    return int(fewest), int(most)
