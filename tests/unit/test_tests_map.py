"""The map in `tests/README.md` names only what exists, and leaves no room and no folder of tests out."""

from __future__ import annotations

import re
import subprocess
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


def test_the_tests_that_wait_exist() -> None:
    """`make test-waiting` would end at a file that has moved, and no other target reads this list."""
    rule = "print-waiting: ; @echo $(WAITING)"
    command = ["make", "--silent", "--file=Makefile", f"--eval={rule}", "print-waiting"]
    done = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert len(names) > 20
    assert [name for name in names if not (TESTS.parent / name).exists()] == []


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


def test_support_is_asked_by_its_present_names() -> None:
    """A name that is gone would be found only where its test is run, and with real servers that is seldom."""
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    here = "|".join(path.stem for path in (TESTS / "support").glob("*.py"))
    gone = rf"support_\w+|support\.(?!(?:{here}) )\w+|{here}"
    wrong = re.compile(rf"^ *from (?:tests\.)?(?:{gone}) import", re.MULTILINE)
    for line in ("from support_runs import headway", "    from waits import LONG", "from support.none import some"):
        assert wrong.search(line), line
    assert [path.name for path in TESTS.rglob("*.py") if wrong.search(path.read_text(encoding="utf-8"))] == []
