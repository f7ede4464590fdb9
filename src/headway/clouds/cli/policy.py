"""Options of a policy on spot machines, which `headway spot` carries out and `headway cost simulate` tries."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.clouds.spot.policy import SpotPolicy
from headway.config.arguments import seconds_of

PauseAboveOption = Annotated[float, typer.Option("--pause-above", help="Pause above this price, $/hour.")]
ResumeBelowOption = Annotated[float, typer.Option("--resume-below", help="Resume below this price.")]
GrowBelowOption = Annotated[float | None, typer.Option("--grow-below", help="Use all workers below this price.")]
MinRunOption = Annotated[str, typer.Option("--min-run", help="Minimum time between a start and a pause.")]
MinPauseOption = Annotated[str, typer.Option("--min-pause", help="Minimum length of a pause.")]


def policy_of(above: float, below: float, grow_below: float | None, min_run: str, min_pause: str) -> SpotPolicy:
    """Return the policy that the options describe."""
    times = (seconds_of(min_run, "--min-run"), seconds_of(min_pause, "--min-pause"))
    return SpotPolicy(above, below, grow_below, *times)
