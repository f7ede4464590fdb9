"""A project: made, and brought to the template of a later Headway."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from headway.clouds.launchers.wheel import WHEEL, build_wheel
from headway.clouds.programs import try_program
from headway.clouds.scaffold.answers import PARTS, Answers, check_empty, check_licence, check_name
from headway.clouds.scaffold.history import add_generation, begun, git, unpacked
from headway.clouds.scaffold.rendering import TEMPLATE, render, update
from headway.core.errors import ConfigError

ANSWERS = ".copier-answers.yml"
VENDOR = "vendor"
_LOCK_SECONDS = 300.0


def make_project(answers: Answers, folder: Path, template: Path = TEMPLATE) -> list[str]:
    """Make a project in a folder that is missing or empty.

    Args:
        answers: The answers.
        folder: Where it goes.
        template: The template.

    Returns:
        What could not be done here, each with the command that does it.

    Raises:
        ConfigError: the folder is not empty; git or copier is missing; Headway is not installed.
    """
    check_empty(folder)
    wheel = build_wheel()
    folder.mkdir(parents=True, exist_ok=True)
    with begun(folder, template) as repository:
        render(answers, folder, repository, generation="1")
    _vendor(folder, wheel)
    if _outside_git(folder):
        git(folder, "init", "--quiet", "--initial-branch=main")
    return list(_finish(folder, answers.parts))


def update_project(
    folder: Path, parts: Sequence[str], template: Path = TEMPLATE
) -> tuple[Answers, list[str], list[str]]:
    """Bring the template of this Headway into a project, and add parts.

    Args:
        folder: The project.
        parts: Parts to add to those that it has.
        template: The template.

    Returns:
        The answers; files with conflicts; what could not be done here.

    Raises:
        ConfigError: it is no project of `headway init`, or has changes that are not committed; or git fails.
        HeadwayError: copier refuses.
    """
    known = read_answers(folder)
    answers = replace(known, parts=tuple(part for part in PARTS if part in {*known.parts, *parts}))
    _check_committed(folder)
    wheel = build_wheel()
    with unpacked(folder) as repository:
        generation = add_generation(repository, template)
        update(answers, folder, generation)
    _vendor(folder, wheel)
    conflicts = git(folder, "diff", "--name-only", "--relative", "--diff-filter=U").splitlines()
    return answers, conflicts, [] if conflicts else list(_finish(folder, answers.parts))


def read_answers(folder: Path) -> Answers:
    """Read the answers of a project.

    Raises:
        ConfigError: there are none, or they are not what `headway init` wrote.
    """
    file = folder / ANSWERS
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
        answers = Answers(check_name(read["project"]), tuple(read["parts"]), check_licence(read["licence"]))
    except FileNotFoundError:
        raise ConfigError(
            "this is no project of headway init", where=str(file), fix="give the folder of one, or make one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        raise ConfigError(
            "the answers of the project cannot be read", where=str(file), fix=f"git checkout HEAD -- {ANSWERS}"
        ) from None
    if unknown := [part for part in answers.parts if part not in PARTS]:
        raise ConfigError(
            f"the project has the part '{unknown[0]}', which this Headway does not know",
            where=str(file),
            fix="update with the Headway in the project's vendor folder, or a later one",
        )
    return answers


def _check_committed(folder: Path) -> None:
    if _outside_git(folder):
        fix = "git init && git add --all && git commit there, before anything is changed"
        raise ConfigError("an update merges by git, and the project is in no repository", where=str(folder), fix=fix)
    if changed := git(folder, "status", "--porcelain", "--", ".").splitlines():
        raise ConfigError(
            f"{len(changed)} files are not committed, so the update could not be told from your changes",
            where=str(folder),
            fix=f"git -C {folder} add --all && git -C {folder} commit, and run the same command again",
        )


def _outside_git(folder: Path) -> bool:
    try:
        git(folder, "rev-parse", "--show-toplevel")
    except ConfigError:
        return True
    return False


def _vendor(folder: Path, wheel: bytes) -> None:
    """Put the wheel of this Headway into the project: no index has Headway under its name."""
    vendor = folder / VENDOR
    vendor.mkdir(exist_ok=True)
    for earlier in vendor.glob("headway-*.whl"):
        earlier.unlink()
    (vendor / WHEEL).write_bytes(wheel)


def _finish(folder: Path, parts: Sequence[str]) -> Iterator[str]:
    """Make what other commands make: files of clusters and monitoring, and the lock file.

    Yields:
        What could not be made, with the command that makes it.
    """
    if {"kubernetes", "slurm", "monitoring", "metaflow"} & set(parts):
        # The Makefile says which commands; the team changes images and queues there.
        said = _run(folder, "make", "--silent", "rendered", f"HEADWAY={shlex.quote(sys.executable)} -m headway")
        if said is not None:
            yield f"the files of clusters and monitoring: make rendered ({said})"
    said = _run(folder, "make", "--silent", "lock")
    if said is not None:
        yield f"the lock file: make lock, where uv and an index of packages are ({said})"


def _run(folder: Path, *words: str) -> str | None:
    """Run a program; return why it failed, or None."""
    try:
        done = try_program(words, seconds=_LOCK_SECONDS, folder=folder)
    except ConfigError as error:
        return error.what
    if done.returncode == 0:
        return None
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip() and not line.startswith("make")]
    return said[-1].strip() if said else f"exit code {done.returncode}"
