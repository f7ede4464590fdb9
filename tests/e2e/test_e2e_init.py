"""A fresh project with every part: its own targets run in its folder, and programs of others read what it has."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

#: Programs that read what is rendered, with their arguments; each is skipped where it is missing, by name.
LINTERS = {
    "shellcheck": ["deploy/slurm/job.sh", "deploy/slurm/prepare.sh"],
    "check-jsonschema": ["--builtin-schema", "vendor.renovate", "renovate.json"],
    "kubernetes-validate": ["--strict", "deploy/kubernetes/10-support.yaml", "deploy/kubernetes/30-train.yaml"],
}


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "my-lab"
    run(folder.parent, sys.executable, "-m", "headway", "init", "my-lab", "--with", "all")
    return folder


def make(project: Path, *targets: str) -> str:
    return run(project, "make", *targets, f"BIN={Path(sys.executable).parent}")


def test_its_targets_run(project: Path) -> None:
    """Lint, tests, smoke run, reproducibility; the last two within the time that CI has for them."""
    assert "no issues found" in make(project, "lint")
    make(project, "test")
    began = time.monotonic()
    assert "step-00000100: good" in make(project, "smoke")
    smoked = time.monotonic()
    said = make(project, "reproduce")
    ended = time.monotonic()
    assert "ok    repeated" in said and "then resumed" in said
    print(f"smoke {smoked - began:.1f} s, reproduce {ended - smoked:.1f} s")
    assert smoked - began < 120 and ended - smoked < 300


def test_its_own_task_trains(project: Path) -> None:
    words = [sys.executable, "-m", "headway", "train", "configs/task.yaml", "train.steps=40", "name=task-e2e"]
    said = run(project, "env", "PYTHONPATH=src", *words)
    assert "evaluation/accuracy" in said or "accuracy" in said


@pytest.mark.parametrize("linter", LINTERS)
def test_a_linter_of_others_accepts_it(linter: str, project: Path) -> None:
    program = shutil.which(linter) or shutil.which(linter, path=Path(sys.executable).parent)
    if program is None:
        pytest.skip(f"there is no {linter}")
    run(project, program, *LINTERS[linter])
