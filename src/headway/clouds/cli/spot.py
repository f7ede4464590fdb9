"""`headway spot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.clouds.cli.policy import (
    GrowBelowOption,
    MinPauseOption,
    MinRunOption,
    PauseAboveOption,
    ResumeBelowOption,
    policy_of,
)
from headway.clouds.launchers.held import LaunchCommand
from headway.clouds.launchers.job import Job, load_job
from headway.clouds.launchers.price_feeds import PlaceFeed, command_feed, file_feed, moving_of, replay_feed
from headway.clouds.launchers.record import save_seconds_of
from headway.clouds.launchers.spot import SpotJob, hold_by_price
from headway.clouds.prices.refresh import PriceTimer
from headway.clouds.spot.places import parse_place
from headway.config.arguments import seconds_of
from headway.config.units import Interval
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.clouds.launchers.price_feeds import Feed
    from headway.clouds.spot.places import Place

HELP = """Train while spot machines are cheap: pause above a price, resume below another, grow, and move.

What follows -- is the command: headway train, which trains on this machine, or headway launch, whose job on a cluster \
is then saved, removed, and launched again. The run continues where it stopped. With --grow-below it uses all workers \
or machines while the price is very low. With several --place it moves to another region or cloud where that pays, by \
its remote tier.

[bold]Examples[/bold]

headway spot runs/a --pause-above 3 --resume-below 2 --prices prices.csv \\
-- headway train a.yaml
headway spot runs/a --pause-above 3 --resume-below 2 --prices prices.csv \\
-- headway launch a.yaml --on slurm
headway spot runs/a --pause-above 25 --resume-below 20 --grow-below 12 \\
--machines 1:4 --prices prices.csv -- headway launch a.yaml --on kubernetes
headway spot runs/a --pause-above 25 --resume-below 20 --refresh "1 h" \\
--place "aws/us-east-1/p5.48xlarge/spot traffic=0" \\
--place "aws/us-west-2/p5.48xlarge/spot traffic=0.02" \\
-- headway launch a.yaml --on sky

