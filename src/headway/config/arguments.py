"""Arguments of verbs: the config and its overrides, times, options of a storage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.config.checks.own_task import check_is_language_model
from headway.config.loading.document import Entry
from headway.config.loading.load import PRESETS, load_config, parse_override, set_entry
from headway.config.schema import Config
from headway.config.units import parse_seconds
from headway.core.credentials.secrets import redact_argument
from headway.core.errors import ConfigError
from headway.core.storage import check_credentials, scheme_of
from headway.core.user_command import remember_config

#: For help: the built-in presets.
PRESET_NAMES = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))

ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help=f"YAML file of the run, or a built-in preset ({PRESET_NAMES}).",
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, for example train.steps=50."),
]
StorageOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="KEY=VALUE",
        help="Option of fsspec for the URL, as in checkpoint.remote.options; may be repeated.",
    ),
]


def load(path: Path, overrides: list[str] | None, *, trains: bool = True) -> Config:
    """Load the resolved config of a verb's arguments; a verb that does not train needs no length of training.

    `train.epochs` are steps only after `data.epochs.in_steps`, which asks the prepared data.
    """
    remember_config(str(path), overrides or [])
    return load_config(path, overrides or [], trains=trains)


def load_text(path: Path, overrides: list[str] | None, *, trains: bool = True) -> Config:
    """Load the config of a verb that works on text.

    Raises:
        ConfigError: as `load`; or the config has a task of its own.
    """
    loaded = load(path, overrides, trains=trains)
    check_is_language_model(loaded, "data")
    return loaded


def seconds_of(text: str, option: str, example: str = "'10 min'") -> int:
    """Parse a time of an option, as it is written in a config.

    Raises:
        ConfigError: it is not one.
    """
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(str(error), where=option, fix=f"{option} {example}") from None


def storage_options(given: list[str] | None, *places: str | None) -> dict[str, Any]:
    """Parse `--option` for the place among these that is a URL.

    Raises:
        ConfigError: an option has another form, or none of the places is a URL.
    """
    if not given:
        return {}

    urls = [place for place in places if place is not None and scheme_of(place)]
    if not urls:
        raise ConfigError(
            "this option needs a URL, but none is given",
            where=f"--option {redact_argument(given[0])}",
            fix="leave it out; places of a run use the options in its config",
        )
    tree = Entry({}, "--option")
    for text in given:
        try:
            key, value = parse_override(text)
        except ConfigError:
            fix = "for example --option endpoint_url=https://storage.example.org"
            raise ConfigError(
                "it must have the form KEY=VALUE", where=f"--option {redact_argument(text)}", fix=fix
            ) from None
        set_entry(tree, key, value)
    plain: dict[str, Any] = tree.plain()
    check_credentials(urls[0], plain)
    return plain
