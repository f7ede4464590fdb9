"""`headway verify` says yes to what is reproducible, and names the place where something is not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from headway.config import load_config
from headway.core.errors import HeadwayError
from headway.verify.reproducibility import Difference, _Trainings, first_difference
from support import headway


def test_elastic_promise_is_kept(tiny: Callable[..., Path], tmp_path: Path) -> None:
    config = tiny(determinism="elastic", train={"lanes": 4})
    result = headway("verify", config, "--steps", "6", "--json")
    assert result.returncode == 0, result.stderr
    verdict = json.loads(result.stdout)
    assert verdict["passed"] and len(verdict["checks"]) == 3
    assert not (tmp_path / "runs").exists(), "the run directory is not touched"
    assert headway("train", config, "checkpoint.every=6 steps", "checkpoint.keep=2").returncode == 0
    manifest = json.loads((tmp_path / "runs/tiny/checkpoints/step-00000006/manifest.json").read_text())
    assert manifest["state_sha256"] == verdict["state_sha256"], "the name that a checkpoint of it has"


def test_a_promise_that_is_not_made_is_not_verified(tiny: Callable[..., Path]) -> None:
    result = headway("verify", tiny(), "determinism=off")
    assert result.returncode == 2 and "promises nothing" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--other-workers", "2"], "promises nothing for other workers"),
        (["determinism=elastic", "--other-workers", "1"], "are what the config has"),
        (["determinism=elastic", "--other-workers", "3"], "cannot be shared"),
    ],
)
def test_a_comparison_that_would_show_nothing_is_refused(
    tiny: Callable[..., Path], arguments: list[str], said: str
) -> None:
    result = headway("verify", tiny(), *arguments)
    assert result.returncode == 2 and said in result.stderr


@pytest.mark.parametrize(
    "sections",
    [
        {"checkpoint": {"remote": {"url": "file:///mnt/shared"}}},
        {"checkpoint": {"every": "2 steps", "keep_best": 1}, "evaluation": {"every": "2 steps"}},
        {"checkpoint": {"every": "auto", "failures_per_day": 3}},
        {"determinism": "elastic", "parallel": {"workers": 2, "min_workers": 2}},
    ],
)
def test_what_a_config_says_of_saving_is_not_in_the_way_of_its_trainings(
    sections: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remote tier least of all: the next check would go on with what this one has left there."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("headway.verify.reproducibility.subprocess.run", run)
    _Trainings(load_config(tiny(**sections)), steps=4, folder=tmp_path)._train("workers", "", workers=1)
    (command,) = commands
    loaded = load_config(command[command.index("train") + 1], command[command.index("train") + 2 :])
    assert loaded.checkpoint.remote is None
    assert loaded.run_directory == tmp_path / "workers"


def hashes(folder: Path, steps: Iterable[int]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "hashes.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "tensors": {"a": "1"}}) + "\n" for step in steps)


@pytest.mark.parametrize(
    ("trainings", "said"),
    [
        ([range(4), range(2, 7)], None),
        ([[], range(7)], "was to be killed"),
        ([range(7), range(6, 7)], "was to be killed"),
        ([range(4), range(7)], "not resumed"),
        ([range(4), range(5, 7)], "before it had recorded"),
        ([range(4), range(2, 5)], "before it had recorded"),
    ],
)
def test_a_kill_that_did_not_happen_proves_nothing(
    tiny: Callable[..., Path], tmp_path: Path, trainings: list[Iterable[int]], said: str | None
) -> None:
    runs = _Trainings(load_config(tiny()), 6, tmp_path)
    steps = iter(trainings)

    def train(name: str, fault: str, workers: int | None) -> int:
        (tmp_path / f"{name}.log").touch()
        hashes(tmp_path / name, next(steps))
        return 0

    runs._train = train  # type: ignore[method-assign]
    if said is None:
        assert [step for step, _ in runs.run("killed", kill_at=3)] == [0, 1, 2, 3, 2, 3, 4, 5, 6]
        return
    with pytest.raises(HeadwayError, match=said):
        runs.run("killed", kill_at=3)


def test_the_first_difference_is_named() -> None:
    reference = [(0, {"a": "1", "b": "1"}), (1, {"a": "2", "b": "2"}), (2, {"a": "3", "b": "3"})]
    assert first_difference(reference, list(reference)) is None
    # A kill repeats steps; the second time is compared too.
    assert first_difference(reference, [*reference, (1, {"a": "2", "b": "9"})]) == Difference(1, "b", 1)
    assert first_difference(reference, [(0, {"a": "1", "b": "1"}), (1, {"a": "2"})]) == Difference(1, "b", 1)


def test_a_lost_moment_is_found(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """The negative control: a resume that forgets something must turn the verdict red."""
    script = tmp_path / "forgetful.py"
    script.write_text(
        "from headway.checkpoint.store import CheckpointStore\n"
        "load = CheckpointStore.load_into\n"
        "def forgetful(self, info, blocks, *others):\n"
        "    load(self, info, blocks, *others)\n"
        "    for name, block in blocks.items():\n"
        "        if name.startswith('optimizer.exp_avg_sq'):\n"
        "            block.local.zero_()\n"
        "CheckpointStore.load_into = forgetful\n"
    )
    (tmp_path / "sitecustomize.py").write_text(
        f"import builtins, sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        "import importlib.abc, importlib.machinery\n"
        "class Hook(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'headway.launch.session':\n"
        "            sys.meta_path.remove(self)\n"
        "            import forgetful\n"
        "        return None\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    import os
    import subprocess
    import sys

    result = subprocess.run(
        [sys.executable, "-m", "headway", "verify", str(tiny()), "--steps", "6"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "ok    the same again" in result.stdout
    assert "FAIL  killed at step 4, then resumed" in result.stdout
    assert "first difference: step 3, tensor optimizer.exp_avg_sq" in result.stdout
