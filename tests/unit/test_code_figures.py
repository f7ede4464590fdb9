"""Figures of a small tree that can be counted by hand."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "code_figures.py"
if not SCRIPT.exists():
    pytest.skip("tools are not part of this copy", allow_module_level=True)

MODULE = '''
from pathlib import Path


def read(config):
    """Return the text."""
    return _open(config).read_text()


def _open(config, *, folder=None):
    """The file."""
    return Path(config) / _name() / _name()


def _name():
    return "a"


class Page:
    @property
    def title(self):
        """The title."""
        return "b"

    def show(self):
        """Print the page."""
        print(self.title)
        print(self.title)
        print(self.title)
        print(self.title)
        print(self.title)
'''


@pytest.fixture(scope="module")
def figures() -> Any:
    """The script."""
    spec = importlib.util.spec_from_file_location("code_figures", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_those_that_can_be_counted_by_hand(
    figures: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = tmp_path / "src" / "headway" / "run" / "session"
    worker.mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    (worker / "__init__.py").write_text("")
    (worker / "page.py").write_text(MODULE)
    figures.main([str(tmp_path), "--json"])
    found = json.loads(capsys.readouterr().out)
    counted = {
        "files": 2,
        "lines": 31,
        "functions": 5,
        "median_function_lines": 3,
        "functions_of_6_lines_or_fewer_percent": 80.0,
        "private_helpers": 2,
        "private_helpers_called_once_in_their_file": 1,
        "functions_with_docstrings": 3,
        "docstrings_that_begin_with_a_verb_percent": 66.7,
        "worker_files_entered_by_config": 1,
        "worker_functions_entered_by_config": 2,
        "circles_in_src": 0,
        "circles_in_benchmarks": 0,
    }
    assert {name: found[name] for name in counted} == counted
    assert found.keys() - counted.keys() == {"ruff_D401", "ruff_PLR0917"}
    figures.main([str(tmp_path), "--unknown-verbs"])
    assert capsys.readouterr().out.split() == ["1", "the"]
