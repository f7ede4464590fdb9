"""A project of `headway init --with bazel`, built and tested by Bazel in sandboxes.

What Bazel takes from its central registry has stand-ins (`bazel_offline.py`): Python's rules are Debian's, pip's
packages those of this environment, and images are not built.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from headway.clouds.scaffold.answers import Answers
from headway.clouds.scaffold.project import make_project
from parts.bazel_offline import write_modules
from support.parts_table import BAZEL, BAZEL_ROOT

pytestmark = [
    pytest.mark.parts(BAZEL),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (BAZEL_ROOT / "usr/bin/bazel").exists(), reason="no Bazel: tests/parts/install.sh"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Bazel runs in a root of its own, which takes root's rights"),
    pytest.mark.skipif(sys.base_prefix == "/usr", reason="Python's own folder would hide that of the other root"),
]

#: Reads what no target declares; and says where Headway comes from.
MORE = """\
from pathlib import Path

import headway


def test_headway_is_that_of_the_wheel() -> None:
    assert "runfiles" in headway.__file__, headway.__file__


def test_what_is_not_declared_is_not_there() -> None:
    assert Path("configs/smoke.yaml").is_file() and not Path("README.md").exists()
"""


class Project:
    """A project, and Bazel's answers to commands in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._work = folder.parent

    def bazel(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Bazel in its root, which sees the project and this Python under their own paths."""
        root = BAZEL_ROOT.resolve()
        seen = dict.fromkeys((self._work, Path(sys.prefix), Path(sys.base_prefix)))
        options = [f"--output_user_root={self._work / 'bazel'}", "--max_idle_secs=5", *words]
        inside = f"cd {self.folder} && HOME=/tmp USER=bazel bazel {shlex.join(options)}"
        lines = [
            "set -e",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs tmpfs {root}/tmp",
            *(f"mkdir -p {root}{path} && mount --bind {path} {root}{path}" for path in seen),
            f"exec chroot {root} sh -c {shlex.quote(inside)}",
        ]
        # The mounts, and the server that Bazel leaves, end with the namespaces.
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "\n".join(lines)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=1500)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("bazel") / "my-lab"
    undone = make_project(Answers("my-lab", ("bazel",)), folder)
    if not (folder / "bazel" / "requirements.txt").is_file():
        pytest.skip(f"the lock cannot be made: {undone}")
    settings = write_modules(folder.parent / "modules", BAZEL_ROOT.resolve(), sys.executable)
    (folder / "user.bazelrc").write_text(settings, encoding="utf-8")
    (folder / "tests" / "test_more.py").write_text(MORE, encoding="utf-8")
    return Project(folder)


def test_targets_are_tested_in_sandboxes_and_only_what_changed_again(project: Project) -> None:
    done = project.bazel("test", "//...", "--config=sandbox", "--jobs=2", "--curses=no", "--noshow_progress")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if "PASSED" in line]
    tests = {path.stem for path in (project.folder / "tests").glob("test_*.py")} - {"test_bazel"}
    assert len(lines) == len(tests) >= 6 and all(any(f"//tests:{test} " in line for line in lines) for test in tests)
    losses = project.folder / "tests" / "test_losses.py"
    losses.write_text(f"{losses.read_text(encoding='utf-8')}\n\ndef test_no() -> None:\n    assert 1 == 2\n")
    done = project.bazel("test", "//...", "--config=sandbox", "--jobs=2", "--curses=no", "--noshow_progress")
    assert done.returncode == 3, done.stdout[-4000:] + done.stderr[-4000:]
    said = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("//tests:")}
    assert "FAILED" in said.pop("//tests:test_losses") and len(said) == len(tests) - 1
    assert all("(cached) PASSED" in line for line in said.values()), said


def test_images_have_their_targets(project: Project) -> None:
    """Bazel analyses them; what `rules_oci` would build of them is not tested here."""
    targets = ("//:image", "//:layer", "//:load")
    done = project.bazel("build", "--nobuild", *targets, "--curses=no", "--noshow_progress")
    assert done.returncode == 0 and "Analyzed 3 targets" in done.stderr, done.stderr[-4000:]
