"""Check what a team answers about its project: its name, its parts and its licence."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from headway.core.errors import ConfigError

#: Parts that a project may have, in the order in which they are listed; each is a flag of `template/copier.yml`.
PARTS = ("docker", "github", "bazel", "kubernetes", "slurm", "monitoring", "metaflow")
#: Stands for all of them.
ALL = "all"
LICENCES = ("MIT", "Apache-2.0", "BSD-3-Clause", "proprietary")
#: As for a distribution (PEP 508), and short enough for a Kubernetes name with what engines append.
_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_][a-z0-9]+)*")
_LONGEST = 40
#: What imports of the project would hide, beside the standard library.
_TAKEN = frozenset({"headway", "torch", "numpy", "tests", "src", "configs"})


@dataclass(frozen=True)
class Answers:
    """The answers that `template/copier.yml` asks for.

    Args:
        project: Name of the project and of its distribution, as `my-lab`.
        parts: Names among `PARTS`, in their order.
        licence: One of `LICENCES`.
        itself: The files are those of Headway's own repository.
    """

    project: str
    parts: tuple[str, ...] = ()
    licence: str = "MIT"
    itself: bool = False


def parse_parts(text: str) -> tuple[str, ...]:
    """Return the parts that `--with` names, in the order of `PARTS`.

    Args:
        text: Names with commas between them; `all` for every one.

    Raises:
        ConfigError: there is no such part.
    """
    named = [one.strip() for one in text.split(",") if one.strip()]
    for name in named:
        if name not in (*PARTS, ALL):
            raise ConfigError(
                f"there is no part '{name}'", where="--with", fix=f"{_nearest(name, PARTS)}parts: {', '.join(PARTS)}"
            )
    return tuple(part for part in PARTS if part in named or ALL in named)


def check_licence(name: str) -> str:
    """Return the name of a licence as the template has it.

    Raises:
        ConfigError: there is no text for it.
    """
    known = {one.lower(): one for one in LICENCES}
    if name.lower() in known:
        return known[name.lower()]
    raise ConfigError(
        f"there is no text for the licence '{name}'",
        where="--licence",
        fix=f"{_nearest(name, LICENCES)}licences: {', '.join(LICENCES)}; or take one, and replace LICENSE afterwards",
    )


def check_name(name: str) -> str:
    """Return the name of a project, if distributions, modules, images and jobs may all bear it.

    Raises:
        ConfigError: they may not.
    """
    better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-0123456789")[:_LONGEST].rstrip("-") or "my-lab"
    package = name.replace("-", "_")
    if not _NAME.fullmatch(name) or len(name) > _LONGEST:
        what = f"'{name}' is no name of a project: lower-case letters, digits and dashes, at most {_LONGEST}"
    elif keyword.iskeyword(package) or package in sys.stdlib_module_names:
        what = f"'{name}' is a name of Python's own"
        better = f"{name}-lab"
    elif package in _TAKEN:
        what = f"'{name}' would hide a package or folder of that name"
        better = f"{name}-lab"
    else:
        return name
    raise ConfigError(what, where="the folder's name", fix=f"headway init {better}")


def check_empty(folder: Path) -> None:
    """Check that a project can be made in a folder: it is missing or empty.

    Raises:
        ConfigError: it is neither.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        is_project = (folder / ".copier-answers.yml").is_file()
        fix = f"headway init --update {folder}" if is_project else "choose a folder that is missing or empty"
        raise ConfigError("the folder is not empty, and nothing in it is overwritten", where=str(folder), fix=fix)


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'? " if near else ""
