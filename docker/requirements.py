"""Write down what an image installs before the project itself: the project's dependencies and those of extras.

`python requirements.py EXTRA ...` reads `pyproject.toml` in the current folder, and the versions of `uv.lock` if it is
there. An argument with brackets is a requirement: `headway[serve]`. torch is left out: it has a layer of its own.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

#: Where the image has the wheels of `vendor/`.
LIBRARIES = "/opt/headway/libraries"


def plain(name: str) -> str:
    """Return the normal form of a name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies(project: dict[str, Any], extras: list[str]) -> list[str]:
    """Return the requirements of a project and of extras; extras within an extra are followed."""
    own = re.compile(rf"{re.escape(project['name'])}\s*\[([^\]]*)\]\s*")
    found = [*project.get("dependencies", []), *(one for one in extras if "[" in one)]
    waiting = [one for one in extras if "[" not in one]
    seen = set()
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            nested = own.fullmatch(requirement)
            if nested is None:
                found.append(requirement)
            else:
                waiting += [one.strip() for one in nested[1].split(",")]
    return list(dict.fromkeys(found))


def vendored(requirement: str, wheels: list[Path]) -> str:
    """Return a requirement on a wheel in `vendor/` with its file: an index may have another package of that name."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement)[0]
    extras = re.search(r"\[[^\]]*\]", requirement)
    for wheel in wheels:
        if plain(wheel.name.split("-")[0]) == plain(name):
            bracketed = extras[0] if extras else ""
            return f"{name}{bracketed} @ file://{LIBRARIES}/{wheel.name}"
    return requirement


def locked(lock: dict[str, Any]) -> list[str]:
    """Return a constraint for each package that a lock file has from an index; several versions have their markers."""
    found = []
    for package in lock.get("package", []):
        if "registry" not in package.get("source", {}) or plain(package["name"]) == "torch":
            continue
        markers = " or ".join(f"({marker})" for marker in package.get("resolution-markers", []))
        condition = f" ; {markers}" if markers else ""
        found.append(f"{plain(package['name'])}=={package['version']}{condition}")
    return sorted(found)


def main() -> None:
    """Write requirements.txt and constraints.txt into the current folder."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        one for one in dependencies(project, sys.argv[1:]) if plain(re.split(r"[^A-Za-z0-9._-]", one)[0]) != "torch"
    ]
    wheels = sorted(Path("vendor").glob("*.whl"))
    wanted = [vendored(one, wheels) for one in wanted]
    Path("requirements.txt").write_text("".join(f"{one}\n" for one in wanted), encoding="utf-8")
    lock = Path("uv.lock")
    pins = locked(tomllib.loads(lock.read_text(encoding="utf-8"))) if lock.exists() else []
    Path("constraints.txt").write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")


if __name__ == "__main__":
    main()
