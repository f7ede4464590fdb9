"""The options of a run on a folder of text: one dial."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headway.config.units import parse_count
from headway.core.errors import ConfigError

if TYPE_CHECKING:
    from headway.api.start.recipe.recipe import Dial

MinutesOption = Annotated[
    float | None,
    typer.Option("--minutes", metavar="MINUTES", min=0.5, help="For a folder: time of all; 10 when no dial is given."),
]
SizeOption = Annotated[
    str | None, typer.Option("--size", metavar="PARAMETERS", help="For a folder: size of the model, for example 30M.")
]
DepthOption = Annotated[
    int | None,
    typer.Option("--depth", metavar="LAYERS", min=1, max=64, help="For a folder: layers, each 64 of width."),
]


def dial_of(minutes: float | None, size: str | None, depth: int | None) -> Dial:
    """Return the dial of the options; 10 minutes when none is given.

    Raises:
        ConfigError: two are given, or the size is no number.
    """
    from headway.api.start.recipe.recipe import MINUTES, Dial

    if size is None:
        return Dial(MINUTES if minutes is None and depth is None else minutes, None, depth)
    try:
        return Dial(minutes, parse_count(size, "parameters"), depth)
    except ValueError as error:
        raise ConfigError(str(error), where="--size", fix="--size 30M") from None