Exit codes: those of the command; 2 usage, or a policy that cannot be carried out; 75 stopped while paused, or with \
the run saved and its job removed.
"""


def spot(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory of the command.")],
    command: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Command that trains.")] = None,
    *,
    pause_above: PauseAboveOption,
    resume_below: ResumeBelowOption,
    grow_below: GrowBelowOption = None,
    workers: Annotated[
        str | None,
        typer.Option("--workers", metavar="MIN:MAX", help="Usual and largest number of workers."),
    ] = None,
    machines: Annotated[
        str | None,
        typer.Option("--machines", metavar="MIN:MAX", help="The same for machines of a launch."),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option("--prices", help="File whose newest entry is the current price."),
    ] = None,
    price_command: Annotated[
        str | None, typer.Option("--price-command", help="Shell command that prints the price.")
    ] = None,
    zone: Annotated[str | None, typer.Option("--zone", help="Zone, if the file has several.")] = None,
    replay: Annotated[
        float | None,
        typer.Option("--replay", min=1.0, help="Play --prices from its beginning, so many times as fast."),
    ] = None,
    place: Annotated[
        list[str] | None,
        typer.Option(
            "--place",
            metavar="'OFFER KEY=VALUE ...'",
            help="An offer whose price counts, what the launch changes to get there, and traffic=USD, the price of a"
            " GiB between it and the remote tier; may be repeated.",
        ),
    ] = None,
    refresh: Annotated[
        str | None,
        typer.Option("--refresh", help="Fetch new prices of the places so often."),
    ] = None,
    move_time: Annotated[
        str | None,
        typer.Option("--move-time", help="Time of a move, where none was measured."),
    ] = None,
    state_gib: Annotated[
        float | None,
        typer.Option("--state-gib", min=0.0, help="Size of a checkpoint, where none was measured."),
    ] = None,
    every: Annotated[str, typer.Option("--every", help="Time between two checks of the price.")] = "1 min",
    min_run: MinRunOption = "10 min",
    min_pause: MinPauseOption = "5 min",
) -> None:
    """Run `headway spot`."""
    policy = policy_of(pause_above, resume_below, grow_below, min_run, min_pause)
    places = tuple(parse_place(text) for text in place or ())
    sizes = _range(workers, "--workers")
    launch = _launch(ctx, command or [], places, sizes, _range(machines, "--machines"))
    job = SpotJob(run, command or [], policy, sizes, seconds_of(every, "--every"), launch)
    job.check()
    given = None if move_time is None or state_gib is None else (seconds_of(move_time, "--move-time"), state_gib)
    if sum((prices is not None, price_command is not None, bool(places))) != 1:
        raise ConfigError(
            "the price comes from a file, a command or places",
            where="--prices, --price-command, --place",
            fix="give one of them",
        )
    if price_command is not None:
        feed = command_feed(price_command)
    elif prices is not None:
        feed = file_feed(prices, zone) if replay is None else replay_feed(prices, replay, zone)
    else:
        feed = _place_feed(job, places, refresh, given)
    raise typer.Exit(hold_by_price(job, feed))


def _launch(
    ctx: typer.Context,
    command: list[str],
    places: tuple[Place, ...],
    workers: tuple[int, int] | None,
    machines: tuple[int, int] | None,
) -> LaunchCommand | None:
    """Return the launch that a command is; None if it trains on this machine.

    The verb `launch` itself reads its words, so nothing is understood twice.
    """
    from dataclasses import replace

    at = next((at for at, word in enumerate(command) if word == "launch" and _is_headway(command[:at])), None)
    if at is None:
        if len(places) > 1 or machines is not None:
            option = "--place" if machines is None else "--machines"
            what = "a command that trains on this machine stays here"
            raise ConfigError(what, where=option, fix="... -- headway launch my.yaml --on sky")
        return None
    root: Any = ctx.find_root().command
    group = root.get_command(ctx, "launch")

    def read(words: Sequence[str]) -> dict[str, Any]:
        own = list(words[at + 1 :])
        if own[:1] == ["run"]:
            del own[0]
        if not own or own[0] in group.commands:
            raise ConfigError(
                "only the launch of a run is held", where="COMMAND", fix="... -- headway launch my.yaml --on slurm"
            )
        found: dict[str, Any] = group.commands["run"].make_context("headway launch", own).params
        if found["dry_run"] or found["smoke"]:
            what = "--dry-run and --smoke start no run that could be held"
            raise ConfigError(what, where="COMMAND", fix="leave them out")
        return found

    def parse(words: Sequence[str]) -> Job:
        found = read(words)
        job = load_job(found["config"], found["overrides"] or [], found["machines"])
        return replace(job, save_seconds=save_seconds_of(job.config.run_directory))

    return LaunchCommand(tuple(command), read(command)["on"], parse, places, workers, machines)


def _is_headway(words: Sequence[str]) -> bool:
    """Return whether words end with the command: `headway`, a path to it, or `python -m headway`."""
    return bool(words) and Path(words[-1]).name == "headway"


def _place_feed(
    job: SpotJob, places: tuple[Place, ...], refresh: str | None, given: tuple[float, float] | None
) -> Feed:
    """Return the feed of the places.

    Raises:
        ConfigError: prices of one cannot be fetched.
    """
    offers = [place.offer for place in places]
    timer = None if refresh is None else PriceTimer(offers, seconds_of(refresh, "--refresh"))
    if job.launch is None:
        return PlaceFeed(places, timer=timer)
    usual = job.launch.job()
    checkpoint = usual.config.checkpoint
    interval = (checkpoint.remote and checkpoint.remote.every) or checkpoint.every
    every = interval if isinstance(interval, Interval) else None
    workers = usual.config.parallel.workers * usual.machines
    return PlaceFeed(places, workers, moving=lambda: moving_of(job.run, every, given), run=job.run, timer=timer)


def _range(text: str | None, option: str) -> tuple[int, int] | None:
    if text is None:
        return None
    fewest, colon, most = text.partition(":")
    if not colon or not fewest.isdecimal() or not most.isdecimal():
        what = f"'{text}' is not two numbers of {option.lstrip('-')}"
        raise ConfigError(what, where=option, fix=f"{option} 1:8")
    return int(fewest), int(most)
