"""The pages on security say what is there: dependencies as in `pyproject.toml`, guards and tests that exist."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

from headway.clouds.supply.sbom import installed_closure, licence_of

ROOT = Path(__file__).parents[2]
DEPENDENCIES = ROOT / "docs" / "dependencies.md"
THREATS = ROOT / "docs" / "threat-model.md"


def rows(page: Path) -> list[list[str]]:
    """Cells of the rows of all tables, without headers."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rules = [number for number, row in enumerate(cells) if set("".join(row)) <= {"-"}]
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def core() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [re.split(r"[^\w.-]", one)[0] for one in project["dependencies"]]


def test_the_page_lists_exactly_the_core_dependencies() -> None:
    found = rows(DEPENDENCIES)
    assert [row[0].strip("`") for row in found] == core()
    assert all(len(row) == 4 and all(row) for row in found)


def test_licences_are_those_of_the_packages() -> None:
    for name, _, licence, _ in rows(DEPENDENCIES):
        distribution = metadata.distribution(name.strip("`"))
        texts = [distribution.locate_file(file) for file in distribution.files or [] if "LICEN" in file.name.upper()]
        said = licence_of(distribution.metadata) or ""  # type: ignore[arg-type]
        said += "".join(Path(str(text)).read_text(encoding="utf-8", errors="replace") for text in texts)
        for word in re.findall(r"MIT|BSD|Apache|MPL", licence):
            assert re.search({"BSD": "BSD|Redistribution and use", "MPL": "MPL|Mozilla"}.get(word, word), said), name


def test_no_core_package_binds_its_users_to_a_copyleft() -> None:
    """Of the whole wheel: what its licence asks of a program that imports it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = installed_closure(project["dependencies"])
    assert {one.name for one in packages} > set(core())
    # CUDA's own packages, which torch needs on some machines, are proprietary, and no copyleft.
    assert [one.name for one in packages if re.search(r"\bA?GPL\b|GNU (Affero )?General", one.licence or "")] == []


def test_every_guard_and_every_test_of_the_threat_model_exists() -> None:
    places = (ROOT / "src" / "headway", ROOT / "tests", ROOT, ROOT / ".github" / "workflows")
    named = re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:\.(?:py|mk|yml)|/))`", THREATS.read_text(encoding="utf-8"))
    assert len(named) > 60
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


def test_every_door_has_a_guard_and_a_test() -> None:
    doors = [row for row in rows(THREATS) if len(row) == 4]
    assert len(doors) >= 24
    assert all(row[1] and "`" in row[3] for row in doors)


def test_the_policy_leads_to_the_pages() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert {"docs/threat-model.md", "docs/dependencies.md", "docs/releases.md"} <= set(
        re.findall(r"\]\(([^)]*)\)", text)
    )
