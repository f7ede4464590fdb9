"""The sources of the user's code: what a module imports of its own, and importing it from sources that travelled."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from headway.core.errors import ConfigError
from headway.core.own_code import identity_of_sources, import_from, sources_of

FILES = {
    "own_lab/__init__.py": "",
    "own_lab/train.py": "import torch\nfrom .parts import model\nfrom own_lab import data\nimport own_other\n",
    "own_lab/parts/model.py": "def late():\n    from own_lab.deep import DEEP\n    return DEEP\n",
    "own_lab/data.py": "WORD = 'here'\n",
    "own_lab/deep.py": "DEEP = 3\n",
    "own_lab/unused.py": "raise SystemExit\n",
    "own_other.py": "import own_lab\n",
    "elsewhere.py": "",
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_sources_are_what_the_module_imports(lab: Path) -> None:
    found = sources_of("own_lab.train", "task")
    assert set(found) == set(FILES) - {"own_lab/unused.py", "elsewhere.py"}
    before = identity_of_sources(found)
    (lab / "own_lab/unused.py").write_text("pass\n")
    assert identity_of_sources(sources_of("own_lab.train", "task")) == before
    (lab / "own_lab/deep.py").write_text("DEEP = 4\n")
    assert identity_of_sources(sources_of("own_lab.train", "task")) != before


def test_sources_that_travelled_are_imported_first(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sources_of("own_lab.train", "task")
    (lab / "own_lab/data.py").write_text("WORD = 'stale'\n")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(lab)
    try:
        import_from(found)
        module = import_module("own_lab.train")
        assert module.data.WORD == "here" and module.model.late() == 3
    finally:
        for name in [name for name in sys.modules if name.startswith("own_")]:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["own_lab.missing", "nothing_there", "__main__"])
def test_a_module_without_source_is_refused(lab: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"the module {name} has no source"):
        sources_of(name, "task.function")
