"""Shared parts of the verbs: options, results that are files, and JSON and tables on standard output."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from headway.core.console import print_line, print_lines
from headway.core.errors import ConfigError, fix_for
from headway.core.format import printable

#: Characters outside plain ASCII, which may not be printable.
_NOT_PLAIN = re.compile(r"[^ -~]")

SuiteArgument = Annotated[str, typer.Argument(metavar="SUITE", help="Built-in suite or YAML file.")]
SuiteOverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Overrides, for example workers=1,2."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
RegistryOption = Annotated[
    str | None,
    typer.Option(
        "--registry", metavar="FOLDER|URL", help="The registry; HEADWAY_REGISTRY or the folder registry when not given."
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.")]
StepOption = Annotated[int | None, typer.Option(help="Checkpoint to use; the newest good one when not given.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0.0, help="Temperature of sampling; 0 always takes the likeliest token.")
]
TopPOption = Annotated[
    float, typer.Option(min=0.0, max=1.0, help="Sample only from the likeliest tokens up to this total probability.")
]
DtypeOption = Annotated[Literal["fp32", "bf16"], typer.Option(help="Type of the weights.")]


class DefaultVerb(typer.core.TyperGroup):
    """A group that takes a first word that is not one of its verbs as an argument of its default verb.

    The default verb also runs without any words, unless the group then shows its help.
    """

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the omitted verb."""
        is_omitted = args[0] not in (*self.commands, "-h", "--help") if args else not self.no_args_is_help
        if is_omitted:
            args = [self.default, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


@contextmanager
def writing(output: Path) -> Iterator[None]:
    """Turn an error of the file system at the place of a result into a deliberate one."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the result cannot be written: {error.strerror or error}",
            where=str(output),
            fix=fix_for(error, "free space there, or choose another place"),
        ) from None


def check_folder(output: Path | None) -> None:
    """Check that the place of a result that is one file is not a folder.

    Raises:
        ConfigError: it is a folder.
    """
    if output is not None and output.is_dir():
        raise ConfigError(
            "the result is a file, but this is a folder",
            where=f"--output {output}",
            fix=f"name the file: --output {output / 'report.html'}",
        )


def as_utf8(text: str, where: str) -> str:
    """Check that a text can be encoded, since a shell may pass any bytes, and return it.

    Raises:
        ConfigError: it is not valid UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"not valid UTF-8 at character {error.start:,}", where=where, fix="convert it to UTF-8"
        ) from None
    return text


def print_json(value: Any) -> None:
    """Print a result for programs as JSON on standard output.

    NaN and infinities, which JSON does not have, become null. Control characters and invalid UTF-8 are escaped.
    """
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False, default=str)
    lines = text.split("\n")  # line breaks within texts are escaped already
    text = "\n".join(line if line.isprintable() else _NOT_PLAIN.sub(_as_json, line) for line in lines)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # the locale is not UTF-8
        text = json.dumps(json.loads(text), indent=2)
    print_lines(text)


def _as_json(found: re.Match[str]) -> str:
    return found[0] if printable(found[0]) == found[0] else json.dumps(found[0])[1:-1]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], numeric: Iterable[int] = ()) -> None:
    """Print aligned columns on standard output, never truncated; columns in `numeric` are right-aligned.

    Control characters and line breaks in the text are escaped, since it may come from untrusted files.
    """
    right = set(numeric)
    rows = [[printable(text) for text in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = (
            text.rjust(width) if index in right else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        print_line("  ".join(cells).rstrip())
