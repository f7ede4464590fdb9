"""This repository's own files come from the template that a team's project comes from."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_own", ROOT / "tools" / "render_own.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_own_files_are_those_of_the_template(tool: ModuleType) -> None:
    files = tool.rendered()
    assert not {"pyproject.toml", "README.md", "src/headway/__init__.py"} & files.keys()
    assert tool.differing(files) == [], "run: python tools/render_own.py"


def test_build_files_are_true_to_the_tree() -> None:
    """Every Python file belongs to a target, labels lead somewhere, and imports are of packages that targets name."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "bazel" / "drift.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_was_edited_here_is_found(tool: ModuleType) -> None:
    assert tool.differing({"LICENSE": b"edited", "no/such/file": b""}) == ["LICENSE", "no/such/file"]
