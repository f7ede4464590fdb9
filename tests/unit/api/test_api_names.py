"""The public names: each is there, is what it says, and no module of the package hides it."""

from __future__ import annotations

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import headway
from headway.cli.application import VERBS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_every_public_name_is_there_and_named_as_it_is() -> None:
    for name in headway.__all__:
        found = getattr(headway, name)
        assert getattr(found, "__name__", "").rpartition(".")[2] == name
    assert set(dir(headway)) == {*headway.__all__, "__version__"}


def test_no_module_of_the_package_hides_a_public_name() -> None:
    """`import headway.train` would put a module in the place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(headway.__path__)}
    assert modules & set(headway.__all__) == set()
    functions = {name for name in VERBS if callable(getattr(headway, name, None))}
    assert functions >= {"train", "generate", "export"} and not modules & functions


def test_what_types_are_taken_from_is_what_is_loaded() -> None:
    """Type checkers read the imports, programs the table."""
    tree = ast.parse((ROOT / "src" / "headway" / "__init__.py").read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert typed == headway._HOMES and set(typed) == set(headway.__all__)


def test_public_names_survive_any_order_of_imports() -> None:
    """As a program that imports rooms of the package first."""
    program = (
        "import headway.training.task, headway.run.session, headway.text, headway.models, headway.config\n"
        "import headway\n"
        "print([name for name in headway.__all__ if not hasattr(headway, name)], callable(headway.train))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n"


def test_nothing_heavy_is_imported_before_it_is_used() -> None:
    program = "import headway, sys; headway.load_config; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"


def test_the_page_names_each_of_them() -> None:
    rows = re.findall(r"^\| `headway\.(\w+)", PAGE, re.MULTILINE)
    assert sorted(rows) == sorted(headway.__all__)
