"""Functions of the user: where their modules, and those that they import, are found."""

from __future__ import annotations

import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.core.functions import compare_function, identify_function, load_function


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


def test_a_function_is_compared_with_the_identity_that_it_had(here: Path) -> None:
    package = here / "compared"
    package.mkdir()
    (package / "__init__.py").write_text("from compared.inner import made, shown\n")
    inner = "def shown(text): return text\ndef made(text): return not text\n"
    (package / "inner.py").write_text(inner)
    outer, defined = (sha256((package / name).read_bytes()).hexdigest() for name in ("__init__.py", "inner.py"))
    assert compare_function("compared.inner:made", defined, "here") == "same" and "compared" not in sys.modules
    assert compare_function("compared:made", outer, "here") == "same" and "compared" not in sys.modules
    assert compare_function("compared:made", defined, "here") == "same"
    assert identify_function("compared:made", "here") == defined, "it is defined there"
    assert compare_function("compared:made", "0" * 64, "here") == "changed"
    for name, before in (
        ("compared:made", "python-3.9:" + "0" * 64),  # of a notebook's cell, then
        ("compared:none", "0" * 64),
        ("nowhere:made", "0" * 64),
        ("__main__:made", "python-3.9:" + "0" * 64),
    ):
        assert compare_function(name, before, "here") == "unknown", name
    for name in ("compared", "compared.inner"):
        sys.modules.pop(name)
