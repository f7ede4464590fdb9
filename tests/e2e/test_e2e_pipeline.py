"""The pipeline of this repository in a fresh copy: the targets that CI calls, in its order; and equal wheels."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENV = Path(sys.prefix)
#: Seconds of processors that CI's two cores may take: a busy machine does not change them, as it does the time.
SMOKE_SECONDS, REPRODUCE_SECONDS = 2 * 120, 2 * 300

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def copy(folder: Path) -> Path:
    """The tracked files, as a repository of one commit."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this is no checkout of git")
    for name in filter(None, done.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgSign=false"]
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "first"]):
        when = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
        subprocess.run([*git, *words], cwd=folder, env={**os.environ, **when}, check=True)
    return folder


def make(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Call make with this environment, and return what came of it and the seconds of processors that it took."""
    if not (VENV / "bin" / "headway").exists():
        pytest.skip(f"Headway is not installed in {VENV}")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The environment counts as made, whatever its age.
    made = [word for name in (".core", ".ready") for word in ("-o", str(VENV / name))]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "MAKEFLAGS": ""}
    command = ["make", *made, f"VENV={VENV}", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_targets_of_ci_pass_one_after_the_other(tmp_path: Path) -> None:
    folder = copy(tmp_path / "fresh")
    seconds = {}
    for target in ("smoke", "reproduce", "quality", "pins", "build"):
        done, seconds[target] = make(folder, target)
        assert done.returncode == 0, f"make {target}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert seconds["smoke"] < SMOKE_SECONDS and seconds["reproduce"] < REPRODUCE_SECONDS, seconds
    assert (folder / "runs/smoke/checkpoints/step-00000100/manifest.json").is_file()
    [wheel] = (folder / "dist").glob("*.whl")
    materials = json.loads((folder / "dist/sbom.cdx.json").read_text(encoding="utf-8"))
    assert materials["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": sha256(wheel)}]
    status = subprocess.run(["git", "status", "--porcelain"], cwd=folder, capture_output=True, text=True, check=True)
    assert status.stdout == "", "what CI makes is ignored by git"


def test_nothing_runs_after_a_failure(tmp_path: Path) -> None:
    folder = copy(tmp_path / "fresh")
    done, _ = make(folder, "pipeline", "SMOKE=configs/none.yaml")
    assert done.returncode
    assert "headway train configs/none.yaml" in done.stdout
    assert "headway verify" not in done.stdout and not (folder / "dist").exists()


def test_a_wheel_built_in_two_folders_has_one_hash(tmp_path: Path) -> None:
    hashes = set()
    for name, mask in (("a", 0o022), ("a-longer-name/below", 0o077)):
        before = os.umask(mask)
        try:
            folder = copy(tmp_path / name)
        finally:
            os.umask(before)
        # A file that is newer, or that was read first, is the same file.
        for number, path in enumerate(sorted((folder / "src").rglob("*.py"))[:20]):
            os.utime(path, (mask + number, mask + number))
        done, _ = make(folder, "build")
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        [wheel] = (folder / "dist").glob("*.whl")
        hashes.add(sha256(wheel))
    assert len(hashes) == 1
