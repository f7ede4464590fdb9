"""What the verbs share: the config argument, overrides, and JSON on standard output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headway.config import Config

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, for example train.steps=50.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)]


def load(path: Path, overrides: list[str] | None) -> Config:
    """The resolved config behind a verb's arguments."""
    from headway.config import load_config

    return load_config(path, overrides or [])


def print_json(value: Any) -> None:
    """Result for programs, on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))
