"""What extras require, resolved, and that nothing tells to install Headway by its name from an index."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from headway.core import requirements
from headway.core.errors import missing_extra
from headway.core.requirements import extra_requirements, install_command

ROOT = Path(__file__).parents[3]
#: A command that takes Headway from an index, or a requirement on it.
BY_NAME = re.compile(r"""pip3? install (?:-{1,2}\S+ )*['"]?headway(?![-\w./])|headway\\?\[""", re.IGNORECASE)


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def resolved(extra: str) -> set[str]:
    """The requirements of an extra and of those within it, by hand."""
    found = set()
    for requirement in project()["optional-dependencies"][extra]:
        if requirement.startswith("headway["):
            for nested in requirement.removeprefix("headway[").removesuffix("]").split(","):
                found |= resolved(nested)
        else:
            found.add(requirement)
    return found


def plain(requirement: str) -> str:
    """A requirement in one spelling: builders sort bounds, and put markers into brackets."""
    text, _, marker = requirement.partition(";")
    name, bounds = re.match(r"([A-Za-z0-9._-]+(?:\[[^\]]*\])?)(.*)", text.strip()).groups()  # type: ignore[union-attr]
    return f"{name}{','.join(sorted(bounds.split(',')))};{marker.strip(' ()')}".lower()


@pytest.mark.parametrize("extra", project()["optional-dependencies"])
@pytest.mark.parametrize("installed", [True, False])
def test_an_extra_is_what_the_project_says(extra: str, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if installed and extra not in (metadata.metadata("headway").get_all("Provides-Extra") or []):
        pytest.skip("what is installed is older than the extra")
    if not installed:
        monkeypatch.setattr(requirements.metadata, "requires", _not_installed)
    assert set(map(plain, extra_requirements(extra))) == set(map(plain, resolved(extra)))
    words = shlex.split(install_command(extra))
    assert words[:4] == ["python", "-m", "pip", "install"]
    assert not any(re.match(r"headway\b", word) for word in words)


def _not_installed(name: str) -> list[str]:
    raise metadata.PackageNotFoundError(name)


def test_extras_within_extras_come_after_their_own() -> None:
    known = [
        "torch>=2", 's3fs>=2024.12; extra == "s3"', "headway[remote, more]; extra == 's3'",
        "fsspec[http]>=2024.5; extra == 'remote'", "headway[s3]; extra == 'more'",
        "deepspeed<0.20; (sys_platform == 'linux') and extra == 'more'",
    ]  # fmt: skip
    wanted = ["s3fs>=2024.12", "fsspec[http]>=2024.5", "deepspeed<0.20; (sys_platform == 'linux')"]
    assert extra_requirements("s3", known) == wanted and extra_requirements("remote,s3", known)[0] == wanted[1]
    assert extra_requirements("none", known) == []
    assert missing_extra("s3fs", "s3", "s3://b/a").fix == (
        f"python -m pip install {shlex.join(extra_requirements('s3'))}"
    )
    assert "'s3fs>=" in str(missing_extra("s3fs", "s3", "s3://b/a").fix)
    assert install_command("unknown", "a-package") == "python -m pip install a-package"


def test_no_message_and_no_page_installs_headway_by_its_name() -> None:
    assert BY_NAME.search("pip install 'headway[s3]'") and BY_NAME.search("pip install headway")
    assert not BY_NAME.search("pip install './headway-0.1.0-py3-none-any.whl[s3]'")
    folders = [ROOT / name for name in ("src", "docs", "examples", "configs", "benchmarks", "tools")]
    files = [file for folder in folders for file in folder.rglob("*") if "__pycache__" not in file.parts]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    suffixes = (".py", ".md", ".yaml", ".yml", ".sh", ".toml", ".html", ".js", "")
    texts = {file: file.read_text(errors="replace") for file in files if file.is_file() and file.suffix in suffixes}
    assert len(texts) > 500
    found = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file, text in texts.items()
        for line in text.splitlines()
        if BY_NAME.search(line)
    }
    assert not found
