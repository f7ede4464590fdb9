"""What the verbs of the registry share: options, the registry that they name, and a version for programs."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.config.arguments import storage_options
from headway.core.format import UNKNOWN
from headway.models.versions import open_registry
from headway.models.versions.registry import VARIABLE

if TYPE_CHECKING:
    from headway.models.versions import ModelVersion, Registry

VersionArgument = Annotated[
    str,
    typer.Argument(metavar="NAME@VERSION", help="A version by number or alias; the newest for a name."),
]
KeyOption = Annotated[
    Path | None,
    typer.Option("--key", metavar="PEM", help="Public key that has to verify the signatures."),
]


def open_named(place: str | None, option: list[str] | None) -> Registry:
    """Open the registry of a command line."""
    place = place or os.environ.get(VARIABLE)
    return open_registry(place, storage_options(option, place))


def summary(version: ModelVersion) -> dict[str, Any]:
    """Return a version for programs, without the long parts."""
    keys = ("name", "number", "time", "by", "source", "parent", "licence")
    plain = asdict(version)
    return {
        **{key: plain[key] for key in keys},
        "bytes": version.total_bytes,
        "signed": version.is_signed,
        "manifest_sha256": version.sha256,
    }


def moment(seconds: float) -> str:
    """Return a time of a record for people."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
    except (ValueError, OSError, OverflowError):
        return UNKNOWN
