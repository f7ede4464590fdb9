"""A fresh project with every part: its own targets run in its folder, and programs of others read what it has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.parts_table import NODE_PROGRAMS, program

pytestmark = pytest.mark.slow

BUILD_FILES = [
    *(f"{folder}BUILD.bazel" for folder in ("", "bazel/", "src/my_lab/", "tests/", "vendor/")),
    *("MODULE.bazel", "bazel/pytest_files.bzl", "bazel/vendored_wheel.bzl"),
]
#: Programs that read what is rendered, with their arguments; each is skipped where it is missing, by name.
LINTERS = {
    "shellcheck": ["deploy/slurm/job.sh", "deploy/slurm/prepare.sh"],
    "check-jsonschema": ["--builtin-schema", "vendor.renovate", "renovate.json"],
    "buildifier": ["-mode=check", "-lint=warn", *BUILD_FILES],
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


def headway(project: Path, *words: str) -> str:
    """The command with the project's modules, as its Makefile has it."""
    path = os.pathsep.join(filter(None, ("src", os.environ.get("PYTHONPATH"))))
    return run(project, "env", f"PYTHONPATH={path}", sys.executable, "-m", "headway", *words)


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
    said = headway(project, "train", "configs/task.yaml", "train.steps=40", "name=task-e2e")
    assert "accuracy" in said


def test_two_runs_are_compared(project: Path) -> None:
    make(project, "smoke")
    headway(project, "train", "configs/smoke.yaml", "name=idea", "optimizer.learning_rate=0.001")
    make(project, "compare", "RUNS=runs/smoke runs/idea")
    assert "idea" in (project / "build" / "compare.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("linter", LINTERS)
def test_a_linter_of_others_accepts_it(linter: str, project: Path) -> None:
    found = program(linter) or shutil.which(linter, path=NODE_PROGRAMS.parent / "@bazel" / "buildifier-linux_x64")
    if found is None:
        pytest.skip(f"there is no {linter}")
    run(project, found, *LINTERS[linter])
