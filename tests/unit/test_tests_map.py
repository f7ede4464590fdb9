"""The map in `tests/README.md` names only what exists, and leaves no room and no folder of tests out."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "headway"


def names_in(text: str) -> list[str]:
    """Files and folders in code spans; `ROOM` and `FILE` are words of the rule."""
    return [name for name in re.findall(r"`([\w/*]+(?:\.py|/))`", text) if not re.search(r"ROOM|FILE", name)]


def is_there(name: str) -> bool:
    """Below the tests or the sources; a bare file name may be in any folder of tests."""
    places = [TESTS / name, SOURCE / name]
    return any(place.exists() for place in places) or any(TESTS.rglob(name.rstrip("/")))


def missing(text: str) -> list[str]:
    return [name for name in names_in(text) if not is_there(name)]


def test_the_map_names_only_what_exists() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    assert len(names_in(text)) > 100
    assert missing(text) == []


def test_a_name_that_is_wrong_is_found() -> None:
    assert missing("`unit/test_docs.py`, `unit/test_nowhere.py`, `support/*.py`, `training/none/`") == [
        "unit/test_nowhere.py",
        "training/none/",
    ]


def test_every_room_and_every_folder_is_on_the_map() -> None:
    text = (TESTS / "README.md").read_text(encoding="utf-8")
    folders = {path.parent.relative_to(TESTS).parts[0] for path in TESTS.rglob("*.py") if path.parent != TESTS}
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert not {name for name in folders | rooms if f"{name}/" not in text}


def test_helpers_live_in_support() -> None:
    """A helper elsewhere, or a name of one that is not there, would be found only where its test is run."""
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    here = {path.stem for path in (TESTS / "support").glob("*.py")}
    asked = [
        (path.name, name)
        for path in TESTS.rglob("*.py")
        for name in re.findall(
            r"^ *from (?:tests\.)?support[._](\w+) import", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(asked) > 100
    assert [(path, name) for path, name in asked if name not in here] == []
    flat = "|".join(here)
    old = re.compile(rf"^ *(from (tests\.)?(support_\w+|support|{flat}) import|import support_)", re.MULTILINE)
    found = {path.name: old.search(path.read_text(encoding="utf-8")) for path in TESTS.rglob("*.py")}
    assert [name for name, line in found.items() if line and line[0].strip() != "from support import"] == []
