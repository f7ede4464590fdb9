"""Rendering the template: copier, kept in this file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headway.clouds.scaffold.answers import Answers
from headway.core.errors import HeadwayError, needing
from headway.core.version import __version__

#: The template: `copier.yml` with the questions, and `project/` with the files.
TEMPLATE = Path(__file__).parent / "template"


def render(answers: Answers, folder: Path, template: Path = TEMPLATE, *, generation: str | None = None) -> None:
    """Render the template into a folder; files that are there and are not the template's stay.

    Args:
        answers: The answers.
        folder: Folder of the project; it is made if it is missing.
        template: The template, or a git repository of its generations.
        generation: Tag of the repository.

    Raises:
        ConfigError: copier is missing.
        HeadwayError: the template is wrong, which tests keep from happening.
    """
    copier = _copier()
    with _own_errors(folder):
        copier.run_copy(str(template), folder, **_options(answers, generation))


def update(answers: Answers, folder: Path, generation: str) -> None:
    """Bring a generation of the template into a project, whose repository of generations is at `_src_path`.

    copier renders the old and the new generation, and applies what the project has changed since the old one to the new
    one; where both changed the same lines, both stand between marks of a conflict, as after a merge.

    Args:
        answers: The answers from now on.
        folder: Folder of the project.
        generation: Tag of the repository.

    Raises:
        ConfigError: copier is missing.
        HeadwayError: copier refuses.
    """
    copier = _copier()
    # `_src_path` is relative, so that the project may lie anywhere; copier reads it from the working directory.
    with _own_errors(folder), chdir(folder):
        copier.run_update(".", **_options(answers, generation))


def _options(answers: Answers, generation: str | None) -> dict[str, Any]:
    data = {**asdict(answers), "parts": list(answers.parts), "headway_version": __version__}
    return {"data": data, "vcs_ref": generation, "defaults": True, "overwrite": True, "quiet": True}


def _copier() -> Any:
    with needing("copier", "init", "headway init"):
        import copier
    return copier


@contextmanager
def _own_errors(folder: Path) -> Iterator[None]:
    """Turn an error of copier, of the template, or of git below it into a deliberate one."""
    from copier.errors import CopierError
    from jinja2 import TemplateError
    from plumbum import ProcessExecutionError

    try:
        yield
    except (CopierError, TemplateError, ProcessExecutionError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise HeadwayError(
            f"the template cannot be rendered: {said[-1]}",
            where=str(folder),
            fix="commit or remove what git status shows there, and run the same command again",
        ) from error
