"""What Headway and its extras require, as its own metadata says, and the commands that install it.

No index of packages has Headway under its name: whoever registered the name would be trusted with it. So commands name
the packages of an extra themselves, and launches carry the wheel of the code that runs (`launchers.wheel`).
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

#: Name of the distribution.
NAME = "headway"
_EXTRA = re.compile(r"""(?:\s*\band\b\s*)?extra\s*==\s*['"]([^'"]+)['"]""")
_OWN = re.compile(rf"{NAME}\s*\[([^\]]*)\]\s*", re.IGNORECASE)


def requirements() -> Sequence[str]:
    """Return the requirements of Headway (PEP 508), those of an extra with its marker; none if they are unknown.

    They come from the metadata of the installation, or from the `pyproject.toml` of a checkout that is not installed.
    """
    try:
        return metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        pass
    file = Path(__file__).parents[3] / "pyproject.toml"
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return []
    if project.get("name") != NAME:
        return []
    extras = project.get("optional-dependencies", {}).items()
    return [*project.get("dependencies", []), *(_marked(one, extra) for extra, found in extras for one in found)]


def by_extra(known: Sequence[str]) -> dict[str, list[str]]:
    """Return the requirements of each extra, without that marker; those on Headway's own extras are among them."""
    found: dict[str, list[str]] = {}
    for requirement in known:
        text, _, marker = requirement.partition(";")
        if (extra := _EXTRA.search(marker)) is not None:
            rest = _EXTRA.sub("", marker).strip()
            found.setdefault(extra[1], []).append(f"{text.strip()}; {rest}" if rest else text.strip())
    return found


def extra_requirements(extra: str, known: Sequence[str] | None = None) -> list[str]:
    """Return the requirements of an extra, its own first, with those of the extras within it.

    Args:
        extra: Its name, or several with commas between them.
        known: The requirements of Headway; those of this installation when not given.

    Returns:
        Requirements on other packages alone; none for an extra that is not known.
    """
    extras = by_extra(requirements() if known is None else known)
    waiting = [one.strip() for one in extra.split(",")]
    seen = set[str]()
    result = list[str]()
    while waiting:
        name = waiting.pop(0)
        if name in seen:
            continue
        seen.add(name)
        for requirement in extras.get(name, []):
            nested = _OWN.fullmatch(requirement)
            if nested is None:
                result.append(requirement)
            else:
                waiting += [one.strip() for one in nested[1].split(",")]
    return list(dict.fromkeys(result))


def install_command(extra: str, package: str | None = None) -> str:
    """Return the command that installs the packages of an extra.

    Args:
        extra: Its name, or several with commas between them.
        package: What to install where the extra is not known; the name itself when not given.
    """
    return f"python -m pip install {shlex.join(extra_requirements(extra) or [package or extra])}"


def _marked(requirement: str, extra: str) -> str:
    text, _, marker = requirement.partition(";")
    marker = f"({marker.strip()}) and " if marker else ""
    return f"{text.strip()}; {marker}extra == '{extra}'"
