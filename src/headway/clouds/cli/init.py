"""`headway init`: a project of the team's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.clouds.scaffold.answers import Answers, check_licence, check_name, parse_parts
from headway.clouds.scaffold.project import make_project, update_project
from headway.core.console import notice, print_lines
from headway.core.errors import ConfigError

HELP = """Make a project of your own on Headway: configs, parts with tests, Makefile, cards, containers, CI.

The folder's name is the project's name. The wheel of this Headway goes into vendor/, so the project needs no index \
for it. --update brings the template of a later Headway into a project, without overwriting what was changed.

[bold]Parts[/bold]

docker: an image. github: workflows. bazel: builds and tests. kubernetes, slurm, metaflow: files of headway launch. \
monitoring: dashboards and alerts. all: everything.

[bold]Examples[/bold]

headway init my-lab
headway init my-lab --with docker,github --licence Apache-2.0
headway init my-lab --with all
headway init --update
headway init --update my-lab --with bazel

Exit codes: 0 done, 1 --update left conflicts to solve, 2 usage; nothing was changed then.
"""


def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="FOLDER", help="Folder of the project; with --update, this one by default.")
    ] = None,
    *,
    parts: Annotated[str, typer.Option("--with", metavar="PARTS", help="Parts, with commas between them.")] = "",
    licence: Annotated[
        str | None,
        typer.Option("--licence", metavar="NAME", help="MIT, Apache-2.0, BSD-3-Clause or proprietary."),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="Bring this Headway's template into a project.")] = False,
) -> None:
    """Run `headway init`."""
    wanted = parse_parts(parts)
    if update:
        if licence is not None:
            raise ConfigError(
                "an update keeps the licence", where="--licence", fix="replace LICENSE and its name in pyproject.toml"
            )
        _update(folder or Path(), wanted)
        return
    if folder is None:
        raise ConfigError("the project has no name", where="headway init", fix="headway init my-lab")
    answers = Answers(check_name(folder.resolve().name), wanted, check_licence(licence or "MIT"))
    undone = make_project(answers, folder)
    notice(f"made {folder}, with {', '.join(wanted) or 'no further parts'}")
    _tell(undone)
    print_lines(f"cd {folder}\nmake test\nmake smoke\ngit add --all && git commit -m 'First files'")


def _update(folder: Path, wanted: tuple[str, ...]) -> None:
    _, conflicts, undone = update_project(folder, wanted)
    _tell(undone)
    if conflicts:
        notice(f"both you and the template changed: {', '.join(conflicts)}; solve the marks in them, and commit")
        raise typer.Exit(1)
    notice("updated; git diff shows what changed, and make test whether it holds")


def _tell(undone: list[str]) -> None:
    for one in undone:
        notice(f"not made here: {one}")
