"""`headway verify` says yes to what is reproducible, and names the place where something is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from headway.config import load_config
from headway.core.errors import ConfigError, DataError, HeadwayError
from headway.core.process.waiting import wait_until
from headway.lab.chaos.report import run_campaign
from headway.lab.verify.reproducibility import Difference, _Trainings, first_difference, verify
from support.runs import headway
from support.waits import LONG


@pytest.mark.slow
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
        (["determinism=elastic", "--other-workers", "1"], "the config already has"),
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

    @contextmanager
    def running(command: list[str], *_: object) -> Iterator[Any]:
        commands.append(command)
        yield SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr("headway.lab.verify.reproducibility.running", running)
    _Trainings(load_config(tiny(**sections)), steps=4, folder=tmp_path)._train("workers", "", workers=1)
    (command,) = commands
    loaded = load_config(command[command.index("train") + 1], command[command.index("train") + 2 :])
    assert loaded.checkpoint.remote is None
    assert loaded.run_directory == tmp_path / "workers"


def hashes(folder: Path, steps: Iterable[int]) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "hashes.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "tensors": {"a": "1"}}) + "\n" for step in steps)


def replace_training(runs: _Trainings, folder: Path, steps: Iterator[Iterable[int]], code: int = 0) -> None:
    """Have each training of one worker record these steps only, and end with a code."""

    def train(name: str, fault: str, workers: int) -> int:
        (folder / f"{name}.log").write_text("its last words")
        hashes(folder / name, next(steps))
        return code

    runs._train = train  # type: ignore[method-assign]
    runs._workers = lambda name: 1  # type: ignore[method-assign]


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
    runs, steps = _Trainings(load_config(tiny()), 6, tmp_path), iter(trainings)
    replace_training(runs, tmp_path, steps)
    if said is None:
        assert [step for step, _ in runs.run("killed", kill_at=3)] == [0, 1, 2, 3, 2, 3, 4, 5, 6]
        return
    with pytest.raises(HeadwayError, match=said):
        runs.run("killed", kill_at=3)


def test_a_training_on_another_number_of_workers_proves_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    runs = _Trainings(load_config(tiny()), 6, tmp_path)
    replace_training(runs, tmp_path, iter([range(7)]))
    with pytest.raises(HeadwayError, match="was to have 2 workers, but had 1"):
        runs.run("workers", workers=2)


def test_a_training_that_fails_passes_its_exit_code_on(tiny: Callable[..., Path], tmp_path: Path) -> None:
    runs = _Trainings(load_config(tiny()), 6, tmp_path)
    replace_training(runs, tmp_path, iter([[]]), code=3)
    with pytest.raises(DataError, match="its last words"):
        runs.run("reference")


def test_verify_in_a_process_that_is_a_worker_of_somebody_elses_is_refused(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its trainings would inherit that, and be one worker whatever number was asked for."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="already one of 1"):
        verify(load_config(tiny()), 4)
    with pytest.raises(ConfigError, match="already one of 1"):
        run_campaign(load_config(tiny()), tiny().parent / "chaos", kills=1, seed=0, worker_counts=[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_stopped_leaves_nothing_behind(
    tiny: Callable[..., Path], tmp_path: Path, number: signal.Signals
) -> None:
    """Not even where the working folder has a module with the name of one that libraries need."""
    work, scratch = tmp_path / "work", tmp_path / "scratch"
    work.mkdir()
    scratch.mkdir()
    (work / "queue.py").write_text("raise SystemExit('not the one that is meant')\n")
    command = [Path(sys.executable).with_name("headway"), "verify", tiny(train={"steps": 100_000}), "--steps", "90000"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored where tests run behind a shell
    process = subprocess.Popen(
        command, cwd=work, env={**os.environ, "TMPDIR": str(scratch)}, stderr=subprocess.PIPE, text=True
    )
    signal.signal(signal.SIGINT, before)
    family: list[psutil.Process] = []
    try:
        assert wait_until(lambda: any(scratch.glob("*/files/reference/metrics.jsonl")), LONG, 0.05)
        [training] = psutil.Process(process.pid).children()
        family = [training, *training.children(recursive=True)]
        process.send_signal(number)
        errors = process.communicate(timeout=LONG)[1]
        psutil.wait_procs(family, timeout=LONG)
        left = [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        process.kill()
        for one in family:  # or a test that fails leaves a training of 90,000 steps
            with suppress(psutil.NoSuchProcess):
                one.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert not left
    assert not any(scratch.glob("headway-verify-*"))


def test_the_first_difference_is_named() -> None:
    reference = [(0, {"a": "1", "b": "1"}), (1, {"a": "2", "b": "2"}), (2, {"a": "3", "b": "3"})]
    assert first_difference(reference, list(reference)) is None
    # A kill repeats steps; the second time is compared too.
    assert first_difference(reference, [*reference, (1, {"a": "2", "b": "9"})]) == Difference(1, "b", 1)
    assert first_difference(reference, [(0, {"a": "1", "b": "1"}), (1, {"a": "2"})]) == Difference(1, "b", 1)


@pytest.mark.slow
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
        "        if name == 'headway.run.session.session':\n"
        "            sys.meta_path.remove(self)\n"
        "            import forgetful\n"
        "        return None\n"
        "sys.meta_path.insert(0, Hook())\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "headway", "verify", str(tiny()), "--steps", "6"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "ok    repeated" in result.stdout
    assert "FAIL  killed at step 4, then resumed" in result.stdout
    assert "first difference: step 3, tensor optimizer.exp_avg_sq" in result.stdout
