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
        "tuple_assignments": 0,
        "conditional_expressions": 0,
        "inner_imports_of_own_modules": 0,
        "inner_imports_that_load_torch_or_an_optional_package": 0,
        "most_fields_of_a_class": 0,
        "classes_of_more_than_10_fields": 0,
        "classes_of_more_than_10_fields_that_act": 0,
        "functions": 5,
        "median_function_lines": 3,
        "functions_of_6_lines_or_fewer_percent": 80.0,
        "private_helpers": 2,
        "private_helpers_called_once_in_their_file": 1,
        "functions_with_docstrings": 3,
        "docstrings_that_begin_with_a_verb_percent": 66.7,
        "worker_files_entered_by_config": 1,
        "worker_functions_entered_by_config": 2,
        "functions_below_session_with_a_whole_config": 0,
        "train_loop_lines": None,
        "train_loop_branches": None,
        "rooms": 1,
        "floors_of_rooms": 1,
        "arrows_between_rooms": 0,
        "circles_of_rooms": 0,
        "circles_in_src": 0,
        "circles_of_types_in_src": 0,
        "circles_in_benchmarks": 0,
    }
    assert {name: found[name] for name in counted} == counted
    left = {"ruff_D401", "ruff_PLR0917", "tokens", "tokens_per_code_line_without_docstrings"}
    assert found.keys() - counted.keys() == left
    figures.main([str(tmp_path), "--unknown-verbs"])
    assert capsys.readouterr().out.split() == ["1", "the"]


LOOP = '''
"""The loop."""  # and a comment
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.run.session.start import Start


class Steps:
    """Counts."""

    first: int
    """The first."""

    def __init__(self, config: "Config | None") -> None:
        self.last, self.count = 1, 2


def train_loop(start: "Start", configs: "list[ModelConfig]") -> None:
    from headway.training import steps

    for step in range(3):
        if step and start:
            print(step if start else [n for n in configs])
'''


#: What counts of it as tokens, apart by spaces.
WORDS = """
from typing import TYPE_CHECKING if TYPE_CHECKING : from headway . run . session . start import Start
class Steps : first : int def __init__ ( self , config : C ) -> None : self . last , self . count = 1 , 2
def train_loop ( start : S , configs : C ) -> None : from headway . training import steps
for step in range ( 3 ) : if step and start : print ( step if start else [ n for n in configs ] )
"""


def test_what_makes_lines_dense_and_ties_rooms_is_counted(figures: Any, tmp_path: Path) -> None:
    """A whole config is one by its type, not by its name; a circle may be of types alone."""
    files = {
        "headway/training/loop.py": LOOP,
        "headway/training/steps.py": "import torch\none = two = 1\n",
        "headway/run/session/start.py": "from headway.training.loop import train_loop\n",
        "headway/run/session/agent.py": "from headway.run.directory import ledger\n",
        "headway/run/directory/ledger.py": "import headway.core\n",
        "headway/core/__init__.py": "",
        "headway/__main__.py": "import headway.run.session.start\n",
    }
    for name, text in files.items():
        path = tmp_path / "src" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "benchmarks").mkdir()
    found = figures.measure(tmp_path)
    assert found["tuple_assignments"] == 1 and found["conditional_expressions"] == 1
    assert found["inner_imports_of_own_modules"] == 1 and found["most_fields_of_a_class"] == 3
    assert found["inner_imports_that_load_torch_or_an_optional_package"] == 1
    assert found["functions_below_session_with_a_whole_config"] == 1
    assert found["train_loop_lines"] == 6
    assert found["train_loop_branches"] == 5, "for, if, and, the conditional expression, the comprehension"
    assert (found["rooms"], found["floors_of_rooms"], found["arrows_between_rooms"]) == (4, 3, 3)
    assert (found["circles_in_src"], found["circles_of_types_in_src"]) == (0, 1)
    tokens, lines = figures.count_tokens(figures.parse(tmp_path / "src" / "headway" / "training"))
    assert lines == 14 and tokens == 7 + len(WORDS.split())
