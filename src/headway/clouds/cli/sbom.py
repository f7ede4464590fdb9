"""`headway sbom`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from headway.clouds.supply.sbom import wheel_sbom
from headway.core.command_line import check_folder, writing
from headway.core.console import exact_results, notice, print_text
from headway.core.files.atomic import write_text

HELP = """Write the bill of materials of a wheel: what it installs, in which version, under which licence.

CycloneDX 1.6 in JSON, with the versions of this environment. Equal wheels give equal bytes; SOURCE_DATE_EPOCH, if it \
is set, is its time.

[bold]Examples[/bold]

headway sbom dist/my_lab-0.1.0-py3-none-any.whl
headway sbom dist/headway-0.1.0-py3-none-any.whl --extra s3 -o dist/sbom.json

Exit codes: 0 written, 2 it is no wheel, or something that it needs is not installed.
"""


def sbom(
    wheel: Annotated[Path, typer.Argument(metavar="WHEEL", help="The file.")],
    extra: Annotated[list[str] | None, typer.Option("--extra", help="Extra of it that counts.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; standard output when not given.")] = None,
) -> None:
    """Run `headway sbom`."""
    check_folder(output)
    found = wheel_sbom(wheel, extra or [])
    text = json.dumps(found, indent=2) + "\n"
    if output is None:
        with exact_results():
            print_text(text)
        return
    with writing(output):
        write_text(output, text)
    notice(f"wrote {output}: {len(found['components'])} packages")
