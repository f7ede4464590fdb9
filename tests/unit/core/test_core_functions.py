"""Functions of the user: where their modules, and those that they import, are found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.core.functions import load_function


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, which is not on the path of modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("late_stories", "late_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_a_function_may_import_what_lies_beside_it_when_it_is_called(here: Path) -> None:
    (here / "late_helper.py").write_text("WORD = 'found'\n")
    (here / "late_stories.py").write_text("def tell():\n    from late_helper import WORD\n    yield WORD\n")
    function: Any = load_function("late_stories:tell", "data.sources")[1]
    assert list(function()) == ["found"]


def test_the_working_directory_is_not_left_among_the_modules_for_nothing() -> None:
    path = list(sys.path)
    load_function("json:dumps", "data.sources")
    with pytest.raises(ConfigError, match="cannot be imported"):
        load_function("late_stories:tell", "data.sources")
    assert sys.path == path
